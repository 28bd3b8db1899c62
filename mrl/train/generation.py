"""Where a step's rollouts come from: generated in turn with training, or taken from what was generated ahead of it."""

from typing import Protocol

from mrl.config.schema import RunConfig
from mrl.data.order import PromptStream
from mrl.record.metrics import PhaseTimer
from mrl.train.drawn_groups import draw_rollouts
from mrl.train.resume import TrainState
from mrl.train.rollouts import Responder, Rollouts, gather_rollouts


class Generation(Protocol):
    """What the loop asks, whoever generates when."""

    def begin(self) -> None:
        """Engines hold the weights that training begins from."""

    def take(self, state: TrainState, timer: PhaseTimer) -> Rollouts:
        """What the step after `state` trains on; phases "gen" and "reward"."""

    def settle(self, timer: PhaseTimer, saves: bool) -> None:
        """Returns once engines may be given other weights; phases "pause" and "settle".

        `saves`: a checkpoint of the step is written.
        """

    def advanced(self, state: TrainState) -> TrainState:
        """Engines hold the weights of `state`, and generation goes on by them; the state with what it had under way."""

    def given_up(self, state: TrainState) -> TrainState:
        """The state with what it had under way, where engines may never have come to hold its weights: the run ends."""

    def close(self) -> None:
        """Ends what is under way."""


class InTurn:
    """Engines and ranks work one after the other."""

    def __init__(self, config: RunConfig, responder: Responder, prompts: PromptStream):
        self._config, self._responder, self._prompts = config, responder, prompts

    def begin(self) -> None:
        """Nothing is generated before it is asked for."""

    def take(self, state: TrainState, timer: PhaseTimer) -> Rollouts:
        """Generates and scores the step's batch; see gather_rollouts and draw_rollouts."""
        gather = draw_rollouts if self._config.algorithm.filter_groups.enable else gather_rollouts
        return gather(self._config, self._responder, self._prompts, state.cursor, state.step + 1, timer)

    def settle(self, timer: PhaseTimer, saves: bool) -> None:
        """Nothing is under way."""

    def advanced(self, state: TrainState) -> TrainState:
        """Nothing is under way."""
        return state

    def given_up(self, state: TrainState) -> TrainState:
        """Nothing is under way."""
        return state

    def close(self) -> None:
        """Nothing is under way."""
