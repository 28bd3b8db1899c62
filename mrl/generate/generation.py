"""Generates rollouts: a thread sends requests and takes responses and rewards, and the loop takes whole batches.

    thread   admit prompts --> assignments --> engines --> responses --> reward pool --> groups finished, or filtered
    loop     next_batch: a step's ........ train ........ drain: weights may change ... sync ... resume: on with them

mrl.schedule decides, by number, when a group is issued, and which weights and engine generate each token. So all
schedules share this code. The synchronous one issues nothing for later steps, and engines rest from `next_batch` to
`resume`. Both threads hold `_changed` while they use shared data, and neither holds it while it waits for Ray.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType
from typing import Any

from mrl.cluster.engine_fleet import EngineFleet
from mrl.cluster.process_logs import concerning, processes_of
from mrl.cluster.request_streams import FinishedResponses
from mrl.data.order import PromptStream
from mrl.engine.requests import Request, engine_of
from mrl.errors import Interrupted, LostWeights, MrlError, described
from mrl.generate.generation_rules import GenerationRules, first_rate
from mrl.generate.group_metrics import batch_metrics, buffer_metrics, version_metrics
from mrl.generate.group_writer import GroupParts
from mrl.generate.judged_groups import JudgedGroups, copies
from mrl.generate.kept_groups import Filtered, KeptGroups
from mrl.generate.lost_engines import AGAIN, LostEngines, Unfinished
from mrl.generate.numbered_prompts import NumberedPrompts, PromptCursor
from mrl.generate.replays import Replays
from mrl.generate.rollouts import TRAIN_RESPONSES, Responder, Rollouts, by_engine, prompt_seed
from mrl.generate.train_state import TrainState
from mrl.record.metrics import GeneratingTime, PhaseTimer
from mrl.reward.items import RewardResult
from mrl.schedule.buffer import GroupBuffer
from mrl.schedule.dispatch import Assignment, Dispatcher
from mrl.schedule.groups import Group
from mrl.schedule.ledger import begun_at, restored, snapshot
from mrl.schedule.suspects import Suspects
from mrl.store.response_store import ResponseStore

WAIT_S = 0.1  # wait for a response, before rewards are checked again
REWARD_WAIT_S = 0.02  # wait for a reward if nothing else is awaited, before requests are checked again
POLL_S = 0.5


@dataclass(frozen=True)
class _NextBatch:
    """A step's batch."""

    numbers: list[int]  # of the batch's groups
    newest: int  # the newest number that was issued for the step
    ended: list[Assignment]  # requests whose answers are no longer awaited
    filtered: list[list[RewardResult]]  # rewards of groups that were filtered for the batch


class Generation:
    """Generates groups by number, from their prompts to a step's batch."""

    def __init__(
        self,
        rules: GenerationRules,
        responder: Responder,
        stream: PromptStream,
        state: TrainState,
        left: Mapping[int, GroupParts] = MappingProxyType({}),
    ):
        """Continues from `state`. `left`: groups by number that an earlier start finished with these weights."""
        schedule = rules.schedule
        self._rules = rules
        self._responder = responder
        self.streams = responder.engines.streams()
        kept = state.ahead
        position = kept.position if kept else PromptCursor(stream.batch_number(state.cursor), state.cursor)
        self._prompts = NumberedPrompts(stream, position)
        rewards = responder.rewards.for_another()  # validation asks at the same time
        self._groups = JudgedGroups(rules.judge, rewards, schedule.responses, kept)
        self._snapshot = kept  # the newest snapshot
        rules.serve(state, may_go_back=True)
        self._replays = Replays(left, rules.spool, self._prompts, rules.seed, rules.groups_again)
        self._saves = True  # whether a checkpoint has the next weights, so that runs may go back to them
        first = position.draw * stream.batch_size
        buffer = restored(kept.ledger, schedule) if kept else begun_at(state.step, first, schedule)
        self._dispatcher = Dispatcher(buffer, self.streams.names, responder.engines.max_requests)
        self._fleet = responder.engines.fleet
        self._losses = EngineLosses(rules.lost, rules.suspects, self._dispatcher, self._prompts, self._fleet)
        self._rate = first_rate(schedule, responder)
        self._counted = buffer_metrics(self._buffer)
        self._generating = GeneratingTime()
        self._came = 0  # tokens that have arrived since the last record
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._is_settling = False  # whether the loop waits for answers that must arrive before weights change
        self._gives_back = False  # whether engines give back unfinished responses for other weights
        self._unwanted: list[Assignment] = []  # requests that engines must end
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    # ---------------------------------------------------------------- the loop's side

    def begin(self) -> None:
        """Begins generation. Engines hold the initial weights of training."""
        for group in list(self._buffer.groups.values()):
            self._send_or_set_aside(group)
        self._ask_for_rewards(self._groups.made)
        self._admit()
        self._thread.start()

    def _ask_for_rewards(self, numbers: Collection[int]) -> None:
        """Asks for rewards of responses that ended before this start and were not judged."""
        engines = self._responder.engines.names
        for number in numbers:
            for index in self._groups.unasked(number, self._buffer.groups[number].ended):
                self._groups.ask(number, index, self._prompts[number][0], engines[number % len(engines)])

    def _admit(self) -> None:
        """Issues all permitted groups at once, so that weights cannot appear free to change before."""
        while groups := self._buffer.reserve():
            for group in groups:
                group.prompt_tokens = len(self._prompts[group.number][0].token_ids)
                self._send_or_set_aside(group)

    def _send_or_set_aside(self, group: Group) -> None:
        """Puts a group in line, unless an earlier start has finished it, or engines were lost under its prompt."""
        if self._replays.take_over(group, self._buffer, self._groups):
            self._ask_for_rewards([group.number])
            self._take_judged(group.number)
        elif self._losses.is_aside(group):
            self._set_aside(group.number)
        else:
            self._dispatcher.admit(group)

    def _set_aside(self, number: int) -> None:
        """Evicts a group that kills engines. The next prompt replaces it."""
        self._unwanted += self._dispatcher.evict(number, "quarantined")
        self._forget([number])

    def next_batch(self, timer: PhaseTimer) -> Rollouts:
        """Waits for the step's batch. The phase is "gen", and "reward" while only rewards are awaited.

        Raises the errors of generation, and DataError if too many rewards failed or too many groups were filtered.
        """
        with timer("gen"), timer("reward"):  # a line has both, even if nothing is awaited
            pass
        batch = self._wait(
            self._next_batch, lambda: timer("gen" if self._buffer.lacks_responses else "reward"), self._responder.mend
        )
        self._wait_sent()  # a request that came behind its end would run on
        self._end(batch.ended)
        with self._changed:
            samples, results = self._groups.take(batch.numbers)
            metrics = self._metrics(samples, results, batch.filtered)
            self._rules.spool.forget(batch.numbers)
            cursor = self._prompts.after(batch.newest)
        return self._rules.judge.rollouts(samples, results, cursor, metrics)

    def _next_batch(self) -> "_NextBatch | None":
        self._tell_progress()
        self._check_rewards()
        is_exhausted = self._buffer.is_exhausted
        batch = self._dispatcher.take()
        if batch is None:
            if is_exhausted:
                raise self._groups.exhausted(self._buffer)
            return None
        groups, rest, ended = batch
        self._forget(rest)
        numbers = [group.number for group in groups]
        newest = self._buffer.next_number - 1 if self._rules.schedule.is_synchronous else max(numbers)
        passed_over = self._groups.filtered if is_exhausted else self._filtered_before(max(numbers))
        filtered = [results for number, results in passed_over if number not in numbers]
        self._groups.filtered = [each for each in self._groups.filtered if each not in passed_over]
        return _NextBatch(numbers, newest, ended, filtered)

    def _tell_progress(self) -> None:
        """Shows how many responses of the step's groups have arrived, including those of groups filtered for it."""
        responses = self._rules.schedule.responses
        filtered = len(self._groups.filtered) * responses
        first = self._buffer.progress
        self._responder.display.progress(TRAIN_RESPONSES, filtered + first.ended, filtered + first.size * responses)

    def _check_rewards(self) -> None:
        """Raises DataError if more rewards failed, or more groups were filtered, than one step may have."""
        schedule = self._rules.schedule
        groups = list(islice(self._buffer.groups, schedule.batch))  # as far as is known now
        filtered = self._filtered_before(groups[-1]) if groups else self._groups.filtered
        self._groups.check_failures(groups, filtered, schedule.batch)
        if schedule.is_synchronous or schedule.most_draws is None:
            return
        limit = (schedule.most_draws - 1) * schedule.batch
        if schedule.order == "ready_first":
            limit *= schedule.max_staleness + 1  # some were filtered for later steps
        if len(filtered) > limit:
            raise self._groups.too_many_filtered(self._buffer.step + 1, len(filtered))

    def _filtered_before(self, last: int) -> list[Filtered]:
        """Returns the groups filtered for a step that ends with `last`; ready_first: all since the step before."""
        ready_first = self._rules.schedule.order == "ready_first"
        return [each for each in self._groups.filtered if each[0] < last or ready_first]

    def drain(self, timer: PhaseTimer, saves: bool) -> None:
        """Waits until engines may get other weights; nothing is sent until `resume`. Phases: "pause", "settle".

        in_order waits for all tokens of these weights, and for their rewards if rewards decide which groups are trained
        on. With ready_first, engines keep unfinished responses and nothing is awaited. If the step `saves`, they give
        them back, so that the checkpoint has their tokens. In the synchronous schedule nothing is running.
        """
        self._saves = saves
        if self._rules.schedule.is_synchronous:
            return
        if self._rules.schedule.order == "ready_first":
            with self._changed:
                self._dispatcher.is_open = False
            self._wait_sent()
            if self._rules.schedule.partial_rollouts:
                with timer("pause"):
                    self._pause(saves)
        with timer("settle"):
            self._is_settling = True
            self._wait(self._settled)

    def before_update(self) -> None:
        """Waits for an engine if running responses must be finished with these weights, in order.

        After an update no engine could get these weights any more.
        """
        if self._is_ahead_in_order:
            self._wait(lambda: None if self._fleet.none_ready else True, mend=self._responder.mend)

    @property
    def _is_ahead_in_order(self) -> bool:
        schedule = self._rules.schedule
        return schedule.order == "in_order" and not schedule.is_synchronous

    def _settled(self) -> bool | None:
        if self._is_ahead_in_order and self._fleet.none_ready and self._dispatcher.lacks_engines:
            why = (
                f"no engine is left, and responses are to be made by the weights of step {self._buffer.step}; "
                "the ranks do not hold them any more"
            )
            raise concerning(LostWeights(why), *self._responder.engines.names)
        waits_for_tokens = self._gives_back and self._dispatcher.under_way
        if self._dispatcher.may_change_weights and not waits_for_tokens:
            return True
        return None

    def _pause(self, give_back: bool) -> None:
        self.streams.progress.pause()
        try:
            self._gives_back = self._responder.engines.pause_for_update(give_back)
        except Interrupted as error:
            with self._changed:
                raise self._losses.noted(error) from error
        if self._gives_back:  # what is given back is waited for, so that an engine that stands still is late
            self.streams.progress.resume()

    def _wait_sent(self) -> None:
        with self._sending:  # so that everything on its way to engines arrives
            pass

    def resume(self, state: TrainState) -> TrainState:
        """Continues with the weights of `state`, which engines hold now. Returns it with all live groups."""
        with self._changed:
            before = dict(self._buffer.groups)
            ended = self._dispatcher.advance()
            self._replays.give_up()
            self._rules.serve(state, self._saves)
            kept = self._snapshot_after(before, state)
            self._admit()
            self.streams.progress.resume()
            self._is_settling = False
            self._gives_back = False
            self._dispatcher.is_open = True
            self._changed.notify_all()
        self._end(ended)
        return replace(state, ahead=kept)

    def given_up(self, state: TrainState) -> TrainState:
        """Ends generation. Returns the state with all live groups, even if engines never held its weights.

        Unfinished responses continue from their last boundary or turn with the weights of `state`. In order, these may
        be newer than in a run without a lost engine.
        """
        self.close()
        if state.ahead is not None or not state.step:
            return state
        before = dict(self._buffer.groups)
        self._buffer.advance()
        return replace(state, ahead=self._snapshot_after(before, state))

    def _snapshot_after(self, before: Mapping[int, Group], state: TrainState) -> KeptGroups:
        """Takes a snapshot just after the version has changed to that of `state`.

        `before`: all groups that existed before.
        """
        self._forget([number for number, group in before.items() if self._buffer.groups.get(number) is not group])
        if self._rules.schedule.is_synchronous:  # surplus groups among them belong to no step
            self._groups.filtered = []
        oldest = min([self._buffer.frontier, *(number for number, _ in self._groups.filtered)])
        position = self._prompts.forget_before(oldest)  # a start with other rewards issues filtered groups again
        ledger = snapshot(self._buffer)
        self._counted = buffer_metrics(self._buffer)
        self._groups.look_again()
        previous = self._snapshot
        made = copies(self._groups.made)
        origin = self._rules.sources.by(state.step, state.weights)
        filtered = tuple(self._groups.filtered)
        self._snapshot = KeptGroups.of(ledger, position, made, filtered, self._rules.spool, origin)
        if previous is not None:
            previous.release()
        return self._snapshot

    def _end(self, requests: list[Assignment]) -> None:
        """Ends requests whose answers are no longer awaited."""
        handles = {engine: [sent.request for sent in own] for engine, own in by_engine(requests).items()}
        if handles:
            self._responder.engines.end_requests(handles)

    def _forget(self, numbers: Collection[int]) -> None:
        """Drops the responses of these groups."""
        self._groups.forget(numbers)
        self._rules.spool.forget(numbers)

    def close(self) -> None:
        """Ends the thread without waiting for running requests or for rewards."""
        with self._changed:
            self._closed = True
        if self._thread.is_alive():
            self._thread.join()
        self._groups.withdraw_all()

    def _wait(
        self,
        condition: Callable[[], Any],
        timed: Callable[[], AbstractContextManager] = nullcontext,
        mend: Callable[[], None] = lambda: None,
    ) -> Any:
        """Returns the first result of `condition` that is not None. `timed` is entered for each part of the wait.

        `mend` brings engines back while ranks hold the served weights. Raises errors of the thread and of signals.
        """
        while True:
            self._responder.poll()
            mend()
            with self._changed, timed():
                if self._error is not None:
                    raise self._error
                if (answer := condition()) is not None:
                    return answer
                self._changed.wait(POLL_S)

    @property
    def _buffer(self) -> GroupBuffer:
        return self._dispatcher.buffer

    # ---------------------------------------------------------------- the thread's side

    def _run(self) -> None:
        try:
            while not self._closed:
                self._follow_fleet()
                self._rules.spool.note()
                with self._sending:
                    self._send_assignments()
                arrived = []
                if self.streams.waiting_for:
                    arrived = self.streams.take(WAIT_S)
                scored = self._scored()
                with self._changed:
                    for part in arrived:
                        self._take_in(part)
                    for result in scored:
                        if (number := self._groups.take_result(result)) is not None:
                            self._take_judged(number)
                    self._admit()
                    self._adjust_rate()
                    generates = self._dispatcher.is_open and bool(self.streams.waiting_for)
                    self._generating.note(generates, self._came, time.monotonic())
                    self._came = 0
                    if arrived or scored:
                        self._changed.notify_all()
                    elif not self.streams.waiting_for and not self._groups.awaits_rewards:
                        self._changed.wait(WAIT_S)
        except BaseException as error:  # the loop must see every error
            with self._changed:
                self._error = error
                self._error = self._losses.noted(error)
                self._changed.notify_all()

    def _follow_fleet(self) -> None:
        """Requests again everything that lost engines had, from other engines or from those that are back."""
        change = self.streams.follow()
        with self._changed:
            if change.gone:
                self._losses.make_again(change.gone)
                for group in list(self._buffer.groups.values()):
                    if self._losses.is_aside(group):
                        self._set_aside(group.number)
            for engine in change.back:
                self._dispatcher.join(engine)
            if change.gone or change.back:
                self._changed.notify_all()
            unwanted = self._unwanted
            self._unwanted = []
        self._end(unwanted)

    def _adjust_rate(self) -> None:
        """Keeps as many responses running as caches have room for. Not in_order, where speed must have no effect."""
        if not self._rate or not self._dispatcher.is_open:  # what is under way says nothing while nothing is sent
            return
        if seen := self.streams.progress.observed(len(self._dispatcher.under_way)):
            self._rate = self._rate.after(seen)
            self._dispatcher.window = self._rate.window

    def _scored(self) -> list[RewardResult]:
        """Returns the rewards that have arrived. Engines, or the update, may be waiting for them."""
        at_once = self._is_settling or not self.streams.waiting_for
        found = self._groups.collect(at_once)
        if not found and not self.streams.waiting_for and self._groups.awaits_rewards:
            self._groups.wait(REWARD_WAIT_S)
            found = self._groups.collect(at_once)
        return found

    def _send_assignments(self) -> None:
        with self._changed:
            sent = self._dispatcher.assignments()
            requests = {}
            for engine, own in by_engine(sent).items():
                requests[engine] = [(self._request(each), self._kept(each)) for each in own]
        for engine, own in requests.items():
            before = {request.sample_id: kept for request, kept in own if kept is not None}
            self.streams.send(engine, [request for request, _ in own], self._rules.sampling, before)

    def _request(self, sent: Assignment) -> Request:
        prompt, _ = self._prompts[sent.number]
        seed = prompt_seed(self._rules.seed, self._prompts, sent.number, sent.index)
        request = sent.request
        return Request(
            request,
            prompt.token_ids,
            seed,
            prompt.prompt_id,
            sent.number,
            sent.max_tokens,
            request,
            prompt.acting_row,
            prompt.images,
        )

    def _kept(self, sent: Assignment) -> ResponseStore | None:
        if sent.kept:
            return self._groups.made[sent.number].responses[sent.index]
        return None

    def _take_in(self, arrived: FinishedResponses) -> None:
        rows = arrived.samples.rows
        columns = (rows.sample_id, rows.response_lengths, rows.truncated, rows.context_lengths)
        numbers = zip(*(column.tolist() for column in columns), strict=True)
        for row, (request, length, truncated, context) in enumerate(numbers):
            sent = self._dispatcher.under_way.get(request)
            if sent is None:  # the request was ended
                continue
            group = self._dispatcher.answered(request, length - sent.kept, not truncated, context)
            self._came += length - sent.kept
            has_ended = group.ended[sent.index]
            if group.lengths[sent.index] or has_ended:
                self._groups.add(group, sent.index, arrived.samples.row(row))
            if has_ended:
                prompt, _ = self._prompts[sent.number]
                self._groups.ask(sent.number, sent.index, prompt, sent.engine, arrived.held_s)

    def _take_judged(self, number: int) -> None:
        """Finishes or filters a group that has all its rewards."""
        if not self._buffer.groups[number].is_whole or not self._groups.is_judged(number):
            return
        if self._rules.judge.algorithm.filter_groups.enable and not self._groups.differs(number):
            self._groups.filter(number)
            self._forget(self._dispatcher.filter(number))
            return
        self._buffer.finish(number)
        if self._rules.spool.keeps or not self._rules.schedule.is_synchronous:
            self._rules.spool.put(self._groups.made[number])

    def _metrics(
        self, samples: ResponseStore, results: list[RewardResult], filtered: list[list[RewardResult]]
    ) -> dict[str, float]:
        """Returns metrics of the groups that the step trains on, and of those filtered for it.

        Raises DataError if too many rewards failed.
        """
        schedule = self._rules.schedule
        uniform = self._groups.uniform(samples, results)
        made = [*results, *(result for each in filtered for result in each)]
        self._groups.check_all(made)
        metrics = batch_metrics(schedule, self._prompts.draw_size, made, len(filtered), uniform)
        metrics |= self._replays.metrics()
        if schedule.is_synchronous:
            return metrics
        metrics |= version_metrics(self._buffer.step, samples.rows)
        metrics |= self._counted
        metrics |= self._generating.metrics()
        return metrics | ({"async/window": float(self._rate.window)} if self._rate else {})


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
            text = self._lost.note(self._dispatcher.buffer.step, engines, str(error), self._unfinished(engines))
        except (OSError, MrlError) as refused:
            text = f"what they were at is not noted: {described(refused)}"
        return concerning(Interrupted(f"{error}; {text}" if text else str(error)), *processes_of(error))

    def _unfinished(self, engines: Sequence[str]) -> list[Unfinished]:
        """Returns the unfinished groups of these engines."""
        groups = self._dispatcher.buffer.groups
        return [Unfinished(n, self._prompts[n][0].prompt_id, groups[n].tokens) for n in self._dispatcher.at(engines)]
