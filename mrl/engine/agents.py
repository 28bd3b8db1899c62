"""Lets a user's agent talk with the model. Its requests to the chat endpoint are what the model reads.

    agent's process                 endpoint                     conversation
    messages  --POST-->             session.ask  -- queued -->   begin: the first prompt; acted: the turn's answer
              <--the model's-----   answered     <-------------  sampled

A turn ends with the model's answer. All that the agent does until its next request, or its end, is that turn's only
call. Messages that the agent repeats keep their tokens (mrl.acting.chat_turns). Where it goes back to an earlier place,
the response continues from there. A repeated request has another answer, and what the conversation goes on from decides
between them. Other messages begin a branch. The row that is trained has all branches (mrl.schedule.branches) that fit
into it, the newest first. The turn's calls also record answers that were passed over, branches, and settings that the
agent asked for and did not get.
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mrl.acting.agent import AGENT
from mrl.acting.chat_api import BadRequest, ChatAnswer, ChatMessage, ChatRequest
from mrl.acting.chat_text import MOST_CHARACTERS, ChatText, characters
from mrl.acting.chat_turns import ChatPlace, KeptTurns, Move, Why
from mrl.acting.dialects import Dialect, ToolTokenizer
from mrl.acting.environment import Reply
from mrl.acting.environment_pool import CallAnswer, EnvironmentPool
from mrl.acting.tool import TurnsSpec
from mrl.data.samples import Samples, TurnCall, with_turns
from mrl.engine.endpoint import Endpoint
from mrl.engine.kept_tokens import going_on
from mrl.engine.partners import CallRecord, Line, followed, sampled_turns
from mrl.engine.requests import Request, Sampling
from mrl.reward.items import OK, TIMEOUT
from mrl.schedule.branches import Branch, as_one_row
from mrl.schedule.conversation import Conversation, ConversationState, Stop
from mrl.schedule.segments import continuation_seed

START_S = 60.0  # longest start of an agent's process
OVER = "the conversation is over: {}"


class Agents:
    """The agents of one engine: their endpoint, and a limit of how many run at once."""

    def __init__(
        self,
        spec: TurnsSpec,
        pool: EnvironmentPool,
        dialect: Dialect,
        tokenizer: ToolTokenizer,
        clock: Callable[[], float],
    ):
        """Reserves a port. Raises EnvironmentFault where none is free."""
        self.spec = spec
        self.pool = pool
        self.text = ChatText(dialect, tokenizer, spec.template_arguments)
        self.clock = clock
        self.endpoint = Endpoint()
        self.free = asyncio.Semaphore(spec.num_workers)

    def partner(self, request: Request, sampling: Sampling) -> "AgentPartner":
        """Returns the agent of one response."""
        own = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        return AgentPartner(self, request, own, sampling.max_tokens)

    def close(self) -> None:
        """Closes the endpoint."""
        self.endpoint.close()


@dataclass
class _Asked:
    """A request that waits for its answer."""

    chat: ChatRequest
    answer: asyncio.Future[ChatAnswer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def is_gone(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self.answer.cancelled()

    def give(self, answer: ChatAnswer) -> None:
        """Sends the answer, unless nobody waits for it."""
        if not self.answer.done():
            self.answer.set_result(answer)

    def refuse(self, why: str) -> None:
        """Sends an error as the answer."""
        if not self.answer.done():
            self.answer.set_exception(BadRequest(why))


class AgentPartner:
    """The agent of one response, and its session at the endpoint."""

    def __init__(self, agents: Agents, request: Request, sampled_by: Mapping[str, float], max_response_length: int):
        """`sampled_by` holds the engine's sampling parameters under the names that clients use."""
        self.record = CallRecord()
        self._agents = agents
        self._request = request
        self._sampled_by = sampled_by
        self._max_response_length = max_response_length
        self._key: str | None = None
        self._run: asyncio.Future[CallAnswer] | None = None
        self._holds_place = False
        self._waiting: asyncio.Queue[_Asked] = asyncio.Queue()
        self._over: str | None = None  # why nothing is answered any more
        self._given: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()  # the reward
        self._spoken = SpokenTurns()
        self._asked: _Asked | None = None  # the request to be answered
        self._place: ChatPlace | None = None  # its place among earlier turns
        # its new messages, or its prompt, as tokens; None: messages that are longer than any response
        self._ids: list[int] | None = []
        self._repeats = 0  # requests that did not extend the newest turn
        self._marks: list[TurnCall] = []  # calls to record with the turn that is sampled next
        self._before: Line | None = None  # the response before the request

    # --- the endpoint's side

    async def ask(self, asked: ChatRequest) -> ChatAnswer:
        """Returns the model's answer, after the answers to earlier requests. Raises BadRequest.

        When this call is cancelled, sampling for it ends or does not begin.
        """
        if self._over is not None:
            raise BadRequest(OVER.format(self._over))
        waiting = _Asked(asked)
        self._waiting.put_nowait(waiting)
        return await waiting.answer  # is cancelled together with this call

    def reward(self, reply: Reply) -> None:
        """Takes the response's reward. Raises BadRequest for a second one."""
        if self._given.done():
            raise BadRequest("the response has its reward")
        self._given.set_result(reply)

    # --- the conversation's side

    can_go_on = False  # what the agent has done cannot be repeated

    @property
    def leaves(self) -> asyncio.Future:
        """Future that is done once the client has hung up whose request is being sampled."""
        return self._asked.answer

    async def begin(self, line: Line) -> Line | None:
        """Starts the agent once it may run, and waits for its first request. Returns None where none comes."""
        agents = self._agents
        self._before = line
        await agents.endpoint.serve()
        await agents.free.acquire()
        self._holds_place = True
        self._key = agents.endpoint.open(self)
        told = {
            "url": agents.endpoint.url,
            "key": self._key,
            "row": dict(self._request.row or {}),
            "seconds": agents.spec.max_seconds,
        }
        self._run = asyncio.ensure_future(asyncio.wrap_future(agents.pool.call(AGENT, told)))
        if await self._next(agents.clock() + START_S + agents.spec.timeout_s):
            return Line(replace(line.request, prompt_ids=tuple(self._ids)))
        why = f"it asked for nothing within {agents.spec.timeout_s:g} s"
        if self._run.done():
            why = self._run.result().text or "it ended, and had asked for nothing that could be answered"
        self._failed(why)
        return None

    async def _next(self, deadline: float) -> bool:
        """Waits for a request that can be answered. Returns False where the agent ended first or time was up."""
        while True:
            asked = asyncio.ensure_future(self._waiting.get())
            left_s = max(0.0, deadline - self._agents.clock())
            try:
                await asyncio.wait([asked, self._run], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not asked.done():
                    asked.cancel()
            if not asked.done():
                return False
            self._asked = asked.result()
            if self._asked.is_gone:
                continue
            try:
                self._ids = await asyncio.to_thread(self._tokens)  # megabytes of messages take seconds
                return True
            except (ValueError, TypeError, RecursionError) as error:  # a client's data must not end the run
                self._asked.refuse(str(error))

    def _tokens(self) -> list[int] | None:
        """Finds the request's place, and tokenizes what is new in it: the messages behind a turn, or a prompt.

        None stands for messages that are longer than any response. Raises BadRequest.
        """
        chat = self._asked.chat
        self._place = self._spoken.place(chat)
        parent = self._place.parent
        if parent is not None:
            if characters(self._place.messages) > MOST_CHARACTERS * self._max_response_length:
                return None
            turn = sampled_turns(self._spoken[parent].row)[-1]
            return self._agents.text.follow(turn.tolist(), self._place.messages, chat.tools)
        most = self._agents.spec.max_prompt_length
        length = characters(chat.messages, chat.tools)
        if length > MOST_CHARACTERS * most:
            raise BadRequest(
                f"the prompt has {length} characters, more than {MOST_CHARACTERS} for each of the {most} tokens that "
                "data.max_prompt_length allows"
            )
        ids = self._agents.text.prompt(chat)
        if len(ids) > most:
            raise BadRequest(f"the prompt has {len(ids)} tokens, and data.max_prompt_length is {most}")
        return ids

    def asked(self, talk: Conversation, line: Line) -> Request:
        """Builds the next request. A repeated one gets another seed. It asks for at most as many tokens as the client
        wants.
        """
        most = min(talk.max_tokens, self._asked.chat.max_tokens or talk.max_tokens)
        request = going_on(replace(line.request, max_tokens=most), line.made)
        is_again = self._place.move is Move.RETRIES or self._place.why is Why.ASKED_AGAIN
        if is_again:
            return replace(request, seed=continuation_seed(request.seed, -self._repeats))
        return request

    def sampled(self, talk: Conversation, line: Line, asked: Request) -> Conversation:
        """Returns the conversation after a turn, and sends the turn to the client."""
        added = int(line.made.response_lengths[0]) - talk.tokens
        is_cut = bool(line.made.truncated[0])
        if is_cut and added < asked.max_tokens:
            return self._failed("the engine gave the request back, and an agent cannot go on elsewhere", talk)
        chat = self._asked.chat
        self._marks += [TurnCall(name, "overridden") for name in chat.overridden(self._sampled_by)]
        number = self._spoken.said + 1
        turn = sampled_turns(line.made)[-1].tolist()
        said = self._agents.text.said(turn, chat, number)
        prompt = int(line.made.lengths[0]) - added
        answer = ChatAnswer(number, said, is_cut, prompt, added)
        self._spoken.add(chat, self._place, said, line.made)
        has_call = bool(said.calls) or (not chat.wants_calls and self._agents.text.has_call(turn))
        goes_on = has_call or talk.turn < talk.budgets.turns
        is_full = is_cut and added == talk.max_tokens
        after = talk.sampled(added, self._agents.clock(), [None] * goes_on, is_full)
        if after.state is ConversationState.ENDED:
            self._over = after.stop
        self._asked.give(answer)
        return after

    def left(self, talk: Conversation) -> tuple[Conversation, Line]:
        """Returns conversation and response as they were before the request. The agent's next act belongs to the
        earlier turn.
        """
        self.record.calls = []
        self._marks = []
        if self._spoken.said:
            *self.record.calls, self._marks = self._spoken.newest.calls
        self.record.rewards = [0.0] * len(self.record.calls)
        after = talk.left(self._agents.clock())
        if after.state is ConversationState.ENDED:
            self._over = after.stop
        return after, self._before

    async def acted(self, talk: Conversation) -> Conversation:
        """Returns the conversation once the agent has sent another request or ended, or time is up."""
        calls = self._marks
        self._marks = []
        if talk.state is ConversationState.ACTING:
            talk, reason = await self._waited(talk)
            calls = [*calls, TurnCall(AGENT, reason, talk.acting_s)]
        self.record.calls.append(calls)
        self.record.rewards.append(0.0)
        if talk.stop is not Stop.ENVIRONMENT and self._spoken.said:
            self._spoken.newest.calls = list(self.record.calls)
            self._spoken.newest.seconds = sum(call.seconds for call in calls)
        return talk

    async def _waited(self, talk: Conversation) -> tuple[Conversation, str]:
        """Waits for the agent. Returns the conversation, and how the agent's part of the turn ended."""
        clock = self._agents.clock
        timeout_s = self._agents.spec.timeout_s
        if await self._next(min(talk.acting_since + timeout_s, talk.deadline)):
            return talk.answered(talk.turn, 0, "", clock()), OK
        now = clock()
        if self._run.done():
            ended = self._run.result()
            acted = replace(talk, acting_s=now - talk.acting_since)
            if ended.reason == OK:
                return acted.closed(), OK
            return self._failed(ended.text, acted), ended.reason
        if now >= talk.deadline:
            return talk.passed(now), "unanswered"
        acted = replace(talk, acting_s=now - talk.acting_since)
        return self._failed(f"it asked for nothing within {timeout_s:g} s", acted), TIMEOUT

    def told(self, talk: Conversation, line: Line) -> tuple[Conversation, Line]:
        """Appends the new messages behind the turn that they follow, or starts anew with another prompt."""
        place = self._place
        self._mark(place)
        self._before = line
        if place.parent is None:
            self.record.calls = []
            self.record.rewards = []
            request = replace(line.request, prompt_ids=tuple(self._ids))
            return talk.rewound(0).told(0), Line(request)
        before = self._spoken[place.parent]
        told = talk.budgets.tokens if self._ids is None else len(self._ids)
        after = talk.rewound(int(before.row.response_lengths[0])).told(told)
        if after.stop is Stop.CONTEXT:
            self._over = after.stop
            self._asked.refuse(OVER.format(self._over))
            return after, line
        self.record.calls = list(before.calls)
        self.record.rewards = [0.0] * len(before.calls)
        made = followed(before.row, self._ids, 1, before.seconds)
        prompt = tuple(before.row.token_ids[: int(before.row.prompt_lengths[0])].tolist())
        return after, Line(replace(line.request, prompt_ids=prompt), made)

    def _mark(self, place: ChatPlace) -> None:
        """Records where the client went back, among the calls of the turn that it then asks for."""
        if place.move is Move.BRANCHES:
            self._marks.append(TurnCall(place.why, "branch"))
        self._repeats += place.move is not Move.EXTENDS

    async def ended(self, talk: Conversation) -> Conversation:
        """Returns the conversation with its reward. Waits for the reward where one is needed."""
        self._over = self._over or talk.stop
        self._refuse_all()
        needed = self._agents.spec.needs_reward and talk.stop is not Stop.ENVIRONMENT
        if needed and not self._given.done():
            await asyncio.wait(
                [self._given, self._run],
                timeout=self._agents.spec.timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        if self._given.done():
            self.record.rewards[-1] = self._given.result().reward
            self.record.parts = dict(self._given.result().parts)
        elif needed:
            return self._failed("it gave no reward, and reward.function: environment takes one", talk)
        return talk

    def whole(self, talk: Conversation, line: Line) -> Samples:
        """Returns the row of all branches. A failed response is not trained on and has only its last branch."""
        if talk.stop is Stop.ENVIRONMENT:
            self.record.completed(int(with_turns(line.made).turn_counts[0]))
            return line.made
        branches, left_out = self._spoken.branches(talk.budgets.tokens)
        reward = self.record.rewards[-1]
        self.record.calls = [list(of_turn) for each in branches for of_turn in each.calls]
        self.record.calls[-1] += [TurnCall(AGENT, "untrained")] * left_out
        self.record.rewards = [*[0.0] * (len(self.record.calls) - 1), reward]
        return as_one_row([replace(each.branch, row=_after(each.branch.row, each.seconds)) for each in branches])

    def _failed(self, why: str, talk: Conversation | None = None) -> Conversation | None:
        """Logs the reason, and returns the conversation as failed."""
        self._over = Stop.ENVIRONMENT
        self._agents.pool.log(f"agent: {why}".replace(self._key, "[key]"))
        if talk is not None:
            return talk.failed()
        return None

    def _refuse_all(self) -> None:
        """Refuses all requests that still wait."""
        waiting = [] if self._asked is None else [self._asked]
        while not self._waiting.empty():
            waiting.append(self._waiting.get_nowait())
        for each in waiting:
            each.refuse(OVER.format(self._over))

    def close(self) -> None:
        """Ends agent and session. Does not wait for the agent."""
        self._over = self._over or "ended"
        self._refuse_all()
        if self._key is not None:
            self._agents.endpoint.close_session(self._key)
        if self._run is not None:
            self._run.cancel()
        if self._holds_place:
            self._agents.free.release()
            self._holds_place = False


def _after(row: Samples, seconds: float) -> Samples:
    """Adds to the row the seconds that the agent took after its last turn."""
    row = with_turns(row)
    times = row.turn_seconds.copy()
    times[-1] = seconds
    return replace(row, turn_seconds=times)


@dataclass
class SpokenTurn:
    """A turn that is kept."""

    row: Samples  # the branch up to and with this turn
    calls: list[list[TurnCall]] = field(default_factory=list)  # of all turns of the branch up to it
    seconds: float = 0.0  # time that the agent took after it


@dataclass(frozen=True)
class SpokenBranch:
    """A branch with the calls of its own turns."""

    branch: Branch
    calls: list[list[TurnCall]]
    seconds: float  # time that the agent took after its last turn


class SpokenTurns:
    """The turns of one session."""

    def __init__(self) -> None:
        self._kept = KeptTurns()
        self._turns: dict[int, SpokenTurn] = {}

    @property
    def said(self) -> int:
        """Number of turns so far. It is also the number of the newest turn."""
        return self._kept.said

    @property
    def newest(self) -> SpokenTurn:
        """The turn that was said last."""
        return self._turns[self.said]

    def __getitem__(self, number: int) -> SpokenTurn:
        return self._turns[number]

    def place(self, asked: ChatRequest) -> ChatPlace:
        """Returns where a request belongs. Raises BadRequest where it has nothing new to answer."""
        return self._kept.place(asked)

    def add(self, asked: ChatRequest, place: ChatPlace, said: ChatMessage, row: Samples) -> None:
        """Adds the model's answer to a request."""
        self._kept = self._kept.with_turn(asked, place, said)
        self._turns[self.said] = SpokenTurn(row)

    def branches(self, most: int) -> tuple[list[SpokenBranch], int]:
        """Returns the last branch and the earlier ones that fit, and how many do not fit.

        Together they have at most `most` tokens of one response. The newest are taken first. They are returned in the
        order in which the agent left them.
        """
        *earlier, last = self._kept.leaves
        ends = [last]
        taken = int(self._turns[last].row.response_lengths[0])
        for end in reversed(earlier):
            in_front = int(self._turns[end].row.response_lengths[0]) + int(self._turns[ends[0]].row.prompt_lengths[0])
            if taken + in_front <= most:
                taken += in_front
                ends.insert(0, end)
        return self._as_branches(ends), len(earlier) + 1 - len(ends)

    def _as_branches(self, ends: Sequence[int]) -> list[SpokenBranch]:
        known: set[int] = set()
        found = []
        passed_over: dict[int, list[TurnCall]] = defaultdict(list)  # what is recorded of such answers, by what stays
        for number, stays in self._kept.passed_over.items():
            own = itertools.chain.from_iterable(self._turns[number].calls[-1:])
            passed_over[stays] += [*(call for call in own if call.reason == "overridden"), TurnCall(AGENT, "retry")]
        for end in ends:
            path = self._kept.path(end)
            shared = sum(number in known for number in path)
            known |= set(path)
            turn = self._turns[end]
            calls = [
                [*passed_over.pop(number, ()), *of_turn]
                for number, of_turn in zip(path[shared:], turn.calls[shared:], strict=True)
            ]
            found.append(SpokenBranch(Branch(turn.row, shared), calls, turn.seconds))
        found[-1].calls[-1].extend(itertools.chain.from_iterable(passed_over.values()))  # of branches without room
        return found
