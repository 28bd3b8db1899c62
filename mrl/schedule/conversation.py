"""A response of several turns as a state machine: its state, its budgets, and the reason of its end.

    SAMPLING --sampled--> ACTING --answered, the last--> ANSWERED --appended--> SAMPLING ...
        |                   |                               |
        +---- stop, length, | turns, seconds, ------------- | context, closed, environment ----> ENDED
        +-------------------------------------------------- + version boundary, an engine that gives back ----> HELD

A held conversation continues later from its tokens, possibly with other weights and at another engine.

Example: budgets of 2 turns and 60 tokens. The model samples 9 tokens with two calls, and one of these is malformed.

    event                               state       what is to be done
    sampled(9, problems=(None, "..."))  ACTING      call 0 is made; call 1 is answered already, by its problem
    answered(1, 0, "408")               ANSWERED    the answers become tokens, in the order of the calls
    appended(12)                        SAMPLING    a request for at most 60 - 21 tokens
    sampled(4)                          ENDED       "stop": no call

Every call is answered exactly once, by its result, its failure or its problem. Order and times of answers have no
effect if they are in time. Late and repeated answers are ignored. Time counts only while answers are awaited, so a slow
engine ends no conversation. The caller has tokens, tools and clocks. This file has only numbers and the texts of
answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class ConversationState(StrEnum):
    """The state of a conversation: what it waits for."""

    SAMPLING = "sampling"  # waits for tokens of an engine
    ACTING = "acting"  # waits for answers of tools or of an environment
    ANSWERED = "answered"  # waits for answers in the form of tokens
    HELD = "held"  # waits for other weights or another engine: another conversation continues from its tokens
    ENDED = "ended"


class Stop(StrEnum):
    """The reason why a conversation ended."""

    STOP = "stop"  # the model made no further call
    LENGTH = "length"  # the model sampled the last token of the budget
    TURNS = "turns"  # the model made a call in its last turn
    SECONDS = "seconds"  # calls took too long
    CONTEXT = "context"  # answers leave no room for another token
    CLOSED = "closed"  # the environment ended it
    ENVIRONMENT = "environment"  # the environment failed, so no reward is due


@dataclass(frozen=True)
class Budgets:
    """The budgets of a conversation."""

    tokens: int  # of the whole response, with context
    turns: int
    calls: int  # in one turn
    seconds: float  # for all turns together, each from its calls until the last of them is answered
    characters: int  # in one answer


@dataclass(frozen=True)
class Conversation:
    """A conversation. It is immutable: each event returns the conversation after it.

    Raises ValueError for an event that cannot happen in the present state.
    """

    budgets: Budgets
    version_boundary: int | None = (
        None  # number of tokens at which it is held unless it has ended; only context may exceed it
    )
    state: ConversationState = ConversationState.SAMPLING
    stop: Stop | None = None  # the reason of its end
    tokens: int = 0  # tokens of the response so far, with context
    turn: int = 1  # counted from 1
    answers: tuple[str | None, ...] = ()  # to the calls of this turn, in order; None: not yet answered
    acting_since: float = 0.0  # seconds of any monotonic clock, the same for all events
    acting_s: float = 0.0  # duration of this turn's answers, also if they were awaited in vain
    acted_s: float = 0.0  # duration of earlier turns' answers

    @property
    def max_tokens(self) -> int:
        """Returns how many tokens the next request may add."""
        end = self.budgets.tokens if self.version_boundary is None else min(self.version_boundary, self.budgets.tokens)
        return end - self.tokens

    @property
    def _left(self) -> int:
        return self.budgets.tokens - self.tokens

    @property
    def open_calls(self) -> tuple[int, ...]:
        """Returns the numbers of this turn's calls without an answer."""
        return tuple(number for number, answer in enumerate(self.answers) if answer is None)

    @property
    def deadline(self) -> float:
        """Returns the time limit for the answers of this turn, by the clock of `acting_since`."""
        return self.acting_since + self.budgets.seconds - self.acted_s

    def sampled(
        self, added: int, now: float, problems: Sequence[str | None] = (), cut_off: bool = False
    ) -> "Conversation":
        """Records that a request has added tokens.

        `problems` has the problem of each call in them, None for a valid call. `cut_off`: the request did not end by
        itself. Then its calls are ignored, and it is held if tokens are left.
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

    def _answer_at_once(self, number: int, problem: str | None) -> str | None:
        if problem is None and number >= self.budgets.calls:
            problem = f"not called: at most {self.budgets.calls} calls at once"
        if problem is None:
            return None
        return shortened(problem, self.budgets.characters)

    def answered(self, turn: int, number: int, answer: str, now: float) -> "Conversation":
        """Records the answer to call `number` of a turn: the text of a result or of a failure."""
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
        return replace(self, state=ConversationState.ANSWERED, acting_s=now - self.acting_since)

    def appended(self, context: int) -> "Conversation":
        """Records answers as tokens of context after the response.

        If they leave no room for another token, they are not added, and the conversation ends.
        """
        self._must_be(ConversationState.ANSWERED)
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
        """Holds the conversation before its next request."""
        self._must_be(ConversationState.SAMPLING)
        return replace(self, state=ConversationState.HELD)

    def passed(self, now: float) -> "Conversation":
        """Records the time, which counts while answers are awaited."""
        if self.state is ConversationState.ACTING and now >= self.deadline:
            return self._out_of_time(now)
        return self

    def _out_of_time(self, now: float) -> "Conversation":
        return replace(self, acting_s=now - self.acting_since)._ended(Stop.SECONDS)

    def closed(self) -> "Conversation":
        """Records that the environment has ended the conversation by its answer, which is not read."""
        if self.state is ConversationState.ENDED:
            return self
        return self._ended(Stop.CLOSED)

    def failed(self) -> "Conversation":
        """Records that the environment has failed, for whatever reason the conversation had ended."""
        return self._ended(Stop.ENVIRONMENT)

    def _must_be(self, state: ConversationState) -> None:
        if self.state is not state:
            raise ValueError(f"a conversation that is {self.state} got an event of one that is {state}")

    def _ended(self, stop: Stop) -> "Conversation":
        return replace(self, state=ConversationState.ENDED, stop=stop, answers=())


def shortened(text: str, characters: int) -> str:
    """Returns the text if it has at most `characters` characters.

    Otherwise returns its beginning and its end, with a note in between about the part left out.
    """
    if len(text) <= characters:
        return text
    said = f"\n[{len(text)} characters, of which {characters} are shown]\n"
    half = characters // 2
    return text[: characters - half] + said + text[len(text) - half :]
