"""What generation goes by, and where it keeps things."""

from dataclasses import dataclass

from mrl.schedule.ledger import Fingerprint
from mrl.schedule.rate import Rate, RateRules
from mrl.schedule.staleness import Schedule
from mrl.schedule.suspects import Suspects
from mrl.train.lost_engines import LostEngines
from mrl.train.resume import TrainState
from mrl.train.rollouts import Judge, Responder
from mrl.train.sampled_by import UNKNOWN, Sources
from mrl.train.spool import Spool
from mrl.vllm.requests import Sampling


@dataclass(frozen=True)
class GenerationRules:
    """What a run's generation goes by."""

    schedule: Schedule
    judge: Judge
    sampling: Sampling
    seed: int  # of the run
    made_by: Fingerprint
    spool: Spool  # gets what is finished and waits for its step
    lost: LostEngines
    suspects: Suspects  # prompts that engines were lost under
    sources: Sources = UNKNOWN

    def serve(self, state: TrainState, may_go_back: bool) -> None:
        """Tells the spool that groups are finished by the weights of `state` from now on, and whether runs may go back
        to these.
        """
        origin = None
        if may_go_back:
            origin = self.sources.by(state.step, state.weights)
        self.spool.serve(origin, self.schedule.batch)


def first_rate(schedule: Schedule, responder: Responder) -> Rate | None:
    """ready_first: of responses under way, at first as many as engines take."""
    if schedule.order == "in_order":
        return None
    names = responder.engines.names
    most = responder.engines.max_requests
    every = schedule.max_groups * schedule.responses
    return Rate.start(RateRules(len(names), min(every, most * len(names)) if most else every))
