"""Costs of a frozen vision tower (model.vision): bytes of ranks, engines and hosts, and FLOPs of a step.

    ranks of the first stage    the whole tower; one image's pass; features of a micro-batch. On the host: features of
                                all images of a step, once for each rank
    each worker of an engine    the whole tower, inside the engine's share of the device; outside of it vLLM's cache of
                                features, and a pass, since both are made after vLLM has measured what its passes take

How many tokens of a prompt are images' is not known before the data is read. A plan counts all of them, in one image:
an upper bound of what images take, and none of what the text takes.
"""

from mrl.model.tower_sizes import VisionTower
from mrl.plan.plan_inputs import BatchPlan, PlanInputs
from mrl.plan.step_work import mean_lengths

_ENCODER_STEPS = 2  # longest samples of which vLLM's cache has all features (mrl/engine/seeing_models.py)


def vision_section(inputs: PlanInputs, batch: BatchPlan) -> dict[str, float] | None:
    """Returns what a plan says of the tower; None for a run of text. Patches a second are those of all ranks."""
    tower = inputs.tower
    if tower is None:
        return None
    tokens = mean_lengths(inputs.config, inputs.assumptions).prompt
    patches = batch.prompts * tokens * tower.merged
    return {
        "parameters": tower.parameters,
        "tokens_of_a_prompt": tokens,
        "flops": looking_flops(inputs, batch),
        "seconds_of_ranks": looking_seconds(inputs, batch),
        "seconds_of_engines": engine_looking_seconds(inputs, batch),
        "patches_per_second": patches / looking_seconds(inputs, batch),
    }


def rank_bytes(inputs: PlanInputs, batch: BatchPlan, pp: int) -> int:
    """Returns the bytes on the device of a rank of stage `pp`: the tower, its largest pass and a micro-batch's
    features.
    """
    tower = inputs.tower
    if tower is None or pp:
        return 0
    micro = max(batch.micro.rows, batch.log_prob_micro.rows)
    tokens = micro * inputs.config.data.max_prompt_length
    numbers = tower.parameters + _pass_numbers(inputs, tower) + tokens * tower.feature_numbers()
    return numbers * inputs.element_bytes


def host_bytes(inputs: PlanInputs, batch: BatchPlan, pp: int) -> int:
    """Returns the bytes on the host of a rank of stage `pp`: features of a step's images, which its replica reads.

    Rows are dealt one by one, so that a replica may have a response to each prompt.
    """
    tower = inputs.tower
    if tower is None or pp:
        return 0
    prompts = min(batch.prompts, -(-batch.samples // inputs.train.data))
    tokens = prompts * mean_lengths(inputs.config, inputs.assumptions).prompt
    return round(tokens * tower.feature_numbers() * inputs.element_bytes)


def worker_outside(inputs: PlanInputs) -> int:
    """Returns the bytes that a worker takes outside of its share: vLLM's cache of features, and the tower's pass."""
    tower = inputs.tower
    if tower is None:
        return 0
    cached = _ENCODER_STEPS * inputs.config.data.max_sample_length * tower.feature_numbers()
    return (cached + _pass_numbers(inputs, tower)) * inputs.engine_element_bytes


def looking_flops(inputs: PlanInputs, batch: BatchPlan) -> float:
    """Returns the FLOPs of looking at the images of a step's prompts once."""
    tower = inputs.tower
    if tower is None:
        return 0.0
    return batch.prompts * tower.flops(mean_lengths(inputs.config, inputs.assumptions).prompt * tower.merged)


def looking_seconds(inputs: PlanInputs, batch: BatchPlan) -> float:
    """Predicts the seconds in which ranks look at a step's images.

    The ranks of a replica's first stage share its images out; the others wait.
    """
    prompts = min(batch.prompts, -(-batch.samples // inputs.train.data))
    ranks = inputs.train.tensor * inputs.train.context
    flops = looking_flops(inputs, batch) * prompts / batch.prompts
    return flops / (ranks * inputs.device.flops * inputs.assumptions.compute_share)


def engine_looking_seconds(inputs: PlanInputs, batch: BatchPlan) -> float:
    """Predicts the seconds in which engines look at a step's images, each of their workers at its part."""
    flops = looking_flops(inputs, batch)
    return flops / (inputs.rollout.world_size * inputs.device.flops * inputs.assumptions.prefill_mfu)


def _pass_numbers(inputs: PlanInputs, tower: VisionTower) -> int:
    """Returns the numbers of the largest pass, of an image that fills a prompt: queries, keys, values and an MLP."""
    patches = inputs.config.data.max_prompt_length * tower.merged
    return patches * (6 * tower.hidden_size + 2 * tower.intermediate_size + tower.patch_numbers)
