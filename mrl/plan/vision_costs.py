"""Costs of a vision tower (model.vision): bytes of ranks, engines and hosts, and FLOPs of a step.

    ranks of the first stage    the whole tower; in passes of the model also one image's pass and features of a
                                micro-batch. On the host: features of all images of a step, once for each rank
    each worker of an engine    the whole tower, inside the engine's share of the device; outside of it vLLM's cache of
                                features, and a pass over all images of a step, since both are made after vLLM has
                                measured what its passes take

A tower that is trained lies in Megatron's buffers. model_state.py counts it with the other weights there, and with it
its gradients and its optimizer's state. Its features are computed again for each mini-batch but the first one, whose
weights are those of the log-probs, and for a reference. Then each image is computed with a graph, and backward.

How many tokens of a prompt are images' is not known before the data is read, and how many of an answer not before a
tool is called. A plan counts all of them, in one image:

    without tools and agents        prompts, each once for all its responses
    rollout.turns                   and responses, since a tool may answer with images alone; shipped ones do not
    rollout.agent                   samples, since each agent writes prompts of its own

Bytes are those of lengths at their limits (data.max_prompt_length, data.max_response_length), FLOPs and seconds those
of mean lengths, as the text model's.
"""

from mrl.config.schema import RunConfig
from mrl.model.tower_sizes import VisionTower
from mrl.plan.plan_inputs import BatchPlan, PlanInputs, engine_passes
from mrl.plan.step_work import mean_lengths
from mrl.plan.teacher_costs import teacher_inputs

_GRADIENT = 4  # bytes of a feature's gradient
_ENCODER_STEPS = 2  # longest samples of which vLLM's cache has all features (mrl/engine/seeing_models.py)
_PIXEL = 4  # bytes of one of a patch's numbers, which the processor makes in float32


def vision_section(inputs: PlanInputs, batch: BatchPlan) -> dict[str, float] | None:
    """Returns what a plan says of the tower; None for a run of text.

    FLOPs are those of ranks that look once, each replica at its rows' images, and so are patches a second.
    """
    tower = inputs.tower
    if tower is None:
        return None
    lengths = mean_lengths(inputs.config, inputs.assumptions)
    patches = sum(count * tokens for count, tokens in _looked_at_by_ranks(inputs, batch)) * tower.merged
    return {
        "parameters": tower.parameters,
        "tokens_of_a_prompt": lengths.prompt,
        "tokens_of_a_response": lengths.response if _shows_later(inputs.config) else 0.0,
        "most_tokens_of_a_sample": _most_of_a_sample(inputs.config),
        "flops": rank_looking_flops(inputs, batch),
        "looks_of_ranks": sum(looks(inputs, batch).values()),
        "seconds_of_ranks": looking_seconds(inputs, batch),
        "seconds_of_engines": engine_looking_seconds(inputs, batch),
        "patches_per_second": patches / looking_seconds(inputs, batch),
    }


def tower_bytes(inputs: PlanInputs, pp: int) -> int:
    """Returns the bytes of frozen towers, which stay on the device of a rank of stage `pp` in every phase."""
    tower = inputs.tower
    if tower is None:
        return 0
    numbers = _second_towers(inputs, pp)
    if not pp and inputs.model.trained_tower is None:
        numbers += tower.parameters
    return numbers * inputs.element_bytes


def looking_bytes(inputs: PlanInputs, batch: BatchPlan, pp: int, update: bool = False) -> int:
    """Returns the bytes on the device of a rank of stage `pp` while it looks: the tower's largest pass, and features of
    a micro-batch. Those of a step are on the host. In an `update` a trained tower's pass is kept for going backward.
    """
    tower = inputs.tower
    if tower is None or pp:
        return 0
    numbers = _micro_batch_tokens(inputs.config, batch) * tower.feature_numbers()
    if update and inputs.model.trained_tower is not None:
        numbers += _graph_numbers(inputs, tower)
    return numbers * inputs.element_bytes + _pass_bytes(tower, _largest_image(inputs.config), inputs.element_bytes)


def _shows_later(config: RunConfig) -> bool:
    """Tells whether responses may have images of their own, from tools or agents. Shipped tools answer in text."""
    turns = config.rollout.turns
    if turns is None or config.rollout.agent is not None:
        return config.rollout.agent is not None
    return bool(turns.path or turns.mcp_servers or turns.environments)


def _most_of_a_sample(config: RunConfig) -> int:
    """Returns the tokens of images that a sample has at most."""
    return config.data.max_sample_length if _shows_later(config) else config.data.max_prompt_length


def _micro_batch_tokens(config: RunConfig, batch: BatchPlan) -> int:
    """Returns the tokens of images that a micro-batch has at most. A token budget may be filled with prompts, whose
    responses are short.
    """
    shapes = (batch.micro, batch.log_prob_micro)
    if _shows_later(config) or config.actor.use_dynamic_bsz:
        return max(shape.tokens for shape in shapes)
    return max(shape.rows for shape in shapes) * config.data.max_prompt_length


def _largest_image(config: RunConfig) -> int:
    """Returns the tokens of an image at most: it lies in a prompt, or in a response."""
    if _shows_later(config):
        return max(config.data.max_prompt_length, config.data.max_response_length)
    return config.data.max_prompt_length


def _replica_tokens(inputs: PlanInputs, batch: BatchPlan) -> int:
    """Returns the tokens of different images that a replica's rows of a step have at most."""
    data = inputs.config.data
    rows = -(-batch.samples // inputs.train.data)
    if inputs.config.rollout.agent is not None:
        return rows * data.max_sample_length
    of_prompts = _replica_prompts(inputs, batch) * data.max_prompt_length
    return of_prompts + (rows * data.max_response_length if _shows_later(inputs.config) else 0)


def _second_towers(inputs: PlanInputs, pp: int) -> int:
    """Returns the weights of the towers of a critic and of a teacher, of whose stages any may be on a rank."""
    numbers = 0
    if inputs.config.algorithm.needs_critic and (not pp or inputs.config.critic.layout is not None):
        numbers += inputs.tower.parameters
    teacher = teacher_inputs(inputs)
    if teacher is not None and teacher.model.tower is not None:
        numbers += teacher.model.tower.parameters
    return numbers


def host_bytes(inputs: PlanInputs, batch: BatchPlan, pp: int) -> int:
    """Returns the bytes on the host of a rank of stage `pp`: features of a step's images, which its replica reads."""
    tower = inputs.tower
    if tower is None or pp:
        return 0
    tokens = _replica_tokens(inputs, batch)
    features = tokens * tower.feature_numbers() * inputs.element_bytes
    models = 1 + inputs.config.algorithm.needs_critic + inputs.config.distillation.enabled
    if inputs.model.trained_tower is None:
        return models * features
    of_reference = 1 + inputs.config.algorithm.needs_reference
    mini_batches = 1 if inputs.config.actor.shuffles else batch.mini_batches
    of_reference += models - 1
    return round(of_reference * features + tokens * tower.feature_numbers() * _GRADIENT / mini_batches)


def worker_outside(inputs: PlanInputs) -> int:
    """Returns the bytes that a worker takes outside of its share: vLLM's cache of features, and the tower's pass."""
    tower = inputs.tower
    if tower is None:
        return 0
    return kept_features(inputs) + _pass_bytes(tower, image_tokens(inputs.config), inputs.engine_element_bytes)


def kept_features(inputs: PlanInputs) -> int:
    """Returns the bytes of vLLM's cache of features, which stays on the device while an engine sleeps."""
    if inputs.tower is None:
        return 0
    return image_tokens(inputs.config) * inputs.tower.feature_numbers() * inputs.engine_element_bytes


def image_tokens(config: RunConfig) -> int:
    """Returns the tokens of images that a step of an engine computes at most, all in one pass, and those in its cache.

    Both limits of vLLM 0.32 are max_num_batched_tokens, or what a model calls its largest image if that is more
    (v1/core/encoder_cache_manager.py, compute_mm_encoder_budget).
    """
    return max(engine_passes(config)["batched_tokens"], _ENCODER_STEPS * config.data.max_sample_length)


_Images = tuple[tuple[int, float], ...]  # how many images, and the tokens of each


def looking_flops(inputs: PlanInputs, batch: BatchPlan) -> float:
    """Returns the FLOPs of looking at the images of a step once, as engines do."""
    if inputs.tower is None:
        return 0.0
    return _flops_of(inputs.tower, _looked_at(inputs, batch.prompts, batch.samples))


def _looked_at(inputs: PlanInputs, prompts: int, rows: int) -> _Images:
    """Returns the different images of so many rows, which answer so many prompts."""
    lengths = mean_lengths(inputs.config, inputs.assumptions)
    if inputs.config.rollout.agent is not None:
        return ((rows, lengths.total),)
    of_answers = ((rows, lengths.response),) if _shows_later(inputs.config) else ()
    return ((prompts, lengths.prompt), *of_answers)


def _looked_at_by_ranks(inputs: PlanInputs, batch: BatchPlan) -> _Images:
    """Returns the images of a step that ranks look at, each replica at those of its rows."""
    of_replica = _looked_at(inputs, _replica_prompts(inputs, batch), -(-batch.samples // inputs.train.data))
    return tuple((inputs.train.data * count, tokens) for count, tokens in of_replica)


def _flops_of(tower: VisionTower, images: _Images) -> float:
    return sum(count * tower.flops(tokens * tower.merged) for count, tokens in images)


def looks(inputs: PlanInputs, batch: BatchPlan) -> dict[str, float]:
    """Returns in which phases ranks look at a step's images, and how often; a backward pass counts as two looks."""
    if inputs.tower is None:
        return {}
    algorithm = inputs.config.algorithm
    seconds = _looks_of_second_models(inputs)
    if inputs.model.trained_tower is None:
        first = "ref" if algorithm.needs_reference else "update"
        return seconds | {first if algorithm.on_policy else "log_prob": 1.0}
    of_an_epoch = 4.0  # for features, then with a graph and backward
    if inputs.config.actor.shuffles:  # responses to one prompt are in several mini-batches
        of_an_epoch *= min(batch.mini_batches, batch.responses_per_prompt)
    passes = {"update": batch.epochs * of_an_epoch}
    if not algorithm.on_policy:  # the first mini-batch has the weights of the log-probs
        passes = {"log_prob": 1.0, "update": passes["update"] - 1.0 / batch.mini_batches}
    if algorithm.needs_reference:
        passes["ref"] = 1.0
    return seconds | passes


def _looks_of_second_models(inputs: PlanInputs) -> dict[str, float]:
    """Returns the looks of a critic and of a teacher through towers of their own, in looks through the actor's."""
    found = {"values": 1.0} if inputs.config.algorithm.needs_critic else {}
    teacher = teacher_inputs(inputs)
    if teacher is not None and teacher.model.tower is not None:
        found["teacher"] = teacher.model.tower.parameters / inputs.tower.parameters
    return found


def rank_looking_flops(inputs: PlanInputs, batch: BatchPlan) -> float:
    """Returns the FLOPs in which ranks look at a step's images once, each replica at those of its rows."""
    if inputs.tower is None:
        return 0.0
    return _flops_of(inputs.tower, _looked_at_by_ranks(inputs, batch))


def _replica_prompts(inputs: PlanInputs, batch: BatchPlan) -> int:
    """Returns the prompts of a replica's rows: rows are dealt one by one, so that it may have a response to each."""
    return min(batch.prompts, -(-batch.samples // inputs.train.data))


def looking_seconds(inputs: PlanInputs, batch: BatchPlan) -> float:
    """Predicts the seconds in which ranks look at a step's images once.

    The ranks of a replica's first stage share its images out; the others wait.
    """
    ranks = inputs.train.data * inputs.train.tensor * inputs.train.context
    return rank_looking_flops(inputs, batch) / (ranks * inputs.device.flops * inputs.assumptions.compute_share)


def engine_looking_seconds(inputs: PlanInputs, batch: BatchPlan) -> float:
    """Predicts the seconds in which engines look at a step's images, each of their workers at its part."""
    flops = looking_flops(inputs, batch)
    return flops / (inputs.rollout.world_size * inputs.device.flops * inputs.assumptions.prefill_mfu)


def _pass_bytes(tower: VisionTower, tokens: int, element_bytes: int) -> int:
    """Returns the bytes of a pass over images of so many tokens: pixels, and queries, keys, values and an MLP."""
    numbers = 6 * tower.hidden_size + 2 * tower.intermediate_size
    return tokens * tower.merged * (numbers * element_bytes + tower.patch_numbers * _PIXEL)


def _graph_numbers(inputs: PlanInputs, tower: VisionTower) -> int:
    """Returns the numbers that a pass keeps for going backward, of the largest image.

    In each layer these are two norms and their inputs, queries, keys and values, what attention gives, and the MLP's
    parts.
    """
    patches = _largest_image(inputs.config) * tower.merged
    parts = 3 if tower.gated else 2  # before and after the activation, and of a gate
    layer = 8 * tower.hidden_size + parts * tower.intermediate_size
    mergers = (1 + tower.features) * 3 * tower.hidden_size
    return patches * (tower.layers * layer + mergers)
