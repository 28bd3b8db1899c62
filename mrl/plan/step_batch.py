"""What the samples of one step take: on a rank's device as the inputs of its micro-batches, on hosts as columns.

Every sample counts at its limits. A rank lays out all micro-batches of a pass before the first one runs
(mrl/megatron/actor.py, `_inputs`), so it is rows of a whole pass that count, not those of a micro-batch: of the step
for log-probs, of a mini-batch for an update. Routes of R3 (mrl/data/routes.py) come with them, of all MoE layers on
every pipeline stage; what routers chose at the old log-probs (mrl/megatron/routing.py) stays until the next step's.
"""

from dataclasses import dataclass

from mrl.config.schedule_rules import schedule_of
from mrl.data.routes import RouteShape
from mrl.data.samples import column_bytes
from mrl.model import ModelSpec
from mrl.model.layout import TrainLayout
from mrl.plan.model_state import layer_kinds
from mrl.plan.plan_inputs import BatchPlan, PlanInputs

_F32, _F64, _INT64 = 4, 8, 8
_A_TOKEN = 2 * _INT64 + 2  # its number and position; whether it is real, whether it predicts
_A_TARGET = 3 * _INT64 + _F32  # who predicts it, its number, its place; its temperature
_NARROW_CHOICES = 256  # experts whose numbers fit into a byte (mrl/megatron/routing.py)


@dataclass(frozen=True)
class SampleBytes:
    """On one rank's device."""

    update: int = 0  # inputs of all micro-batches of a mini-batch
    log_prob: int = 0  # of the step, and what the pass hands out of each
    update_routes: int = 0  # that came with the samples
    log_prob_routes: int = 0
    recorded_routes: int = 0  # chosen at the old log-probs; they stay


def sample_bytes(inputs: PlanInputs, batch: BatchPlan, pp: int) -> SampleBytes:
    """Of a rank of pipeline stage `pp`."""
    of_step = -(-batch.samples // inputs.train.data)
    routed = _route_bytes(inputs.model) * (inputs.config.actor.router_replay == "R3")
    return SampleBytes(
        update=_input_bytes(inputs, batch.samples_per_rank, _response_arrays(inputs)),
        log_prob=_input_bytes(inputs, of_step, [1, *[_F32] * 2]),  # a mask; log-probs and entropies
        update_routes=_tokens(inputs, batch.samples_per_rank) * routed,
        log_prob_routes=_tokens(inputs, of_step) * routed,
        recorded_routes=0 if inputs.config.algorithm.on_policy else _recorded(inputs, of_step, pp),
    )


def _tokens(inputs: PlanInputs, rows: int) -> int:
    """Of one rank before sequence parallelism."""
    data = inputs.config.data
    return -(-rows * (data.max_prompt_length + data.max_response_length) // inputs.train.context)


def _input_bytes(inputs: PlanInputs, rows: int, arrays: list[int]) -> int:
    """`arrays`: bytes that each array by response position has for one."""
    response = rows * inputs.config.data.max_response_length
    return _tokens(inputs, rows) * _A_TOKEN + -(-response // inputs.train.context) * _A_TARGET + response * sum(arrays)


def _response_arrays(inputs: PlanInputs) -> list[int]:
    """What an update has by response position: a mask and a selection; old log-probs, advantages, and what losses may
    want.

    On policy a mask of what has log-probs in the place of the selection, and log-probs and entropies that it hands out.
    """
    algorithm = inputs.config.algorithm
    wanted = (algorithm.on_policy, algorithm.needs_reference, algorithm.rollout_correction.level is not None)
    return [1, 1, *[_F32] * (2 + sum(wanted))]


def _route_bytes(model: ModelSpec) -> int:
    """Of one token as it comes with its sample, in all MoE layers."""
    if not model.is_moe:
        return 0
    return RouteShape(model.num_layers, model.moe_layers, model.num_experts_per_tok, model.num_experts).token_bytes


def _recorded(inputs: PlanInputs, rows: int, pp: int) -> int:
    """Choices of this stage's routers for this rank's part of every sequence of the step."""
    model, train = inputs.model, inputs.train
    tokens = -(-_tokens(inputs, rows) // (train.tensor if train.sequence_parallel else 1))
    return (
        tokens
        * _moe_layers(model, train, pp)
        * (model.num_experts_per_tok or 0)
        * (1 if model.num_experts <= _NARROW_CHOICES else 2)
    )


def _moe_layers(model: ModelSpec, train: TrainLayout, pp: int) -> int:
    return sum(sum(layer_kinds(model, train, pp, vp)) for vp in range(train.virtual_pipeline))


def stored_bytes(inputs: PlanInputs, batch: BatchPlan) -> int:
    """Of all responses that exist at once, in the object stores of all nodes together, each once.

    Those of a step; where generation runs ahead, those of the steps that it may be ahead too; while groups are filtered
    by batches, those of one more batch of prompts beside the groups that were kept.
    """
    config = inputs.config
    if (schedule := schedule_of(config)) is not None:
        return _columns(inputs, schedule.places * config.rollout.n)
    further = (
        (config.data.gen_batch_size or config.data.train_batch_size)
        * config.rollout.n
        * config.algorithm.filter_groups.enable
    )
    return _columns(inputs, batch.samples + further)


def kept_group_bytes(inputs: PlanInputs) -> int:
    """Of one group in the process that writes them one by one: its columns, and the file that becomes of them.

    Nothing where no group waits for its step.
    """
    return 2 * _columns(inputs, inputs.config.rollout.n) if schedule_of(inputs.config) else 0


def held_bytes(inputs: PlanInputs, batch: BatchPlan) -> int:
    """On the host of a rank: its replica's rows (mrl/cluster/replica_rows.py) and what is computed of their tokens."""
    rows = -(-batch.samples // inputs.train.data)
    arrays = sum(_response_arrays(inputs)) + _F64 * inputs.config.algorithm.use_kl_in_reward  # penalties
    return _columns(inputs, rows) + rows * inputs.config.data.max_response_length * arrays


def _columns(inputs: PlanInputs, rows: int) -> int:
    """Of samples as columns."""
    data = inputs.config.data
    routes = _route_bytes(inputs.model) * (inputs.config.actor.router_replay == "R3")
    return rows * column_bytes(data.max_prompt_length, data.max_response_length, routes)
