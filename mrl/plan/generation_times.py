"""Predicts the seconds of a step's generation: the time of one decode step of an engine, times their number.

A decode step takes the host's time for it and for each of its sequences. On the device come the least time of a layer's
kernels, the exchanges between workers, and reading weights and caches. Computing counts instead where it takes longer.
The parts for Qwen3-30B-A3B on two H100 (TP2) with 128 sequences of 1,700 tokens:

    host 2.0 ms + 128 sequences x 60 us = 9.7 ms; 48 layers x 87 us = 4.2 ms; 96 all-reduces of 0.5 MB = 1.3 ms;
    28.4 GiB of weights at 2.5 TB/s = 12.1 ms; 10.0 GiB of caches = 4.3 ms; together 31.5 ms

Workers cut tensors, with two all-reduces a layer over `tensor`. Or experts are spread over all workers of an engine.
Then tokens of all its data-parallel ranks are gathered and their results scattered, once a layer each.

Drafted tokens are checked in the same decode step: weights and caches are read once for all of them, while computing,
experts that are read, and exchanges grow with them. Drafting itself comes on top (mrl/plan/draft_times.py).
"""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from mrl.config.schema import RunConfig
from mrl.config.schema_rollout import AUTO, MOST_AUTO, MTP
from mrl.config.speculation_rules import TRIED
from mrl.model import ModelSpec, expert_share
from mrl.plan.draft_times import (
    acceptance,
    drafted_tokens,
    is_auto,
    measured_acceptance,
    tokens_per_step,
    with_drafts,
)
from mrl.plan.engine_memory import EngineMemory, cache_bytes_per_token, state_bytes_per_sequence
from mrl.plan.plan_inputs import BatchPlan, PlanInputs, batch_plan, device_for, engine_of
from mrl.plan.step_work import longest_response, mean_flops_per_token, mean_lengths
from mrl.platforms.tuned_experts import is_tuned, shape_of_worker

# bytes
_BF16 = 2
_F32 = 4
# How often vLLM 0.32 reads or writes a drafted token's row of logits in float32 (v1/sample/rejection_sampler.py):
# conversion, temperature, softmax, the recovered token's maximum, and log-softmax for the returned log-prob.
_ROW_PASSES = 10


@dataclass(frozen=True)
class DecodeStep:
    """Seconds of one decode step."""

    host: float
    layers: float  # least time of the layers' kernels
    exchange: float  # between the workers of an engine
    reading: float  # weights and caches, or computing where that takes longer
    drafting: float = 0.0  # passes of what drafts, and the rows of logits of drafted tokens

    @property
    def total(self) -> float:
        """Sum of all parts, since nothing overlaps."""
        return sum(getattr(self, part.name) for part in fields(self))


def decode_step(inputs: PlanInputs, engine: EngineMemory, sequences: float, context: float) -> DecodeStep:
    """Predicts one decode step of an engine whose data-parallel ranks have `sequences` each.

    `context`: their mean number of tokens so far. With rollout.speculation it checks the drafted tokens of each.
    """
    rollout = inputs.rollout
    device = inputs.device
    assumed = inputs.assumptions
    drafted = drafted_tokens(inputs)
    tokens = sequences * (1 + drafted)
    of_a_model = (inputs.model, rollout.tensor, inputs.engine_element_bytes)
    # read once, and written after each token, since a later one may be rejected
    states = (2 + drafted) * state_bytes_per_sequence(*of_a_model)
    cache = sequences * (context * cache_bytes_per_token(*of_a_model) + states)
    read = engine.weights * _weights_read(inputs, tokens) + cache
    computed = tokens * mean_flops_per_token(inputs.model, mean_lengths(inputs.config, assumed)) / rollout.tensor
    return DecodeStep(
        assumed.step_host + sequences * assumed.sequence_host,
        inputs.model.num_layers * assumed.decode_layers * device.decode_layer,
        inputs.model.num_layers * _exchange(inputs, tokens),
        max(
            read / (device.memory_rate * assumed.decode_memory_share),
            computed * _busiest(inputs) / (device.flops * assumed.prefill_mfu),
        ),
        _drafting(inputs, engine, sequences, context),
    )


def _drafting(inputs: PlanInputs, engine: EngineMemory, sequences: float, context: float) -> float:
    """Predicts the seconds of a decode step for drafting, one pass of the layer and of the output layer a token.

    Every drafted token has a row of logits in float32 besides, which the sampler passes over several times.
    """
    drafted = drafted_tokens(inputs)
    if not drafted:
        return 0.0
    model = inputs.model
    rollout = inputs.rollout
    assumed = inputs.assumptions
    rate = inputs.device.memory_rate * assumed.decode_memory_share
    rows = sequences * drafted * model.vocab_size * _F32 * _ROW_PASSES / rate
    if not engine.draft:  # a look-up on the host
        return rows + assumed.draft_host
    head = model.vocab_size * model.hidden_size // rollout.tensor
    keys = cache_bytes_per_token(model, rollout.tensor, inputs.engine_element_bytes) / model.attending_layers
    read = engine.draft * _weights_read(inputs, sequences) + head * inputs.engine_element_bytes
    flops = mean_flops_per_token(model, mean_lengths(inputs.config, assumed)) / model.num_layers / rollout.tensor
    computed = sequences * (flops + 2 * head)
    one = (
        assumed.draft_host
        + assumed.decode_layers * inputs.device.decode_layer
        + _exchange(inputs, sequences)
        + max(
            (read + sequences * context * keys) / rate,
            computed * _busiest(inputs) / (inputs.device.flops * assumed.prefill_mfu),
        )
    )
    return rows + drafted * one


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

    With rollout.speculation a decode step gives each sequence several tokens. Sequences of the last batch end one by
    one, up to the longest. However they are spread, a decode step grows with its sequences by about the same each, so
    that their mean and the longest say all.
    """
    speculation = inputs.config.rollout.speculation
    if is_auto(inputs):
        choice = draft_choice(inputs, batch)
        choice = replace(choice, up_to=min(choice.up_to, speculation.max_num_seqs or choice.up_to))
        full, last = _scheduled(inputs, batch, engine, choice)
    elif speculation is not None and speculation.max_num_seqs:
        choice = DraftChoice(speculation.tokens, speculation.max_num_seqs, 0.0)
        full, last = _scheduled(inputs, batch, engine, choice)
    else:
        full, last = _batches(inputs, batch, engine)
    prompt = mean_lengths(inputs.config, inputs.assumptions).prompt
    return {part: full[part] + last[part] for part in full} | {"prompts": _prefill(inputs, batch, prompt)}


def _batches(inputs: PlanInputs, batch: BatchPlan, engine: EngineMemory) -> tuple[dict[str, float], dict[str, float]]:
    """Predicts the seconds of decode steps, by what they are spent on: of full batches, and of the last one."""
    lengths = mean_lengths(inputs.config, inputs.assumptions)
    given = _given(inputs, batch)
    together = sequences_together(inputs, batch, engine)
    longest = longest_response(inputs.config, inputs.assumptions) / tokens_per_step(inputs)
    response = lengths.response / tokens_per_step(inputs)
    context = lengths.prompt + lengths.response / 2
    steps = (given - together) / together * response
    full = asdict(decode_step(inputs, engine, together, context))
    last = asdict(decode_step(inputs, engine, _last_together(inputs, together), context))
    return {part: steps * spent for part, spent in full.items()}, {part: longest * s for part, s in last.items()}


# ---------------------------------------------------------------- when drafts pay


@dataclass(frozen=True)
class DraftChoice:
    """The best number of drafted tokens, and up to which batch they pay."""

    tokens: int  # for a sequence in a decode step; 0: drafts never pay
    up_to: int  # sequences of an engine's data-parallel rank
    seconds: float  # of a step's generation, drafts being off in larger batches


def draft_choice(inputs: PlanInputs, batch: BatchPlan) -> DraftChoice:
    """Finds how many tokens to draft (rollout.speculation.tokens: auto).

    A model with several predicting layers drafts as many tokens at once, or a multiple of them.
    """
    layers = max(1, inputs.model.left_out_layers)
    tokens = [number for number in range(1, MOST_AUTO + 1) if number <= layers or number % layers == 0]
    found = DraftChoice(0, 0, sum(generation_parts(with_drafts(inputs, 0), batch, engine_of(inputs)).values()))
    for number in tokens:
        drafting = with_drafts(inputs, number)
        choice = DraftChoice(number, pays_up_to(drafting), 0.0)
        full, last = _scheduled(drafting, batch, engine_of(drafting), choice)
        prompt = mean_lengths(inputs.config, inputs.assumptions).prompt
        seconds = sum(full.values()) + sum(last.values()) + _prefill(inputs, batch, prompt)
        if choice.up_to and seconds < found.seconds:
            found = replace(choice, seconds=seconds)
    return found


def draft_section(inputs: PlanInputs, batch: BatchPlan) -> dict[str, Any] | None:
    """Returns what drafts give, as a plan has it; None for a model that engines cannot draft with.

    A run that drafts none is told what the model's predicting layers would give. `saved` is what they save of the
    seconds of a step's generation, or cost where it is below 0.
    """
    speculation = inputs.config.rollout.speculation
    if speculation is None and not (inputs.model.left_out_layers and inputs.model.family in TRIED):
        return None
    plain = with_drafts(inputs, 0)
    without = generation_seconds(plain, batch, engine_of(plain))
    report = {"used": speculation is not None, "method": speculation.method if speculation else MTP}
    if speculation is not None and speculation.method != MTP:
        if not measured_acceptance(inputs):
            return report | {"seconds_without": without, "acceptance": []}
        best = None
    else:
        best = draft_choice(inputs, batch)
    chosen = inputs
    if speculation is None or speculation.tokens == AUTO:
        if not best.tokens:
            return report | {"seconds_without": without, "best_tokens": 0, "tokens": 0}
        chosen = with_drafts(inputs, best.tokens)
    seconds = generation_seconds(inputs if speculation else chosen, batch, engine_of(chosen))
    return report | {
        "tokens": drafted_tokens(chosen),
        "acceptance": acceptance(chosen),
        "tokens_per_step": tokens_per_step(chosen),
        "seconds": seconds,
        "seconds_without": without,
        "pays_up_to_sequences": pays_up_to(chosen),
        "best_tokens": best.tokens if best else None,
    }


def with_found_drafts(config: RunConfig, model: ModelSpec) -> RunConfig:
    """Returns the configuration with the drafted tokens that a plan finds, and the batch up to which they pay.

    It is the same without tokens: auto. Where drafts never pay, engines draft none.
    """
    speculation = config.rollout.speculation
    if speculation is None or speculation.tokens != AUTO:
        return config
    inputs = PlanInputs.of(config, model, device_for(config))
    choice = draft_choice(inputs, batch_plan(config, inputs.train))
    found = None
    if choice.tokens:
        up_to = min(choice.up_to, speculation.max_num_seqs or choice.up_to)
        found = speculation.model_copy(update={"tokens": choice.tokens, "max_num_seqs": up_to})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"speculation": found})})


def pays_up_to(inputs: PlanInputs) -> int:
    """Returns the most sequences of a data-parallel rank with which drafts make a token faster; 0 where they never do.

    They are at most rollout.max_num_seqs. With few sequences of a mixture of experts drafts may not pay either, as
    further tokens are further experts to read.
    """
    most = inputs.config.rollout.max_num_seqs
    sizes = sorted({min(most, round(2 ** (step / 4))) for step in range(4 * most.bit_length() + 1)})
    paying = [size for size in sizes if _pays(inputs, size)]
    if not paying:
        return 0
    last = paying[-1]
    beyond = next((size for size in sizes if size > last), last + 1)
    while beyond - last > 1:
        middle = (last + beyond) // 2
        if _pays(inputs, middle):
            last = middle
        else:
            beyond = middle
    return last


def _pays(inputs: PlanInputs, sequences: int) -> bool:
    plain = with_drafts(inputs, 0)
    lengths = mean_lengths(inputs.config, inputs.assumptions)
    context = lengths.prompt + lengths.response / 2
    drafting = decode_step(inputs, engine_of(inputs), sequences, context).total / tokens_per_step(inputs)
    return drafting < decode_step(plain, engine_of(plain), sequences, context).total


def _scheduled(
    inputs: PlanInputs, batch: BatchPlan, engine: EngineMemory, choice: DraftChoice
) -> tuple[dict[str, float], dict[str, float]]:
    """Predicts what `_batches` does, with drafts in batches of at most `choice.up_to`. The last batch counts as one."""
    speculation = inputs.config.rollout.speculation
    method = speculation.method if speculation is not None else MTP
    drafting = _batches(with_drafts(inputs, choice.tokens, method), batch, engine)
    plain = _batches(with_drafts(inputs, 0), batch, engine)
    together = sequences_together(inputs, batch, engine)
    full = drafting if together <= choice.up_to else plain
    last = drafting if _last_together(inputs, together) <= choice.up_to else plain
    return full[0], last[1]


def _last_together(inputs: PlanInputs, together: float) -> float:
    """Returns the mean sequences of the last batch, which lasts as long as the longest response."""
    share = mean_lengths(inputs.config, inputs.assumptions).response / longest_response(
        inputs.config, inputs.assumptions
    )
    return max(1.0, together * share)


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
