"""Bytes of the samples of one step: inputs of micro-batches on a rank's device, columns on hosts.

Every sample counts at its limits. A rank lays out micro-batches when a pass needs them (mrl/rank/packing.py). That
is one at a time, or under an interleaved pipeline as many as it has stages. Outputs of a pass stay until its end.
Routes of R3 (mrl/data/routes.py) come with a micro-batch, for the MoE layers of the stage. The routers' choices during
the pass for old log-probs (mrl/rank/routing.py) stay until the next step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mrl.config.schedule_rules import schedule_of
from mrl.config.schema import RunConfig
from mrl.data.routes import RouteShape
from mrl.data.samples import column_bytes
from mrl.model import ModelSpec
from mrl.model.layout import TrainLayout
from mrl.plan.activations import MicroBatchShape
from mrl.plan.model_state import layer_kinds
from mrl.plan.plan_inputs import BatchPlan, PlanInputs
from mrl.plan.teacher_costs import teacher_inputs

_BOOL = 1
_F32 = 4
_F64 = 8
_INT64 = 8
_A_TOKEN = 2 * _INT64 + 2  # its id and position; whether it is real, whether it predicts
_A_TARGET = 3 * _INT64 + _F32  # the token that predicts it, its id, its place; its temperature
_NARROW_CHOICES = 256  # experts whose numbers fit into a byte (mrl/rank/routing.py)


@dataclass(frozen=True)
class SampleBytes:
    """Bytes of samples on one rank's device."""

    update: int = 0  # inputs of the laid-out micro-batches, and outputs of a mini-batch
    log_prob: int = 0  # the same for the passes over a step
    update_routes: int = 0  # came with the samples of these micro-batches
    log_prob_routes: int = 0
    recorded_routes: int = 0  # chosen in the pass for old log-probs; they stay


def sample_bytes(inputs: PlanInputs, batch: BatchPlan, pp: int) -> SampleBytes:
    """Returns the bytes of samples that a rank of pipeline stage `pp` holds."""
    config = inputs.config
    of_step = -(-batch.samples // inputs.train.data)
    routed = _route_bytes(inputs.model, _moe_layers(inputs.model, inputs.train, pp)) * _routed(inputs)
    response = config.data.max_response_length
    outputs = 2 * _F32 + _BOOL  # log-probs and entropies, and their mask
    return SampleBytes(
        update=_input_bytes(inputs, batch.micro, _response_arrays(inputs))
        + batch.samples_per_rank * response * outputs * config.algorithm.on_policy
        + 2 * batch.micro.rows * batch.micro.response * teacher_top_bytes(inputs),  # the policy's own, and gradients
        log_prob=_input_bytes(inputs, batch.log_prob_micro, [_BOOL]) + of_step * response * outputs,
        update_routes=_tokens_at_once(inputs, batch.micro) * routed,
        log_prob_routes=_tokens_at_once(inputs, batch.log_prob_micro) * routed,
        recorded_routes=0 if config.algorithm.on_policy else _recorded(inputs, of_step, pp),
    )


def _at_once(inputs: PlanInputs) -> int:
    """Returns the number of micro-batches that are laid out at once."""
    if inputs.train.virtual_pipeline > 1:
        return inputs.train.pipeline
    return 1


def _tokens_at_once(inputs: PlanInputs, micro: MicroBatchShape) -> int:
    """Returns the tokens of the micro-batches that one rank has laid out at once, before sequence parallelism."""
    return -(-micro.tokens // inputs.train.context) * _at_once(inputs)


def _tokens(inputs: PlanInputs, rows: int) -> int:
    """Returns the tokens of so many rows on one rank, before sequence parallelism."""
    data = inputs.config.data
    return -(-rows * data.max_sample_length // inputs.train.context)


def _input_bytes(inputs: PlanInputs, micro: MicroBatchShape, arrays: list[int]) -> int:
    """Returns the bytes of a micro-batch's inputs. `arrays`: bytes an element of each array by response position."""
    response = micro.rows * micro.response * _at_once(inputs)
    return (
        _tokens_at_once(inputs, micro) * _A_TOKEN
        + -(-response // inputs.train.context) * _A_TARGET
        + response * sum(arrays)
    )


def _response_arrays(inputs: PlanInputs) -> list[int]:
    """Returns the bytes an element of each array by response position, in a micro-batch of an update.

    These are a mask, a selection, old log-probs, advantages, and further inputs of losses. On policy there are no old
    log-probs, and a mask of the computed ones replaces the selection.
    """
    algorithm = inputs.config.algorithm
    wanted = (
        not algorithm.on_policy,
        algorithm.needs_reference,
        inputs.config.distillation.in_loss,
        algorithm.rollout_correction.level is not None,
    )
    return [_BOOL, _BOOL, *[_F32] * (1 + sum(wanted)), teacher_top_bytes(inputs)]


def teacher_top_bytes(inputs: PlanInputs) -> int:
    """Returns the bytes of a teacher's tokens at one token, with their log-probs; 0 where they are not needed."""
    distillation = inputs.config.distillation
    return 2 * _F32 * distillation.distillation_loss.topk * distillation.over_top_k


def _route_bytes(model: ModelSpec, moe_layers: int) -> int:
    """Returns the bytes of one token's routes in so many MoE layers, as they come with its sample."""
    if not model.is_moe:
        return 0
    shape = RouteShape.of(model)
    return moe_layers * shape.topk * shape.dtype.itemsize


def _recorded(inputs: PlanInputs, rows: int, pp: int) -> int:
    """Returns the choices of this stage's routers for this rank's part of every sequence of the step."""
    model = inputs.model
    train = inputs.train
    tokens = -(-_tokens(inputs, rows) // (train.tensor if train.sequence_parallel else 1))
    choice_bytes = 1 if model.num_experts <= _NARROW_CHOICES else 2
    return tokens * _moe_layers(model, train, pp) * (model.num_experts_per_tok or 0) * choice_bytes


def _moe_layers(model: ModelSpec, train: TrainLayout, pp: int) -> int:
    chunks = (layer_kinds(model, train, pp, vp) for vp in range(train.virtual_pipeline))
    return sum(kind.has_experts for chunk in chunks for kind in chunk)


def stored_bytes(inputs: PlanInputs) -> int:
    """Returns the bytes of all responses that exist at once, each counted once, in the object stores of all nodes.

    These are the responses of a step, and of the steps that generation may be ahead. While groups are filtered by
    draws, one more draw of prompts exists beside the kept groups. Groups that may fill up the step count too.
    """
    schedule = schedule_of(inputs.config)
    fill_up = schedule.step_limit is not None and schedule.on_exhausted == "unfiltered"
    groups = schedule.max_groups + (schedule.batch if fill_up else 0)
    return _columns(inputs, groups * schedule.responses)


def stored_beside_validation(inputs: PlanInputs, batch: BatchPlan) -> int:
    """Returns the part of `stored_bytes` that still exists while validation prompts are answered after a step.

    These are the step's responses, and those ahead of it. It is 0 where only the untrained model is validated.
    """
    if inputs.config.trainer.test_freq < 1:
        return 0
    is_synchronous = schedule_of(inputs.config).is_synchronous
    if is_synchronous:
        return _columns(inputs, batch.samples)
    return stored_bytes(inputs)


def read_by_start(inputs: PlanInputs, batch: BatchPlan) -> int:
    """Returns the part of `stored_bytes` that a start may read on the driver's node, instead of asking engines.

    The spool has the responses of a step. The checkpoint has all those ahead of it.
    """
    if schedule_of(inputs.config).is_synchronous:
        return _columns(inputs, batch.samples)
    return stored_bytes(inputs)


def validation_bytes(config: RunConfig, prompts: int) -> int:
    """Returns the bytes of the answers to so many validation prompts, which have no routes.

    They lie in the object stores of the engines' nodes until they are written.
    """
    responses = prompts * config.rollout.val_kwargs.n
    data = config.data
    return column_bytes(responses * data.max_prompt_length, responses * data.max_response_length)


def written_group_bytes(inputs: PlanInputs) -> int:
    """Returns the bytes of one group in the process that writes groups one by one: its columns, and its file."""
    return 2 * _columns(inputs, inputs.config.rollout.n)


def fetched_share(inputs: PlanInputs, ranks: Sequence[int]) -> float:
    """Returns the share of a step's responses that the ranks of one node fetch.

    Tokens are fetched once a replica, of the actor and of models beside it. Each rank of the actor fetches its part of
    the routes, which no other model reads.
    """
    train = inputs.train
    model = inputs.model
    replicas = _fetched_rows(inputs, ranks)
    if not _routed(inputs):
        return replicas
    parts = (
        sum(_moe_layers(model, train, train.dense_coords(rank).pp) for rank in ranks)
        / len(model.moe_layers)
        / _parts_of_tokens(inputs)
        / train.data
    )
    tokens = _columns(inputs, 1, routes=False)
    routes = _columns(inputs, 1) - tokens
    return (tokens * replicas + routes * parts) / (tokens + routes)


def _fetched_rows(inputs: PlanInputs, ranks: Sequence[int]) -> float:
    """Returns the share of a step's rows whose tokens the ranks of one node fetch, for any of their models.

    A critic or teacher of as many replicas as the actor has the actor's rows. Otherwise its rows count as others. So do
    those of a critic whose mini-batches are no whole ones of the actor.
    """
    own = _replicas_of(inputs.train, ranks)
    further = 0.0
    config = inputs.config
    others = ((inputs.critic, config.critic.keeps_rows_of(config.actor)), (teacher_inputs(inputs), True))
    for other, keeps_rows in others:
        if other is None:
            continue
        replicas = _replicas_of(other.train, ranks)
        if keeps_rows and other.train.data == inputs.train.data:
            own |= replicas
        else:
            further += len(replicas) / other.train.data
    return min(1.0, len(own) / inputs.train.data + further)


def _replicas_of(train: TrainLayout, ranks: Sequence[int]) -> set[int]:
    return {train.dense_coords(rank).dp for rank in ranks}


def held_bytes(inputs: PlanInputs, batch: BatchPlan, pp: int) -> int:
    """Returns the bytes that a rank of pipeline stage `pp` holds on its host.

    These are its replica's rows (mrl/rank/rank_batch.py), its part of their routes, and values computed for their
    tokens.
    """
    data = inputs.config.data
    algorithm = inputs.config.algorithm
    rows = -(-batch.samples // inputs.train.data)
    arrays = sum(_response_arrays(inputs)) + _F32 * algorithm.on_policy
    arrays += _F64 * (algorithm.use_kl_in_reward + inputs.config.distillation.in_advantages)  # penalties
    if algorithm.needs_critic:
        arrays += 2 * _F32 + _F64  # values and returns, and advantages before they are whitened
    own_bytes = _columns(inputs, rows, routes=False) + rows * data.max_response_length * arrays
    own_bytes += _asked_of_teacher(inputs, batch) + _asked_of_critic(inputs, batch)
    if not _routed(inputs):
        return own_bytes
    tokens = rows * data.max_sample_length
    routes = _route_bytes(inputs.model, _moe_layers(inputs.model, inputs.train, pp))
    return own_bytes + tokens * _INT64 + -(-tokens // _parts_of_tokens(inputs)) * routes  # places and routes


def _asked_of_teacher(inputs: PlanInputs, batch: BatchPlan) -> int:
    """Returns the bytes of the rows that a rank fetches for its replica of the teacher, and of their scores."""
    teacher = teacher_inputs(inputs)
    if teacher is None:
        return 0
    rows = -(-batch.samples // teacher.train.data)
    return _columns(inputs, rows, routes=False) + _score_bytes(inputs, rows)


def _asked_of_critic(inputs: PlanInputs, batch: BatchPlan) -> int:
    """Returns the bytes of the rows that a rank's replica of the critic fetches, with their values and returns."""
    own = inputs.critic
    if own is None:
        return 0
    rows = -(-batch.samples // own.train.data)
    estimates = rows * inputs.config.data.max_response_length * (2 * _F32 + _BOOL)
    return _columns(inputs, rows, routes=False) + estimates


def score_bytes(inputs: PlanInputs, batch: BatchPlan) -> int:
    """Returns the bytes of what ranks hand to others in a step, in the object store of a node.

    They are a teacher's scores, and then a critic's values or the returns that it is trained on.
    """
    of_teacher = _score_bytes(inputs, batch.samples) * inputs.config.distillation.enabled
    of_critic = batch.samples * inputs.config.data.max_response_length * (_F32 + _BOOL)
    return max(of_teacher, of_critic * inputs.config.algorithm.needs_critic)


def _score_bytes(inputs: PlanInputs, rows: int) -> int:
    return rows * inputs.config.data.max_response_length * (_F32 + teacher_top_bytes(inputs))


def _routed(inputs: PlanInputs) -> bool:
    """Returns whether routes come with samples."""
    return inputs.config.actor.router_replay == "R3" and inputs.model.is_moe


def _parts_of_tokens(inputs: PlanInputs) -> int:
    """Returns the number of parts into which a sequence is cut before routers see it."""
    train = inputs.train
    return train.context * (train.tensor if train.sequence_parallel else 1)


def _columns(inputs: PlanInputs, rows: int, routes: bool = True) -> int:
    """Returns the bytes of so many samples as columns."""
    data = inputs.config.data
    by_token = _route_bytes(inputs.model, len(inputs.model.moe_layers)) * (routes and _routed(inputs))
    return rows * column_bytes(data.max_prompt_length, data.max_response_length, by_token)
