"""Which lost processes a run does without, by placement and schedule: those that real runs have shown.

In order such a run ended with the bits of an undisturbed one; ready first every group that was issued was trained on
once, dropped by a counted cause, or on its way. Where a row says no, the way back is built and not shown, and a loss
ends the run with exit code 5, to be resumed.
"""

from typing import Literal, NamedTuple

from mrl.config.schema import RunConfig

Lost = Literal["engines", "ranks"]


class Survived(NamedTuple):
    """What a placement and a schedule do without."""

    placement: str
    schedule: str
    order: str
    engines: bool
    ranks: bool


SURVIVED = (
    Survived("separate", "sync", "in_order", engines=True, ranks=True),
    Survived("separate", "one_step_off", "in_order", engines=True, ranks=False),
    Survived("separate", "bounded", "in_order", engines=False, ranks=False),
    Survived("separate", "bounded", "ready_first", engines=False, ranks=False),
    Survived("colocated", "sync", "in_order", engines=False, ranks=False),
)


def survives(lost: Lost, placement: str, schedule: str, order: str = "in_order") -> bool:
    """Whether a run of this kind goes on without processes that it lost, until they are back."""
    asked = (placement, schedule, order)
    return any(getattr(row, lost) for row in SURVIVED if row[:3] == asked)


def restart_limit(lost: Lost, config: RunConfig) -> int:
    """Times that lost processes are started again, of an engine each; 0 where a loss ends the run."""
    trainer = config.trainer
    limits = {"engines": config.rollout.restart_limit, "ranks": trainer.restart_limit}
    if survives(lost, config.cluster.placement, trainer.schedule, trainer.order):
        return limits[lost]
    return 0


def limit_for_engines(config: RunConfig) -> int:
    """Times that ranks go back to a checkpoint because engines need weights that nobody holds any more."""
    if restart_limit("engines", config):
        return config.trainer.restart_limit
    return 0


def ends_in_words(config: RunConfig) -> str | None:
    """Which losses end a run whose limits allow restarts; None where none does."""
    limits = {"engines": config.rollout.restart_limit, "ranks": config.trainer.restart_limit}
    ending = [lost for lost, limit in limits.items() if limit and not restart_limit(lost, config)]
    if not ending:
        return None
    how = ", ".join((config.cluster.placement, config.trainer.schedule, config.trainer.order))
    return f"{' and '.join(ending)} ({how}) are not started again inside the run: a lost one ends it, to be resumed"
