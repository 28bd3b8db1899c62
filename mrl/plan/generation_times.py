"""Predicts the seconds of a step's generation: the time of one decode step of an engine, times their number.

A decode step takes the host's time for it and for each of its sequences. On the device come the least time of a layer's
kernels, the exchanges between workers, and reading weights and caches. Computing counts instead where it takes longer.
The parts for Qwen3-30B-A3B on two H100 (TP2) with 128 sequences of 1,700 tokens:

    host 2.0 ms + 128 sequences x 60 us = 9.7 ms; 48 layers x 87 us = 4.2 ms; 96 all-reduces of 0.5 MB = 1.3 ms;
    28.4 GiB of weights at 2.5 TB/s = 12.1 ms; 10.0 GiB of caches = 4.3 ms; together 31.5 ms

Workers cut tensors, with two all-reduces a layer over `tensor`. Or experts are spread over all workers of an engine.
Then tokens of all its data-parallel ranks are gathered and their results scattered, once a layer each.
"""

from dataclasses import asdict, dataclass, fields

from mrl.model import expert_share
from mrl.plan.engine_memory import EngineMemory, cache_bytes_per_token, state_bytes_per_sequence
from mrl.plan.plan_inputs import BatchPlan, PlanInputs
from mrl.plan.step_work import longest_response, mean_flops_per_token, mean_lengths
from mrl.platforms.tuned_experts import is_tuned, shape_of_worker

_BF16 = 2  # bytes


@dataclass(frozen=True)
class DecodeStep:
    """Seconds of one decode step."""

    host: float
    layers: float  # least time of the layers' kernels
    exchange: float  # between the workers of an engine
    reading: float  # weights and caches, or computing where that takes longer

    @property
    def total(self) -> float:
        """Sum of all parts, since nothing overlaps."""
        return sum(getattr(self, part.name) for part in fields(self))


def decode_step(inputs: PlanInputs, engine: EngineMemory, sequences: float, context: float) -> DecodeStep:
    """Predicts one decode step of an engine whose data-parallel ranks have `sequences` each.

    `context`: their mean number of tokens so far.
    """
    rollout = inputs.rollout
    device = inputs.device
    assumed = inputs.assumptions
    of_a_model = (inputs.model, rollout.tensor, inputs.engine_element_bytes)
    states = 2 * state_bytes_per_sequence(*of_a_model)  # read and written
    cache = sequences * (context * cache_bytes_per_token(*of_a_model) + states)
    read = engine.weights * _weights_read(inputs, sequences) + cache
    computed = sequences * mean_flops_per_token(inputs.model, mean_lengths(inputs.config, assumed)) / rollout.tensor
    return DecodeStep(
        assumed.step_host + sequences * assumed.sequence_host,
        inputs.model.num_layers * assumed.decode_layers * device.decode_layer,
        inputs.model.num_layers * _exchange(inputs, sequences),
        max(
            read / (device.memory_rate * assumed.decode_memory_share),
            computed * _busiest(inputs) / (device.flops * assumed.prefill_mfu),
        ),
    )


def sequences_together(inputs: PlanInputs, batch: BatchPlan, engine: EngineMemory) -> float:
    """Returns the sequences that a data-parallel rank computes at once: its share, limited by max_num_seqs and the
    cache.
    """
    lengths = mean_lengths(inputs.config, inputs.assumptions)
    cached = engine.cache_tokens / inputs.rollout.data / lengths.total
    return max(1.0, min(_given(inputs, batch), inputs.config.rollout.max_num_seqs, cached))


def generation_seconds(inputs: PlanInputs, batch: BatchPlan, engine: EngineMemory) -> float:
    """Predicts the seconds for all samples of a step."""
    return sum(generation_parts(inputs, batch, engine).values())


def generation_parts(inputs: PlanInputs, batch: BatchPlan, engine: EngineMemory) -> dict[str, float]:
    """Predicts the seconds for all samples of a step by what they are spent on: full batches, then the last one.

    Sequences of the last batch end one by one, up to the longest. However they are spread, a decode step grows with its
    sequences by about the same each, so that their mean and the longest say all.
    """
    lengths = mean_lengths(inputs.config, inputs.assumptions)
    given = _given(inputs, batch)
    together = sequences_together(inputs, batch, engine)
    longest = longest_response(inputs.config, inputs.assumptions)
    context = lengths.prompt + lengths.response / 2
    steps = (given - together) / together * lengths.response
    full = asdict(decode_step(inputs, engine, together, context))
    last = asdict(decode_step(inputs, engine, max(1.0, together * lengths.response / longest), context))
    decoding = {part: steps * full[part] + longest * last[part] for part in full}
    return decoding | {"prompts": _prefill(inputs, batch, lengths.prompt)}


def _prefill(inputs: PlanInputs, batch: BatchPlan, prompt: float) -> float:
    """Predicts the seconds for prompts. With a prefix cache each is computed once, and else for each response."""
    computed = batch.samples
    if inputs.config.rollout.enable_prefix_caching:
        computed = batch.prompts
    flops = computed * prompt * mean_flops_per_token(inputs.model, mean_lengths(inputs.config, inputs.assumptions))
    return flops / (inputs.rollout.world_size * inputs.device.flops * inputs.assumptions.prefill_mfu)


def _given(inputs: PlanInputs, batch: BatchPlan) -> float:
    return batch.samples / (inputs.rollout.num_engines * inputs.rollout.data)


def _busiest(inputs: PlanInputs) -> float:
    """Returns the tokens of the busiest worker, divided by the mean, where experts are spread."""
    if inputs.rollout.expert > 1:
        return inputs.assumptions.expert_load
    return 1.0


def _weights_read(inputs: PlanInputs, sequences: float) -> float:
    """Returns the share of the weights that one decode step of a data-parallel rank reads.

    An expert that no token chose is not read. Where vLLM's kernel of experts is not tuned for their shape, reading them
    takes longer, which is counted as reading more.
    """
    model = inputs.model
    if not model.is_moe:
        return 1.0
    tokens = sequences * (inputs.rollout.data if inputs.rollout.workers_per_engine > inputs.rollout.tensor else 1)
    chosen = 1 - (1 - model.num_experts_per_tok / model.num_experts) ** tokens
    slower = 1.0 if experts_are_tuned(inputs) else inputs.assumptions.untuned_experts
    return 1 - expert_share(model) * (1 - chosen * slower)


def experts_are_tuned(inputs: PlanInputs) -> bool:
    """Tells whether engines find a configuration of vLLM's kernel of fused experts; true where they use another one."""
    device = inputs.device.vllm_name
    if not (inputs.model.is_moe and device):
        return True
    rollout = inputs.config.rollout
    return is_tuned(*expert_shape(inputs), device, rollout.quantization == "fp8", rollout.tuned_experts)


def expert_shape(inputs: PlanInputs) -> tuple[int, int]:
    """Returns the experts of one worker of an engine, and the inner width of each."""
    model, rollout = inputs.model, inputs.rollout
    return shape_of_worker(model.num_experts, model.moe_intermediate_size, rollout.expert, rollout.workers_per_engine)


def _exchange(inputs: PlanInputs, sequences: float) -> float:
    """Predicts the seconds for the exchanges of one layer."""
    rollout = inputs.rollout
    hidden = inputs.model.hidden_size * _BF16
    reduced = _all_reduce(inputs, rollout.tensor, sequences * hidden)
    if rollout.data == 1:
        return 2 * reduced
    gathered = _one_way(inputs, rollout.workers_per_engine, sequences * rollout.data * hidden * _busiest(inputs))
    return reduced + 2 * gathered


def _all_reduce(inputs: PlanInputs, workers: int, nbytes: float) -> float:
    """Predicts an all-reduce: its bytes go twice, with one start, since kernels of engines do both at once."""
    latency, rate = _link(inputs, workers)
    if workers == 1:
        return 0.0
    return latency + 2 * nbytes * (workers - 1) / workers / rate


def _one_way(inputs: PlanInputs, workers: int, nbytes: float) -> float:
    """Predicts a gather or a reduce-scatter."""
    latency, rate = _link(inputs, workers)
    return latency + nbytes * (workers - 1) / workers / rate


def _link(inputs: PlanInputs, workers: int) -> tuple[float, float]:
    """Returns the latency in seconds and the bytes per second among so many neighbouring workers."""
    device = inputs.device
    share = inputs.assumptions.link_share
    if workers <= inputs.config.cluster.n_gpus_per_node:
        return device.collective, device.node_rate * share
    return device.network_collective, device.network_rate * share
