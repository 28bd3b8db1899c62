"""A response of several turns as a state machine: what it waits for, what its budgets allow, and why it ends.

    SAMPLING --sampled--> ACTING --answered, the last--> TELLING --told--> SAMPLING ...
        |                   | ^                             |
        |-- left -----------|-+                             |
        +---- stop, length, | turns, seconds, ------------- | context, closed, environment ----> ENDED
        +-------------------------------------------------- + a border, or an engine that gives back ----> HELD

One that is held goes on later from its tokens, maybe by other weights and at another engine.

An example: budgets of 2 turns and 60 tokens; the model samples 9 tokens with two calls, of which one is malformed.

    event                               state       what is to be done
    sampled(9, problems=(None, "..."))  ACTING      call 0 is made; call 1 is answered already, by its problem
    answered(1, 0, "408")               TELLING     the answers become tokens, in the order of the calls
    told(12)                            SAMPLING    a request for at most 60 - 21 tokens
    sampled(4)                          ENDED       "stop": no call

Nothing is lost: every call is answered once, by its result, its failure or its problem. Order and times of answers
change nothing, as long as they come in time. What comes late, or twice, is no event. Time is counted while answers are
awaited and at no other: how long an engine takes, with others in its line, ends nothing. Tokens, tools and clocks are
of whoever drives it: here are numbers and texts of answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class ConversationState(StrEnum):
    """What a conversation waits for."""

    SAMPLING = "sampling"  # tokens of an engine
    ACTING = "acting"  # answers of tools or of an environment
    TELLING = "telling"  # answers as tokens
    HELD = "held"  # other weights, or another engine: another conversation goes on from its tokens
    ENDED = "ended"


class Stop(StrEnum):
    """Why a conversation ended."""

    STOP = "stop"  # the model called nothing more
    LENGTH = "length"  # the model sampled the last token that the whole may have
    TURNS = "turns"  # it called in its last turn
    SECONDS = "seconds"  # its calls took too long
    CONTEXT = "context"  # answers leave no room for one more token
    CLOSED = "closed"  # the environment ended it
    ENVIRONMENT = "environment"  # the environment failed: no reward is due


@dataclass(frozen=True)
class Budgets:
    """What a conversation may take."""

    tokens: int  # of the whole response, context too
    turns: int
    calls: int  # of one turn
    seconds: float  # of all turns together, each from its calls until the last of them is answered
    characters: int  # of one answer


@dataclass(frozen=True)
class Conversation:
    """Immutable: each event gives the conversation after it. Raises ValueError for one that cannot be now."""

    budgets: Budgets
    border: int | None = None  # tokens with which it is held unless it has ended; context alone may go beyond
    state: ConversationState = ConversationState.SAMPLING
    stop: Stop | None = None  # why it ended
    tokens: int = 0  # of the response so far, context too
    turn: int = 1  # counted from 1
    answers: tuple[str | None, ...] = ()  # to the calls of this turn, in their order; None: not yet
    acting_since: float = 0.0  # seconds of any clock that only goes forward, the same as of all events
    acting_s: float = 0.0  # that the answers of this turn took, or were waited for in vain
    acted_s: float = 0.0  # that the answers of the turns before took

    @property
    def max_tokens(self) -> int:
        """Tokens that the next request may add."""
        end = self.budgets.tokens if self.border is None else min(self.border, self.budgets.tokens)
        return end - self.tokens

    @property
    def _left(self) -> int:
        return self.budgets.tokens - self.tokens

    @property
    def open_calls(self) -> tuple[int, ...]:
        """Numbers of the calls of this turn without an answer."""
        return tuple(number for number, answer in enumerate(self.answers) if answer is None)

    @property
    def deadline(self) -> float:
        """When time for the answers of this turn is up, by the clock of `acting_since`."""
        return self.acting_since + self.budgets.seconds - self.acted_s

    def sampled(
        self, added: int, now: float, problems: Sequence[str | None] = (), cut_off: bool = False
    ) -> "Conversation":
        """A request has added so many tokens. `problems`: of each call in them what is wrong with it, None for none.

        `cut_off`: it did not end by itself, and its calls are not looked at: where tokens are left it is held.
        """
        self._must_be(ConversationState.SAMPLING)
        if not 0 <= added <= self.max_tokens:
            raise ValueError(f"a request for at most {self.max_tokens} tokens added {added}")
        after = replace(self, tokens=self.tokens + added)
        if cut_off:
            if after._left:
                return after.held()
            return after._ended(Stop.LENGTH)
        if not problems:
            return after._ended(Stop.STOP)
        if self.turn >= self.budgets.turns:
            return after._ended(Stop.TURNS)
        answers = tuple(self._answer_at_once(number, problem) for number, problem in enumerate(problems))
        return replace(after, state=ConversationState.ACTING, answers=answers, acting_since=now)._acted(now)

    def left(self, now: float) -> "Conversation":
        """Nobody waits for what would be sampled: it counts as a turn, and the agent's next request is awaited."""
        self._must_be(ConversationState.SAMPLING)
        if self.turn >= self.budgets.turns:
            return self._ended(Stop.TURNS)
        return replace(self, state=ConversationState.ACTING, answers=(None,), acting_since=now)

    def _answer_at_once(self, number: int, problem: str | None) -> str | None:
        if problem is None and number >= self.budgets.calls:
            problem = f"not called: at most {self.budgets.calls} calls at once"
        if problem is None:
            return None
        return shortened(problem, self.budgets.characters)

    def answered(self, turn: int, number: int, answer: str, now: float) -> "Conversation":
        """Call `number` of a turn has its answer: the text of a result or of a failure."""
        if self.state is not ConversationState.ACTING or turn != self.turn or self.answers[number] is not None:
            return self
        if now >= self.deadline:
            return self._out_of_time(now)
        answers = list(self.answers)
        answers[number] = shortened(answer, self.budgets.characters)
        return replace(self, answers=tuple(answers))._acted(now)

    def _acted(self, now: float) -> "Conversation":
        if self.open_calls:
            return self
        return replace(self, state=ConversationState.TELLING, acting_s=now - self.acting_since)

    def rewound(self, tokens: int) -> "Conversation":
        """What is told follows so many tokens, of another line of the conversation; turns and seconds are of all."""
        self._must_be(ConversationState.TELLING)
        return replace(self, tokens=tokens)

    def told(self, context: int) -> "Conversation":
        """The answers are so many tokens of context, behind the response; where they leave no room, they are not."""
        self._must_be(ConversationState.TELLING)
        if context < 0:
            raise ValueError(f"{context} tokens of context")
        if context >= self._left:
            return self._ended(Stop.CONTEXT)
        after = replace(
            self,
            state=ConversationState.SAMPLING,
            tokens=self.tokens + context,
            turn=self.turn + 1,
            answers=(),
            acting_s=0.0,
            acted_s=self.acted_s + self.acting_s,
        )
        if after.max_tokens > 0:
            return after
        return after.held()

    def held(self) -> "Conversation":
        """It is given back before its next request."""
        self._must_be(ConversationState.SAMPLING)
        return replace(self, state=ConversationState.HELD)

    def passed(self, now: float) -> "Conversation":
        """Time has passed, which counts while it acts."""
        if self.state is ConversationState.ACTING and now >= self.deadline:
            return self._out_of_time(now)
        return self

    def _out_of_time(self, now: float) -> "Conversation":
        return replace(self, acting_s=now - self.acting_since)._ended(Stop.SECONDS)

    def closed(self) -> "Conversation":
        """The environment has ended it by its answer, which nobody reads any more."""
        if self.state is ConversationState.ENDED:
            return self
        return self._ended(Stop.CLOSED)

    def failed(self) -> "Conversation":
        """The environment has failed, whatever it ended by."""
        return self._ended(Stop.ENVIRONMENT)

    def _must_be(self, state: ConversationState) -> None:
        if self.state is not state:
            raise ValueError(f"a conversation that is {self.state} got an event of one that is {state}")

    def _ended(self, stop: Stop) -> "Conversation":
        return replace(self, state=ConversationState.ENDED, stop=stop, answers=())


def shortened(text: str, characters: int) -> str:
    """The text where it is at most so long; else its beginning and its end, with what was left out said in between."""
    if len(text) <= characters:
        return text
    said = f"\n[{len(text)} characters, of which {characters} are shown]\n"
    half = characters // 2
    return text[: characters - half] + said + text[len(text) - half :]
