"""FLOPs of a step and the seconds that its phases would take at the stated rates. Predicted, not measured; nothing overlaps."""

from dataclasses import dataclass

from mrl.model import expert_share, forward_flops_per_token
from mrl.plan.engine_memory import EngineMemory, cache_bytes_per_token
from mrl.plan.inputs import BatchPlan, PlanInputs, recompute_of


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of a sample, assumed."""

    prompt: float
    response: float

    @property
    def total(self) -> float:
        return self.prompt + self.response


def mean_lengths(inputs: PlanInputs) -> Lengths:
    """The configured limits times the assumed shares."""
    data, a = inputs.config.data, inputs.assumptions
    return Lengths(data.max_prompt_length * a.prompt_share, data.max_response_length * a.response_share)


def step_flops(inputs: PlanInputs, batch: BatchPlan) -> dict[str, float]:
    """Floating-point operations of each phase of one step, over all devices."""
    lengths = mean_lengths(inputs)
    forward = batch.samples * lengths.total * forward_flops_per_token(inputs.model, (lengths.total + 1) / 2)
    again = recompute_of(inputs.config).granularity == "full"
    return {"log_prob": forward, "update": forward * (4 if again else 3), "generation": forward}


def phase_seconds(inputs: PlanInputs, batch: BatchPlan, engine: EngineMemory) -> dict[str, float]:
    """Predicted seconds of generation, log-probs and update."""
    flops, a = step_flops(inputs, batch), inputs.assumptions
    world = inputs.train.world_size * inputs.device.flops
    busy = 1 - bubble(inputs, batch)
    return {
        "generation": _generation(inputs, batch, engine, flops["generation"]),
        "log_prob": flops["log_prob"] / (world * a.log_prob_mfu) / busy,
        "update": flops["update"] / (world * a.train_mfu) / busy,
    }


def bubble(inputs: PlanInputs, batch: BatchPlan) -> float:
    """Share of the time that a pipeline stage waits: (p - 1) / (v m + p - 1), Narayanan et al., arXiv 2104.04473, section 2.2."""
    waiting = inputs.train.pipeline - 1
    return waiting / (inputs.train.virtual_pipeline * batch.micro_batches + waiting)


def _generation(inputs: PlanInputs, batch: BatchPlan, engine: EngineMemory, flops: float) -> float:
    """Waves of as many sequences as the cache and max_num_seqs hold; the last tokens are those of the longest response."""
    rollout, lengths, device, a = inputs.rollout, mean_lengths(inputs), inputs.device, inputs.assumptions
    groups = rollout.num_engines * rollout.data
    per_group = batch.samples / groups
    fits = engine.cache_tokens / rollout.data / lengths.total
    together = max(1.0, min(per_group, inputs.config.rollout.max_num_seqs, fits))
    steps = per_group / together * lengths.response
    tail = inputs.config.data.max_response_length - lengths.response
    cache = together * lengths.total / 2 * cache_bytes_per_token(inputs.model, rollout.tensor, inputs.engine_element_bytes)
    read = (engine.weights * _touched(inputs, together) + cache) / (device.memory_rate * a.decode_memory_share)
    alone = engine.weights * _touched(inputs, 1) / (device.memory_rate * a.decode_memory_share)
    compute = flops / (rollout.world_size * device.flops * a.prefill_mfu)
    return max(steps * read, compute) + tail * alone


def _touched(inputs: PlanInputs, sequences: float) -> float:
    """Share of the weights that one decode step of a data-parallel rank reads: an expert that no token chose is not read."""
    model = inputs.model
    if not model.is_moe:
        return 1.0
    everybody = sequences * (inputs.rollout.data if inputs.rollout.expert > 1 else 1)
    chosen = 1 - (1 - model.num_experts_per_tok / model.num_experts) ** everybody
    return 1 - expert_share(model) * (1 - chosen)
