"""Lets a user's agent talk with the model. Its requests to the chat endpoint are what the model reads.

    agent's process                 endpoint               session
    messages  --POST-->             session.ask            its position among what was said before, new tokens, a turn
              <--the model's-----                          sampled

Requests of one session are answered at once, each in a slot of the engine, at most `max_requests` together. All that
the agent does while none of them is open, until its next request or its end, is a call of the turn that was answered
last. Messages that the agent repeats keep their tokens (mrl.acting.chat_turns). Where it goes back to an earlier point,
the response continues from there. A repeated request has another answer, and what the conversation goes on from decides
between them. Other messages begin a branch. The row that is trained has all branches (mrl.schedule.branches) that fit
into it, the newest first. The turns' calls also record answers that were passed over, branches, and settings that the
agent asked for and did not get.
"""

import asyncio
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mrl.acting.agent import AGENT, ENDPOINT, REWARD_KEY, STOP
from mrl.acting.chat_api import BadRequest, ChatAnswer, ChatImage, ChatMessage, ChatRequest, number_of
from mrl.acting.chat_text import MOST_CHARACTERS, ChatText, characters
from mrl.acting.chat_turns import ChatPosition, Move
from mrl.acting.dialects import Dialect, ToolTokenizer
from mrl.acting.environment import Reply
from mrl.acting.environment_pool import CallAnswer, EnvironmentPool, Session
from mrl.acting.tool import TurnsSpec
from mrl.data.samples import MOST_KNOWN, STOP_REASONS, KnownImage, RowImage, Samples, TurnCall, with_outcome, with_turns
from mrl.engine.endpoint import BODY_BYTES, BODY_WITH_IMAGES_BYTES, Endpoint, Keys
from mrl.engine.kept_tokens import going_on
from mrl.engine.partners import Eyes, Line, followed, last_turn
from mrl.engine.requests import Request, Sampling
from mrl.engine.spoken import TOKENS, SpokenTurns
from mrl.errors import EnvironmentFault
from mrl.process.own import own_cpus
from mrl.reward.items import OK, TIMEOUT
from mrl.schedule.agent_talk import AgentTalk
from mrl.schedule.conversation import Stop
from mrl.schedule.segments import continuation_seed

START_S = 60.0  # longest start of an agent's process
ALONE_S = 0.25  # how long an agent that starts may keep others from starting
OVER = "the conversation is over: {}"
UNANSWERED = "unanswered"


class Turns(Protocol):
    """The engine, as a session sees it."""

    async def added(self, asked: Request, line: Line, is_first: bool) -> Line:
        """Returns the response with what one more request adds to it. Waits for a slot of the engine."""


class Expanded(NamedTuple):
    """New tokens of a request, and the images whose tokens are among them."""

    ids: Sequence[int]
    images: Sequence[RowImage] = ()


class Agents:
    """The agents of one engine: their endpoint, and a limit of how many run at once."""

    def __init__(
        self,
        spec: TurnsSpec,
        pool: EnvironmentPool,
        dialect: Dialect,
        tokenizer: ToolTokenizer,
        clock: Callable[[], float],
        eyes: Eyes | None = None,
    ):
        """Reserves a port. `eyes`: how the model reads images; None: it reads none. Raises EnvironmentFault where no
        port is free.
        """
        self.eyes = eyes
        self._seen: dict[str, KnownImage] = {}  # by the digest of a client's bytes
        self.spec = spec
        self.pool = pool
        self.text = ChatText(dialect, tokenizer, spec.template_arguments, spec.enforces_tool_choice)
        self.clock = clock
        self.endpoint = Endpoint(body_bytes=BODY_BYTES if eyes is None else BODY_WITH_IMAGES_BYTES)
        self.free = asyncio.Semaphore(spec.num_workers)
        # Until its first request an agent computes. Where all start at once they share the processors, ask as late as
        # the last of them, and all at the same moments from then on, with nothing to do for the engine in between.
        self.starting = asyncio.Semaphore(own_cpus())

    def session(self, request: Request, sampling: Sampling, turns: Turns) -> "AgentSession":
        """Returns the session of one response, whose agent `run` starts."""
        return AgentSession(self, request, sampling, turns)

    def seen(self, asked: ChatRequest) -> ChatRequest:
        """Returns a request with all its images read and stored. Raises BadRequest for one that is not read."""
        numbers = count(1)
        return replace(asked, messages=tuple(self._seen_in(message, numbers) for message in asked.messages))

    def _seen_in(self, message: ChatMessage, numbers: Iterator[int]) -> ChatMessage:
        if not message.parts:
            return message
        if self.eyes is None:
            raise BadRequest(
                "a message has an image, and the model reads text alone (model.vision); only text is supported"
            )
        parts = (part if isinstance(part, str) else self._known(part, next(numbers)) for part in message.parts)
        return replace(message, parts=tuple(parts))

    def _known(self, image: ChatImage, number: int) -> ChatImage:
        known = self._seen.get(image.digest)
        if known is None or not self.eyes.is_kept(known.name):
            from mrl.data.row_files import BadRow

            try:
                (known,) = self.eyes.take([image.data], number)
            except BadRow as error:
                raise BadRequest(str(error)) from error
            if len(self._seen) >= MOST_KNOWN:
                self._seen.clear()
            self._seen[image.digest] = known
        return ChatImage(image.digest, known=known)

    def expanded(self, ids: Sequence[int], images: Sequence[KnownImage]) -> "Expanded":
        """Returns tokens with all of each image's in the place of one. Raises BadRequest where there are others than
        one for each.
        """
        from mrl.data.row_files import BadRow

        try:
            return Expanded(*self.eyes.expanded(ids, images))
        except BadRow as error:
            raise BadRequest(str(error)) from error

    def close(self) -> None:
        """Closes the endpoint."""
        self.endpoint.close()


class AgentSession:
    """The agent of one response, and its session at the endpoint. Lives in one event loop."""

    def __init__(self, agents: Agents, request: Request, sampling: Sampling, turns: Turns):
        spec = agents.spec
        self._agents = agents
        self._request = request
        # the engine's sampling parameters under the names that clients use
        self._sampled_by = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")}
        self._most = sampling.max_tokens  # tokens of the response, and of each of its branches
        self._turns = turns
        self._keys: Keys | None = None
        self._run: asyncio.Future[CallAnswer] | None = None
        self._sandboxed: Session | None = None  # the sandbox, where the agent runs in one
        self._stop = Path()  # a file whose appearance ends the agent in it
        self._holds_slot = False
        self._talk = AgentTalk(spec.max_turns, spec.max_seconds)
        self._spoken = SpokenTurns(spec.keeps_all_answers)
        self._at_once = asyncio.Semaphore(spec.max_requests)
        self._reading = 0  # requests whose position and tokens are being found
        self._sampling: set[asyncio.Task[Line]] = set()
        self._changed = asyncio.Event()  # something happened that may end the session
        self._broken: Exception | None = None  # of the engine, or of the store of images
        self._is_closed = False
        self._given: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()  # the reward
        self._rewards: dict[int, Reply] = {}  # of answers, by number

    @property
    def is_sampling(self) -> bool:
        """Whether a request waits for the engine, and not all for the agent."""
        return bool(self._talk.open)

    # --- the endpoint's side

    async def ask(self, asked: ChatRequest) -> ChatAnswer:
        """Returns the model's answer, beside those to other requests of the session. Raises BadRequest.

        When this call is cancelled, sampling for it ends or does not begin.
        """
        async with self._at_once:
            self._check_is_open()
            self._reading += 1
            try:
                chat, position, number, new = await self._read(asked)
            finally:
                self._reading -= 1
                self._changed.set()
            try:
                return await self._answer(chat, position, number, new)
            finally:
                self._changed.set()

    async def count(self, asked: ChatRequest) -> int:
        """Returns the number of tokens of a request, as a prompt of its own. Raises BadRequest."""
        self._check_length(asked, self._agents.spec.max_prompt_length + self._most)
        try:
            return await asyncio.to_thread(self._counted, asked)
        finally:
            self._changed.set()

    def _counted(self, asked: ChatRequest) -> int:
        asked = self._whole(asked)
        return len(self._expanded(self._agents.text.prompt(asked), asked.messages).ids)

    def reward(self, reply: Reply, answer: str | None) -> None:
        """Takes the reward of an answer, or of the response. Raises BadRequest for a second one."""
        if answer is not None:
            number = number_of(answer)
            if number not in self._spoken:
                raise BadRequest(f"`answer` is {answer[:60]!r}, which is no answer of this session")
            if number in self._rewards:
                raise BadRequest(f"the answer {answer} has its reward")
            self._rewards[number] = reply
            return
        if self._given.done():
            raise BadRequest("the response has its reward")
        self._given.set_result(reply)

    def _check_is_open(self) -> None:
        """Raises BadRequest where nothing more is answered."""
        stop = self._talk.stop or (Stop.TURNS if not self._talk.turns_left else None)
        if stop is None and self._is_closed:
            stop = "ended"
        if stop is not None:
            raise BadRequest(OVER.format(stop))

    async def _read(self, asked: ChatRequest) -> tuple[ChatRequest, ChatPosition, int, Expanded | None]:
        """Reserves a place for a request, and tokenizes what is new in it. Raises BadRequest."""
        try:
            if asked.ids is not None or asked.raw is not None:
                most = self._agents.spec.max_prompt_length + self._most
                asked = await asyncio.to_thread(self._agents.text.with_ids, asked, most)
            chat = await asyncio.to_thread(self._whole, asked)  # megabytes of messages take seconds
            position = self._spoken.locate(chat)
            number = self._spoken.open(chat, position)
            try:
                new = await asyncio.to_thread(self._tokens, chat, position)
                self._check_is_open()
                return chat, position, number, new
            except BaseException:
                self._spoken.drop(number)
                raise
        except BadRequest:
            raise
        except (ValueError, TypeError, RecursionError) as error:  # a client's data must not end the run
            raise BadRequest(str(error)) from error

    def _whole(self, asked: ChatRequest) -> ChatRequest:
        """Returns a request with all its messages, and their images read. Raises BadRequest."""
        return self._spoken.whole(self._seen(asked))

    def _seen(self, asked: ChatRequest) -> ChatRequest:
        """Returns a request with its images read and stored. Raises BadRequest. A fault of the store is raised where
        the session runs.
        """
        if not any(message.parts for message in asked.messages):
            return asked
        try:
            return self._agents.seen(asked)
        except EnvironmentFault as error:
            self._broken = error
            raise BadRequest(OVER.format("an image cannot be stored")) from error

    def _expanded(self, ids: Sequence[int], messages: Sequence[ChatMessage]) -> Expanded:
        """Returns tokens that the template has written for messages, with all of each of their images. Raises
        BadRequest.
        """
        images = [image.known for message in messages for image in message.images]
        return self._agents.expanded(ids, images) if images else Expanded(ids)

    def _tokens(self, chat: ChatRequest, position: ChatPosition) -> Expanded | None:
        """Tokenizes what is new in a request: the messages behind a turn, or a prompt; and what the answer begins with.

        None stands for messages that are longer than any response. Raises BadRequest.
        """
        text = self._agents.text
        begun = text.begun(chat)
        raw = None
        if position.messages and position.messages[-1].role == TOKENS:
            raw = [int(number) for number in position.messages[-1].content.split()]
            if self._agents.eyes is not None and self._agents.eyes.image_token in raw:
                raise BadRequest("the prompt has tokens of an image, and no image comes with it: send messages")
        if position.parent is not None:
            if raw is not None:
                return Expanded(raw)
            if characters(position.messages) > MOST_CHARACTERS * self._most:
                return None
            turn = last_turn(self._spoken[position.parent].row)
            ids = [*text.follow(turn.tolist(), position.messages, chat.tools), *begun]
            return self._expanded(ids, position.messages)
        most = self._agents.spec.max_prompt_length
        if raw is None:
            self._check_length(chat, most)
            new = self._expanded([*text.prompt(chat), *begun], chat.messages)
        else:
            new = Expanded(raw)
        if len(new.ids) > most:
            raise BadRequest(f"the prompt has {len(new.ids)} tokens, and data.max_prompt_length is {most}")
        return new

    def _check_length(self, chat: ChatRequest, most: int) -> None:
        """Raises BadRequest for messages that are known to have more than `most` tokens."""
        length = characters(chat.messages, chat.tools)
        if length > MOST_CHARACTERS * most:
            raise BadRequest(
                f"the prompt has {length} characters, more than {MOST_CHARACTERS} for each of the {most} tokens that "
                "data.max_prompt_length allows"
            )

    async def _answer(self, chat: ChatRequest, position: ChatPosition, number: int, new: Expanded | None) -> ChatAnswer:
        """Takes a request whose place is reserved, and answers it. Gives the place back where that fails."""
        is_first = not self._spoken.last
        self._take()
        try:
            line = self._line(position, new)
            left = self._most - (0 if line.made is None else int(line.made.response_lengths[0]))
            most = min(left, chat.max_tokens or left)
            request = going_on(replace(line.request, max_tokens=most), line.made)
            if position.again:
                request = replace(request, seed=continuation_seed(request.seed, -position.again))
            made = (await self._sampled(request, line, is_first)).made
            added = int(made.response_lengths[0]) - (self._most - left)
            is_cut = bool(made.truncated[0])
            if is_cut and added < most:
                self._failed("the engine gave the request back, and an agent cannot go on elsewhere")
                raise BadRequest(OVER.format(self._talk.stop))
            return self._said(chat, position, number, made, added, is_full=is_cut and added == left)
        except BaseException:
            self._spoken.drop(number)
            if self._talk.stop is Stop.CONTEXT:
                self._talk = self._talk.refused(self._agents.clock(), Stop.CONTEXT)
            else:
                self._talk = self._talk.left(self._agents.clock())
            raise

    def _take(self) -> None:
        """Takes a turn of the budget. What the agent has done until now is a call of the turn before."""
        now = self._agents.clock()
        if not self._talk.open:
            self._spoken.acted(OK, self._talk.idle_s(now))
        self._talk = self._talk.asked(now)

    def _line(self, position: ChatPosition, new: Expanded | None) -> Line:
        """Appends the new tokens to the turn that they follow, or begins with a prompt. Raises BadRequest where they
        leave no room for an answer, which ends the session.
        """
        if position.parent is None:
            return Line(replace(self._request, prompt_ids=tuple(new.ids), images=tuple(new.images)))
        before = self._spoken[position.parent]
        if new is None or int(before.row.response_lengths[0]) + len(new.ids) >= self._most:
            self._talk = self._talk.ended(Stop.CONTEXT)
            raise BadRequest(OVER.format(self._talk.stop))
        prompt = tuple(before.row.token_ids[: int(before.row.prompt_lengths[0])].tolist())
        made = followed(before.row, new.ids, 1, before.seconds, new.images)
        return Line(replace(self._request, prompt_ids=prompt), made)

    async def _sampled(self, request: Request, line: Line, is_first: bool) -> Line:
        """Samples a turn. Raises BadRequest where the session is closed meanwhile, or the engine fails."""
        task = asyncio.ensure_future(self._turns.added(request, line, is_first))
        self._sampling.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise
            raise BadRequest(OVER.format(self._talk.stop or "ended")) from None
        except Exception as error:  # raised where the session runs
            self._broken = error
            raise BadRequest(OVER.format("the engine does not answer")) from error
        finally:
            self._sampling.discard(task)

    def _said(
        self, chat: ChatRequest, position: ChatPosition, number: int, made: Samples, added: int, is_full: bool
    ) -> ChatAnswer:
        """Keeps a turn, and returns it as the client's answer."""
        text = self._agents.text
        turn = last_turn(made).tolist()
        said = text.said(turn, chat, number)
        marks = []
        if position.move is Move.BRANCHES:
            marks.append(TurnCall(position.why, "branch"))
        marks += [TurnCall(name, "overridden") for name in text.overridden(chat, said, self._sampled_by)]
        has_call = bool(said.calls) or (not chat.wants_calls and text.has_call(turn))
        prompt = made.token_ids[: int(made.lengths[0]) - added].tolist()
        answer = ChatAnswer(number, said, bool(made.truncated[0]), len(prompt), added, tuple(prompt), tuple(turn))
        self._spoken.add(number, said, made, marks)  # nothing from here on may fail: the position is taken
        self._talk = self._talk.answered(self._agents.clock(), has_call, is_full)
        return answer

    # --- the response's side

    async def run(self) -> bool:
        """Starts the agent once it may run, and returns True when the session has ended. Raises what the engine
        raises.
        """
        agents = self._agents
        await agents.endpoint.serve()
        await agents.free.acquire()
        self._holds_slot = True
        self._keys = agents.endpoint.open(self)
        context = {
            "url": agents.endpoint.url,
            "key": self._keys.chat,
            "row": dict(self._request.row or {}),
            "seconds": agents.spec.max_seconds,
            REWARD_KEY: self._keys.reward,
        }
        async with agents.starting:
            began = agents.clock()
            if agents.spec.tools.in_sandbox:
                self._run = asyncio.ensure_future(self._run_in_sandbox(context))
            else:
                self._run = asyncio.ensure_future(asyncio.wrap_future(agents.pool.call(AGENT, context)))
            await self._anything(ALONE_S)
        while not self._talk.has_ended:
            await self._something_happened(began)
        await self._judged()
        await self._rewarded()
        return True

    async def _run_in_sandbox(self, context: dict[str, Any]) -> CallAnswer:
        """Starts the row's sandbox and in it the agent. Returns how that ended."""
        self._stop = Path(tempfile.gettempdir()) / f"mrl-stop-{secrets.token_hex(8)}"
        row = {**context["row"], ENDPOINT: context["url"], STOP: str(self._stop)}
        self._sandboxed = self._agents.pool.session(AGENT, row, 0)
        begun = await asyncio.wrap_future(self._sandboxed.ready)
        if begun.failed:
            return begun
        return await asyncio.wrap_future(self._sandboxed.step(AGENT, context))

    async def _judged(self) -> None:
        """Ends the agent in the sandbox, if it has not ended, and takes the reward of the row's tests."""
        if self._sandboxed is None or self._talk.stop is Stop.ENVIRONMENT:
            return
        if not self._run.done():  # it may yet end by itself, as one that is refused does
            await asyncio.wait([self._run], timeout=self._agents.spec.timeout_s)
            self._stop.touch()
            await asyncio.wait([self._run], timeout=START_S)
        if not self._run.done():
            self._failed("it did not end with the conversation")
            return
        judged = await asyncio.wrap_future(self._sandboxed.judge())
        if judged.failed:
            self._failed(judged.text)
        elif judged.parts and not self._given.done():
            self._given.set_result(Reply("", judged.reward, judged.parts))

    async def _something_happened(self, began: float) -> None:
        """Waits for the next event that may end the session, and looks whether it does."""
        await self._anything(self._patience_s(began))
        self._changed.clear()
        if self._broken is not None:
            raise self._broken
        if self._talk.has_ended:
            return
        if self._run.done():
            await self._end_open()
            self._agent_has_ended(self._run.result())
        elif self._patience_s(began) == 0.0:
            self._out_of_time()

    async def _anything(self, timeout_s: float | None) -> None:
        """Waits until a request has been read or answered, or the agent has ended, since `_changed` was cleared."""
        waited = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait([waited, self._run], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waited.cancel()

    def _patience_s(self, began: float) -> float | None:
        """Returns how long the agent may still take to its next request; None while one is being answered."""
        if self._talk.open or self._reading:
            return None
        timeout_s = self._agents.spec.timeout_s
        end = began + START_S + timeout_s
        if self._talk.idle_since is not None:
            end = min(self._talk.idle_since + timeout_s, self._talk.deadline)
        return max(0.0, end - self._agents.clock())

    async def _end_open(self) -> None:
        """Ends what is sampled for an agent that has ended, and takes nothing more of what it left behind."""
        self._is_closed = True
        for task in self._sampling:
            task.cancel()
        while self._talk.open:  # an engine takes a moment, and handlers have still to note it
            await asyncio.sleep(0.01)

    def _agent_has_ended(self, ended: CallAnswer) -> None:
        idle_s = self._talk.idle_s(self._agents.clock())
        if self._spoken.last is None:
            self._failed(ended.text or "it ended, and had asked for nothing that could be answered")
            return
        self._spoken.acted(ended.reason, idle_s)
        if ended.reason == OK:
            self._talk = self._talk.ended(Stop.CLOSED)
        else:
            self._failed(ended.text)

    def _out_of_time(self) -> None:
        now = self._agents.clock()
        if self._talk.idle_since is not None and now >= self._talk.deadline:
            self._spoken.acted(UNANSWERED, self._talk.idle_s(now))
            self._talk = self._talk.ended(Stop.SECONDS)
            return
        self._spoken.acted(TIMEOUT, self._talk.idle_s(now))
        self._failed(f"it asked for nothing within {self._agents.spec.timeout_s:g} s")

    async def _rewarded(self) -> None:
        """Waits for the reward where one is needed. Without it the response has failed."""
        needed = self._agents.spec.needs_reward and self._talk.stop is not Stop.ENVIRONMENT
        if needed and not self._given.done():
            await asyncio.wait(
                [self._given, self._run],
                timeout=self._agents.spec.timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        if not needed or self._given.done():
            return
        in_row = set() if self._spoken.last is None else self._spoken.numbers(self._most)
        if not self._rewards.keys() & in_row:
            lost = f"; {len(self._rewards)} it gave for answers that are in no row" if self._rewards else ""
            self._failed(f"it gave no reward, and reward.function: environment takes one{lost}")

    def row(self) -> Samples | None:
        """Returns the row of all branches; None where nothing was said. A failed response is not trained on and has the
        last branch alone.
        """
        if self._spoken.last is None:
            return None
        has_failed = self._talk.stop is Stop.ENVIRONMENT
        spoken = self._spoken.last_row() if has_failed else self._spoken.row(self._most)
        given = [self._rewards.get(number) for number in spoken.numbers]
        rewards = [0.0 if reply is None else reply.reward for reply in given]
        parts = {name: value for reply in given if reply is not None for name, value in reply.parts.items()}
        if self._given.done():
            rewards[-1] += self._given.result().reward
            parts |= self._given.result().parts
        lost = len(self._rewards.keys() - set(spoken.numbers))
        spoken.calls[-1].extend([TurnCall(AGENT, "lost_reward")] * lost)
        last_s = float(with_turns(spoken.made).turn_seconds[-1])
        made = with_outcome(spoken.made, spoken.calls, rewards, parts, last_s)
        return replace(made, stop_reason=_as_column(made, self._talk.stop))

    def _failed(self, why: str) -> None:
        """Ends the session as failed, and logs the reason."""
        self._talk = self._talk.ended(Stop.ENVIRONMENT)
        self._agents.pool.log(f"agent: {why}".replace(self._keys.chat, "[key]").replace(self._keys.reward, "[key]"))

    def close(self) -> None:
        """Ends agent and session. Does not wait for the agent."""
        self._is_closed = True
        for task in self._sampling:
            task.cancel()
        if self._keys is not None:
            self._agents.endpoint.close_session(self._keys)
        if self._run is not None:
            self._run.cancel()
        if self._sandboxed is not None:
            if not self._run.done():
                self._stop.touch()
            self._sandboxed.close()
        if self._holds_slot:
            self._agents.free.release()
            self._holds_slot = False


def _as_column(made: Samples, stop: Stop) -> Any:
    return made.stop_reason * 0 + STOP_REASONS.index(stop)
