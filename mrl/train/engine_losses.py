"""Handles lost engines during generation.

Their requests are made again, and their unfinished groups are recorded. The prompt that kills engines is found
(mrl/schedule/suspects.py) and set aside.
"""

from collections.abc import Sequence

from mrl.cluster.engine_fleet import EngineFleet
from mrl.errors import Interrupted, MrlError, described
from mrl.remote.process_logs import concerning, processes_of
from mrl.schedule.dispatch import Dispatcher
from mrl.schedule.groups import Group
from mrl.schedule.suspects import Suspects
from mrl.train.lost_engines import AGAIN, LostEngines, Unfinished
from mrl.train.numbered_prompts import NumberedPrompts
from mrl.vllm.requests import engine_of


class EngineLosses:
    """Handles the loss of engines. The caller holds the lock of the dispatcher."""

    def __init__(
        self,
        lost: LostEngines,
        suspects: Suspects,
        dispatcher: Dispatcher,
        prompts: NumberedPrompts,
        fleet: EngineFleet,
    ):
        """`suspects`: from losses before this start."""
        self._lost = lost
        self._suspects = suspects
        self._dispatcher = dispatcher
        self._prompts = prompts
        self._fleet = fleet
        self._is_noted = False  # whether the loss that ends the run is recorded

    def is_aside(self, group: Group) -> bool:
        """Tells whether no more responses to the group are requested. A suspected group runs alone."""
        prompt_id = self._prompts[group.number][0].prompt_id
        if prompt_id in self._suspects.alone:
            self._dispatcher.alone.add(group.number)
        if prompt_id not in self._suspects.aside or group.is_whole:
            return False
        print(f"prompt {prompt_id} is set aside: engines were lost under it, and under no other as often", flush=True)
        self._fleet.count("quarantined", 1)
        return True

    def make_again(self, engines: Sequence[str]) -> None:
        """Gives the requests of these engines to others, or to engines that come back. Records the loss.

        Raises LostLock if the run directory belongs to another process now.
        """
        groups = self._unfinished(engines)
        again = [sent for engine in engines for sent in self._dispatcher.lose(engine)]
        self._fleet.count("requests_again", len(again))
        print(f"{len(again)} requests of {', '.join(engines)} are made again", flush=True)
        try:
            self._lost.note(self._dispatcher.buffer.step, engines, AGAIN, groups)
        except OSError as refused:
            print(f"warning: what they were at is not noted: {described(refused)}", flush=True)
        self._suspects = self._lost.suspects_now()

    def noted(self, error: BaseException) -> BaseException:
        """Returns the error that ends the run, after recording the lost engine's groups once for the resumed run."""
        known = {engine_of(name) for name in processes_of(error)}
        sent_to = {sent.engine for sent in self._dispatcher.under_way.values()}
        engines = sorted({name for name in (*self._dispatcher.loads.tokens, *sent_to) if engine_of(name) in known})
        if self._is_noted or not engines or not isinstance(error, Interrupted):
            return error
        self._is_noted = True
        try:
            words = self._lost.note(self._dispatcher.buffer.step, engines, str(error), self._unfinished(engines))
        except (OSError, MrlError) as refused:
            words = f"what they were at is not noted: {described(refused)}"
        return concerning(Interrupted(f"{error}; {words}" if words else str(error)), *processes_of(error))

    def _unfinished(self, engines: Sequence[str]) -> list[Unfinished]:
        """Returns the unfinished groups of these engines."""
        groups = self._dispatcher.buffer.groups
        return [Unfinished(n, self._prompts[n][0].prompt_id, groups[n].tokens) for n in self._dispatcher.at(engines)]
