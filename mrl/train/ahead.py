"""Generation ahead of training, beside it: a thread sends requests and takes responses and rewards; the loop takes
whole batches.

    thread   admit prompts --> assignments --> engines --> responses --> reward pool --> groups finished, or filtered
    loop     take: a step's batch ........ train ........ settle: weights may change ... sync ... advanced: on with them

Who is issued when, by which weights each token is made and which engine makes it is decided by the machines of
mrl.schedule; here are the prompts, the engines and the rewards that they speak of by number. Both threads hold
`_changed` while they touch them, and neither while it waits for Ray.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from mrl.cluster.group_writer import GroupParts
from mrl.cluster.process_logs import concerning, processes_of
from mrl.cluster.request_streams import Arrived
from mrl.cluster.stored_samples import StoredSamples
from mrl.config.schema import RunConfig
from mrl.data.order import PromptStream
from mrl.errors import DataError, Interrupted
from mrl.record.metrics import GeneratingTime, PhaseTimer
from mrl.reward.items import OK, RewardResult, check_failures, failure_counts
from mrl.schedule.buffer import GroupBuffer
from mrl.schedule.dispatch import Assignment, Dispatcher
from mrl.schedule.groups import Group
from mrl.schedule.ledger import Fingerprint, restored, snapshot
from mrl.schedule.rate import Rate, RateRules
from mrl.schedule.staleness import Schedule
from mrl.schedule.suspects import Suspects
from mrl.train.ahead_metrics import buffer_metrics, version_metrics
from mrl.train.kept_groups import Filtered, KeptGroups
from mrl.train.lost_engines import LostEngines, Unfinished
from mrl.train.numbered_prompts import DrawPlace, NumberedPrompts
from mrl.train.resume import TrainState
from mrl.train.rollouts import (
    TRAIN,
    Responder,
    Rollouts,
    check_finite,
    compared_values,
    differ,
    group_metrics,
    question,
    rollouts_of,
    sample_seed,
    with_failures_scored,
)  # fmt: skip
from mrl.train.spool import Spool
from mrl.vllm.requests import Request, training_sampling

WAIT_S = 0.1  # for a response, before rewards are looked at again
POLL_S = 0.5


@dataclass(frozen=True)
class Ahead:
    """What generation ahead of training goes by, and where it keeps things."""

    schedule: Schedule
    made_by: Fingerprint
    spool: Spool  # gets what is finished
    lost: LostEngines
    suspects: Suspects  # prompts that engines were lost under


class GenerationAhead:
    """Groups by number, from their prompts to a step's batch."""

    def __init__(self, config: RunConfig, responder: Responder, stream: PromptStream, state: TrainState, ahead: Ahead):
        """Goes on from `state`, at `begin`."""
        self._config = config
        self._responder = responder
        self._fingerprint = ahead.made_by
        self._spool = ahead.spool
        self._sampling = training_sampling(config)
        self._streams = responder.engines.streams()
        self._rewards = responder.rewards.for_another()  # validation asks beside it
        kept = state.ahead
        self._prompts = NumberedPrompts(stream, kept.place if kept else DrawPlace(0, state.cursor))
        self._made: dict[int, GroupParts] = _copies(kept.groups) if kept else {}  # by number
        self._snapshot = kept  # the newest
        buffer = restored(kept.ledger, ahead.schedule) if kept else GroupBuffer(ahead.schedule)
        self._dispatcher = Dispatcher(buffer, responder.engines.names, responder.engines.places)
        self._rate = _rate(ahead.schedule, responder)
        self._lost = ahead.lost
        self._suspects = ahead.suspects
        self._is_noted = False
        self._filtered: list[Filtered] = list(kept.filtered) if kept else []
        self._any_failed = self._knows_failures()  # rewards of the groups on their way
        self._counted = buffer_metrics(self._buffer)
        self._pending: set[tuple[int, int]] = set()  # group and index of responses whose reward is awaited
        self._generating, self._came = GeneratingTime(), 0  # tokens that came back since it was last noted
        self._changed, self._sending = threading.Condition(), threading.Lock()
        self._is_settling = False  # the loop waits for what has to come before weights may change
        self._gives_back = False  # engines give back what they have, for other weights
        self._error: BaseException | None = None
        self._closed = False
        for group in list(buffer.groups.values()):
            self._send_or_set_aside(group)
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    # ---------------------------------------------------------------- the loop's side

    def begin(self) -> None:
        """Engines hold the weights that training begins from."""
        self._ask_for_rewards()
        self._admit()
        self._thread.start()

    def _ask_for_rewards(self) -> None:
        """Of responses that ended before the checkpoint and were not judged then."""
        for number, parts in self._made.items():
            ended = self._buffer.groups[number].ended
            for index, response in parts.responses.items():
                if ended[index] and index not in parts.results:
                    engines = self._responder.engines.names
                    self._score(number, index, response, engines[number % len(engines)])

    def _admit(self) -> None:
        """Issues all that may be issued: at once where something changed,
        so that nobody finds the weights free to change before.
        """
        while groups := self._buffer.reserve():
            for group in groups:
                group.prompt_tokens = len(self._prompts[group.number][0].token_ids)
                self._send_or_set_aside(group)

    def _send_or_set_aside(self, group: Group) -> None:
        """Lines a group up, unless engines were lost under its prompt again and again."""
        prompt_id = self._prompts[group.number][0].prompt_id
        if prompt_id in self._suspects.aside and not group.is_whole:
            print(f"prompt {prompt_id} is set aside: engines were lost under it, and under no other as often")
            self._dispatcher.evict(group.number, "quarantined")
            self._forget(group)
            return
        if prompt_id in self._suspects.alone:
            self._dispatcher.alone.add(group.number)
        self._dispatcher.admit(group)

    def take(self, state: TrainState, timer: PhaseTimer) -> Rollouts:
        """Waits for the step's batch, phase "gen".

        Raises what generation raised, DataError when too many rewards failed.
        """
        batch = self._buffer.schedule.batch
        with timer("gen"):
            groups = self._wait(self._taken)
        with self._changed:
            made = [self._made.pop(group.number) for group in groups]
            parts = [each.responses[index] for each in made for index in range(self._config.rollout.n)]
            results = [each.results[index] for each in made for index in range(self._config.rollout.n)]
            cursor = self._prompts.after(max(group.number for group in groups))
            filtered = self._filtered_before(groups[-1].number)
            self._filtered = [each for each in self._filtered if each not in filtered]
            metrics = self._metrics(groups, parts, results, [result for _, each in filtered for result in each])
            self._spool.forget(group.number for group in groups)
        numbers, ids = np.repeat(np.arange(batch), self._config.rollout.n), np.arange(len(parts))
        samples = StoredSamples.joined(parts).renumbered(numbers, ids)
        judged = with_failures_scored(self._config.reward, results)
        results = [replace(result, sample_id=i) for i, result in enumerate(judged)]
        return rollouts_of(self._config, samples, results, cursor, metrics)

    def _taken(self) -> list[Group] | None:
        self._check_rewards()
        return self._buffer.take()

    def _check_rewards(self) -> None:
        """Raises DataError once more rewards of the step failed than may,
        or once more groups were filtered for it than may.
        """
        filtering, batch = self._config.algorithm.filter_groups, self._buffer.schedule.batch
        groups = list(islice(self._buffer.groups.values(), batch))  # those that the step will train on, as far as known
        filtered = self._filtered_before(groups[-1].number) if groups else []
        share, n = self._config.reward.max_failure_share, self._config.rollout.n
        if self._any_failed:
            made = [result for _, each in filtered for result in each]
            for group in groups:
                made += self._results_of(group.number)
            if sum(failure_counts(made).values()) > int(share * batch * n):
                check_failures(made, share)
        limit = (filtering.max_num_gen_batches - 1) * batch
        if self._buffer.schedule.order == "ready_first":
            limit *= self._buffer.schedule.max_staleness + 1  # some were filtered for the steps that follow
        if filtering.max_num_gen_batches and len(filtered) > limit:
            raise DataError(
                f"step {self._buffer.step + 1}: {len(filtered)} groups have responses that do not differ in "
                f"{filtering.metric}: the prompts are too easy or too hard for the model as it is. Raise "
                "algorithm.filter_groups.max_num_gen_batches or rollout.n, or give other prompts"
            )

    def _results_of(self, number: int) -> list[RewardResult]:
        return list(self._made[number].results.values()) if number in self._made else []

    def _knows_failures(self) -> bool:
        judged = [parts.results.values() for parts in self._made.values()]
        filtered = [results for _, results in self._filtered]
        return any(result.reason != OK for results in [*judged, *filtered] for result in results)

    def _filtered_before(self, last: int) -> list[Filtered]:
        """Groups lost for a step whose last one is `last`; ready_first all since the step before."""
        return [each for each in self._filtered if each[0] < last or self._buffer.schedule.order == "ready_first"]

    def settle(self, timer: PhaseTimer, saves: bool) -> None:
        """Returns once engines may be given other weights; nothing is sent until `advanced`; phases "pause", "settle".

        in_order what was to be made by these weights is back; where rewards decide which groups are trained on, it is
        judged too. ready_first engines hold what they are at, and nobody waits; where the step `saves` they give it
        back, so that the checkpoint has its tokens.
        """
        if self._buffer.schedule.order == "ready_first":
            self._stop_sending()
            if self._buffer.schedule.partial_rollouts:
                with timer("pause"):
                    self._pause(saves)
        with timer("settle"):
            self._is_settling = True
            self._wait(self._settled)

    def _settled(self) -> bool | None:
        waits_for_tokens = self._gives_back and self._dispatcher.under_way
        return True if self._dispatcher.may_change_weights and not waits_for_tokens else None

    def _pause(self, give_back: bool) -> None:
        self._streams.progress.pause()
        try:
            self._gives_back = self._responder.engines.pause_for_update(give_back)
        except Interrupted as error:
            with self._changed:
                raise self._with_unfinished(error) from error

    def _stop_sending(self) -> None:
        with self._changed:
            self._dispatcher.is_open = False
        with self._sending:  # what is on its way to engines gets there
            pass

    def advanced(self, state: TrainState) -> TrainState:
        """Engines hold the weights of `state`, and generation goes on by them;
        the state with all groups on their way.
        """
        with self._changed:
            before = dict(self._buffer.groups)
            ended = self._dispatcher.advance()
            kept = self._taken_snapshot(before)
            self._admit()
            self._streams.progress.resume()
            self._is_settling = False
            self._gives_back = False
            self._dispatcher.is_open = True
            self._changed.notify_all()
        self._end(ended)
        return replace(state, ahead=kept)

    def given_up(self, state: TrainState) -> TrainState:
        """The state with all groups on their way; where engines never came to hold its weights it ends generation.

        What engines were at goes on from its last border, by the weights of `state`; in_order that may be younger ones
        than in a run where no engine is lost.
        """
        if state.ahead is not None or not state.step:
            return state
        self.close()
        before = dict(self._buffer.groups)
        self._buffer.advance()
        return replace(state, ahead=self._taken_snapshot(before))

    def _taken_snapshot(self, before: Mapping[int, Group]) -> KeptGroups:
        """Of now, just after the version went up. `before`: all groups that there were then."""
        for number, group in before.items():
            if self._buffer.groups.get(number) is not group:
                self._forget(group)
        if self._buffer.schedule.unit > 1:  # those among what a batch had too many are of no step
            self._filtered = []
        place = self._prompts.forget_before(self._buffer.frontier)
        ledger = snapshot(self._buffer, self._fingerprint)
        self._counted = buffer_metrics(self._buffer)
        self._any_failed = self._knows_failures()
        previous = self._snapshot
        self._snapshot = KeptGroups.of(ledger, place, _copies(self._made), tuple(self._filtered), self._spool)
        if previous is not None:
            previous.release()
        return self._snapshot

    def _end(self, requests: list[Assignment]) -> None:
        """Nobody waits for these any more."""
        handles: dict[str, list[int]] = {}
        for sent in requests:
            handles.setdefault(sent.engine, []).append(sent.request)
        if handles:
            self._responder.engines.end_requests(handles)

    def _forget(self, group: Group) -> None:
        """What was made of it is given up."""
        self._made.pop(group.number, None)
        awaited = {key for key in self._pending if key[0] == group.number}
        self._pending -= awaited
        self._rewards.withdraw([self._sample_id(*key) for key in awaited])
        self._spool.forget([group.number])

    def _sample_id(self, number: int, index: int) -> int:
        return number * self._config.rollout.n + index

    def close(self) -> None:
        """Ends the thread; what engines are at is not waited for."""
        with self._changed:
            self._closed = True
        if self._thread.is_alive():
            self._thread.join()

    def _wait(self, condition: Callable[[], Any]) -> Any:
        """The first answer of `condition` that is not None. Raises what the thread raised, and what a signal raises."""
        while True:
            self._responder.poll()
            with self._changed:
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
                self._send()
                arrived = self._streams.take(WAIT_S) if self._streams.waiting_for else []
                scored = self._scored()
                with self._changed:
                    for part in arrived:
                        self._take_in(part)
                    for result in scored:
                        self._take_result(result)
                    self._admit()
                    self._adjust_rate()
                    generates = self._dispatcher.is_open and bool(self._streams.waiting_for)
                    self._generating.note(generates, self._came, time.monotonic())
                    self._came = 0
                    if arrived or scored:
                        self._changed.notify_all()
                    elif not self._streams.waiting_for:
                        self._changed.wait(WAIT_S)
        except BaseException as error:  # whatever it is, the loop has to see it
            with self._changed:
                self._error = self._with_unfinished(error)
                self._changed.notify_all()

    def _adjust_rate(self) -> None:
        """As many responses under way as caches have room for; in_order speed has no say, and what is preempted there
        is told by `perf/preemptions`.
        """
        if self._rate and (seen := self._streams.progress.observed(len(self._dispatcher.under_way))):
            self._rate = self._rate.after(seen)
            self._dispatcher.window = self._rate.window

    def _with_unfinished(self, error: BaseException) -> BaseException:
        """Of an engine that is lost, with what it was at, which is noted for the resumed run."""
        names = {name.split(" rank ")[0] for name in processes_of(error)}  # all data-parallel ranks end together
        engines = [name for name in self._responder.engines.names if name.split(" rank ")[0] in names]
        if self._is_noted or not engines or not isinstance(error, Interrupted):
            return error
        self._is_noted = True
        numbers = sorted({sent.number for sent in self._dispatcher.under_way.values() if sent.engine in engines})
        groups = [Unfinished(n, self._prompts[n][0].prompt_id, self._buffer.groups[n].tokens) for n in numbers]
        words = self._lost.note(self._buffer.step, engines, str(error), groups)
        return concerning(Interrupted(f"{error}; {words}" if words else str(error)), *processes_of(error))

    def _scored(self) -> list[RewardResult]:
        """Rewards that are there; others may be waiting for theirs, and so may the update, before which all rests."""
        at_once = self._is_settling or not self._streams.waiting_for
        return self._rewards.collect(at_once) if self._pending else []

    def _send(self) -> None:
        with self._sending:
            self._send_assignments()

    def _send_assignments(self) -> None:
        with self._changed:
            sent = self._dispatcher.assignments()
            requests = [(each.engine, self._request(each), self._kept(each)) for each in sent]
        for engine in dict.fromkeys(engine for engine, *_ in requests):
            own = [(request, kept) for name, request, kept in requests if name == engine]
            before = {request.sample_id: kept for request, kept in own if kept is not None}
            self._streams.send(engine, [request for request, _ in own], self._sampling, before)

    def _request(self, sent: Assignment) -> Request:
        (prompt, first), schedule = self._prompts[sent.number], self._buffer.schedule
        step = sent.number // schedule.batch + 1
        seed = sample_seed(self._config.trainer.seed, TRAIN, step, prompt.prompt_id, first + sent.index)
        return Request(
            sent.request, prompt.token_ids, seed, prompt.prompt_id, sent.number, sent.max_tokens, sent.request
        )

    def _kept(self, sent: Assignment) -> StoredSamples | None:
        return self._made[sent.number].responses[sent.index] if sent.kept else None

    def _take_in(self, arrived: Arrived) -> None:
        check_finite(arrived.samples.rows)
        for row in range(len(arrived.samples)):
            response = arrived.samples.take(np.array([row]))
            request = int(response.rows.sample_id[0])
            sent = self._dispatcher.under_way.get(request)
            if sent is None:  # it was ended
                continue
            added, truncated = int(response.rows.response_lengths[0]) - sent.kept, bool(response.rows.truncated[0])
            group = self._dispatcher.answered(request, added, not truncated)
            self._came += added
            if response.rows.response_lengths[0] or group.ended[sent.index]:
                self._parts_of(group).responses[sent.index] = response
            if group.ended[sent.index]:
                self._score(sent.number, sent.index, response, sent.engine, arrived.held_s)

    def _parts_of(self, group: Group) -> GroupParts:
        return self._made.setdefault(group.number, GroupParts(group.number, group.attempts, {}, {}))

    def _score(self, number: int, index: int, response: StoredSamples, engine: str, held_s: float = 0.0) -> None:
        prompt, _ = self._prompts[number]
        self._pending.add((number, index))
        self._rewards.submit(response, [question(self._sample_id(number, index), prompt)], engine, held_s)

    def _take_result(self, result: RewardResult) -> None:
        number, index = divmod(result.sample_id, self._config.rollout.n)
        self._pending.discard((number, index))
        self._any_failed |= result.reason != OK
        group = self._buffer.groups[number]
        parts = self._made[number]
        parts.results[index] = result
        if group.is_whole and len(parts.results) == len(group.lengths):
            self._judge(parts)

    def _judge(self, parts: GroupParts) -> None:
        """A group with all its rewards is finished, or filtered."""
        number, every = parts.number, range(self._config.rollout.n)
        results = [parts.results[index] for index in every]
        filters = self._config.algorithm.filter_groups.enable
        if not filters or self._differs(results, [parts.responses[index] for index in every]):
            self._buffer.finish(number)
            self._spool.put(parts)
            return
        self._filtered.append((number, results))
        group = self._buffer.groups[number]
        self._dispatcher.evict(number, "filtered")
        self._forget(group)

    def _differs(self, results: list[RewardResult], parts: list[StoredSamples]) -> bool:
        """Whether the responses to a prompt do not all have the same value; failed rewards are at the bottom."""
        judged = with_failures_scored(self._config.reward, results)
        return differ(compared_values(self._config, StoredSamples.joined(parts).rows, judged))

    def _batches(self, groups: int) -> float:
        """Of prompts, in which so many groups were generated."""
        schedule = self._buffer.schedule
        return -(-groups // schedule.unit) * schedule.unit / schedule.batch

    def _metrics(
        self, groups: list[Group], parts: list[StoredSamples], results: list[RewardResult], filtered: list[RewardResult]
    ) -> dict[str, float]:
        """Of the groups that the step trains on and those that were filtered for it.

        Raises DataError where too many rewards failed.
        """
        n = self._config.rollout.n
        differing = sum(self._differs(results[i : i + n], parts[i : i + n]) for i in range(0, len(results), n))
        made = [*results, *filtered]
        check_failures(made, self._config.reward.max_failure_share)
        return {
            **group_metrics(self._batches(len(made) // n), 1.0 - differing * n / len(made), len(groups), made),
            **version_metrics(self._buffer.step, [part.rows for part in parts]),
            **self._counted,
            **({"async/window": float(self._rate.window)} if self._rate else {}),
            **self._generating.metrics(),
        }


def _rate(schedule: Schedule, responder: Responder) -> Rate | None:
    """ready_first: of responses under way, at first as many as engines have places for."""
    if schedule.order == "in_order":
        return None
    names, places = responder.engines.names, responder.engines.places
    every = schedule.places * schedule.responses
    return Rate.start(RateRules(len(names), min(every, places * len(names)) if places else every))


def _copies(groups: Mapping[int, GroupParts]) -> dict[int, GroupParts]:
    """The same, independent of what comes to them; in the order of numbers."""
    return {
        number: replace(groups[number], responses=dict(groups[number].responses), results=dict(groups[number].results))
        for number in sorted(groups)
    }
