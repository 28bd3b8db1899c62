"""Builds the schedule of generation that a configuration asks for, and refuses switches that do not go with it."""

from collections.abc import Iterator

from mrl.config.rule_row import RuleRow
from mrl.config.schema import RunConfig
from mrl.errors import Violation
from mrl.model import ModelSpec
from mrl.schedule.staleness import Schedule, violations

_BOUNDED_ONLY = {
    "max_staleness": 0,
    "partial_rollouts": False,
    "segment_tokens": None,
    "order": "in_order",
    "on_stale": "requeue",
}


_STALENESS = {"sync": 0, "one_step_off": 1}  # bounded: trainer.max_staleness


def schedule_of(config: RunConfig) -> Schedule:
    """Returns the schedule of generation."""
    trainer = config.trainer
    filtering = config.algorithm.filter_groups
    return Schedule(
        batch=config.data.train_batch_size,
        responses=config.rollout.n,
        max_tokens=config.data.max_response_length,
        max_staleness=_STALENESS.get(trainer.schedule, trainer.max_staleness),
        partial_rollouts=trainer.partial_rollouts,
        segment_tokens=trainer.segment_tokens,
        order=trainer.order,
        on_stale=trainer.on_stale,
        total_steps=trainer.total_training_steps,
        whole_batches=filtering.enable,
        draw=config.data.prompts_at_a_time,
        most_draws=filtering.max_num_gen_batches or None,
        on_exhausted=filtering.on_exhausted,
        rewards_decide=filtering.enable,
    )


def schedule_notes(config: RunConfig, _: ModelSpec) -> Iterator[str]:
    """Yields the bound of staleness as one sentence, and what weighs tokens of older weights."""
    schedule = schedule_of(config)
    if schedule.is_synchronous:
        return
    yield f"trainer.schedule {config.trainer.schedule}: {schedule.bound()}"
    if schedule.order == "ready_first":
        yield (
            "trainer.order ready_first: which groups a step trains on, and by which weights each token is made, "
            "depends on the engines' speed: no two runs are alike, and a resumed one goes on otherwise than it would"
        )
    if schedule.max_staleness > 1 and config.algorithm.rollout_correction.level is None:
        yield (
            f"algorithm.rollout_correction is off, and tokens are up to {schedule.max_staleness} steps old: the loss "
            "takes them for those of the weights that the step begins with; level token, mode truncate, high 2 weighs "
            "them"
        )


def _belongs(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    trainer = config.trainer
    if trainer.schedule == "bounded":
        return
    for name, usual in _BOUNDED_ONLY.items():
        if getattr(trainer, name) != usual:
            yield Violation(
                f"trainer.{name}",
                f"must be {usual} with schedule: {trainer.schedule}",
                "it is a key of bounded",
                (usual,),
            )


def _machines(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    for violation in violations(schedule_of(config)):
        yield Violation(f"trainer.{violation.field}", violation.rule, violation.why, violation.allowed)


def _partial(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    trainer = config.trainer
    if not trainer.partial_rollouts:
        if trainer.schedule == "bounded" and trainer.segment_tokens is not None:
            yield Violation(
                "trainer.segment_tokens", "needs partial_rollouts", "without it a response has one version", (None,)
            )
        return
    if trainer.segment_tokens is not None and trainer.segment_tokens >= config.data.max_response_length:
        rule = f"must be less than data.max_response_length, {config.data.max_response_length}"
        yield Violation(
            "trainer.segment_tokens",
            rule,
            "no response would have two versions",
            (config.data.max_response_length // 2, None),
        )
    if config.actor.router_replay == "R3" and trainer.order == "ready_first":
        rule = "must not be R3 with trainer.partial_rollouts and trainer.order: ready_first"
        why = (
            "an engine drops the routes of a response that it holds while weights change; in_order ends every request "
            "before, and R2 records the trainer's own"
        )
        yield Violation("actor.router_replay", rule, why, ("disabled", "R2"))


def _order(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    trainer = config.trainer
    if trainer.schedule != "bounded":
        return
    if trainer.order == "in_order" and trainer.on_stale != "requeue":
        why = "with in_order a step waits for its groups, so no group is ever stale"
        yield Violation("trainer.on_stale", "must be requeue with trainer.order: in_order", why, ("requeue",))
    if trainer.order == "ready_first" and trainer.segment_tokens is not None:
        why = "a response continues with new weights wherever it is when they arrive, not after a number of tokens"
        yield Violation("trainer.segment_tokens", "must be left out with trainer.order: ready_first", why, (None,))


SCHEDULE_RULES = (
    _belongs,
    _machines,
    RuleRow(
        "trainer.schedule",
        lambda c, m: (
            c.trainer.schedule != "sync" and not schedule_of(c).is_synchronous and c.cluster.placement == "colocated"
        ),
        "must be sync where placement is colocated",
        "engines and ranks take turns on the same devices; cluster.placement: separate has both at work at once",
        ("sync",),
    ),
    RuleRow(
        "algorithm.anchor",
        lambda c, m: schedule_of(c).max_staleness > 0 and c.algorithm.anchor != "recompute",
        "must be recompute with schedule one_step_off, or bounded with max_staleness above 0",
        "it treats the weights that generated as those that a step begins with, and here they are older; recompute "
        "keeps both apart",
        ("recompute",),
    ),
    _partial,
    _order,
    RuleRow(
        "data.gen_batch_size",
        lambda c, m: not schedule_of(c).is_synchronous and c.data.gen_batch_size not in (None, c.data.train_batch_size),
        "must be left out or be train_batch_size = {c.data.train_batch_size} with a schedule ahead of training",
        "groups are numbered in batches of a step, and those that are dropped are replaced one by one",
        lambda c, m: (None, c.data.train_batch_size),
    ),
    RuleRow(
        "algorithm.filter_groups.on_exhausted",
        lambda c, m: (
            not schedule_of(c).is_synchronous
            and c.algorithm.filter_groups.enable
            and c.algorithm.filter_groups.on_exhausted != "error"
        ),
        "must be error with a schedule ahead of training",
        "filtered groups are replaced one by one, so batches are never used up",
        ("error",),
    ),
)
