"""The rules of generation, and the places of its files."""

from collections.abc import Callable
from dataclasses import dataclass

from mrl.engine.requests import Sampling
from mrl.generate.lost_engines import LostEngines
from mrl.generate.rollouts import Judge, Responder
from mrl.generate.sampled_by import UNKNOWN, Sources
from mrl.generate.spool import Spool
from mrl.generate.train_state import TrainState
from mrl.schedule.rate import Rate, RateRules
from mrl.schedule.staleness import Schedule
from mrl.schedule.suspects import Suspects


@dataclass(frozen=True)
class GenerationRules:
    """The rules of a run's generation."""

    schedule: Schedule
    judge: Judge
    sampling: Sampling
    seed: int  # of the run
    spool: Spool  # gets finished groups that wait for their step
    lost: LostEngines
    suspects: Suspects  # prompts that were running on lost engines
    sources: Sources = UNKNOWN
    groups_again: Callable[[int], None] = lambda groups: None  # counts left groups that are generated again after all

    def serve(self, state: TrainState, may_go_back: bool) -> None:
        """Tells the spool that the weights of `state` finish groups from now on.

        `may_go_back`: whether runs may go back to these weights.
        """
        origin = None
        if may_go_back:
            origin = self.sources.by(state.step, state.weights)
        self.spool.serve(origin, self.schedule.batch)


def first_rate(schedule: Schedule, responder: Responder) -> Rate | None:
    """Returns the rate for ready_first, which starts with as many responses as engines take; None otherwise."""
    if schedule.order == "in_order":
        return None
    names = responder.engines.names
    most = responder.engines.max_requests
    every = schedule.max_groups * schedule.responses
    return Rate.start(RateRules(len(names), min(every, most * len(names)) if most else every))
