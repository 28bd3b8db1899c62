"""Scores responses on the nodes where they are stored. The driver sends references and questions, and gets scores.

    driver                                  process on a node of engines               scoring processes (mrl.reward)
    references, questions --ScorerGroup-->  Scorer: fetches, decodes  --RewardPool-->  the reward function
    results               <---------------  those that are there      <--------------  score, parts, reason

Each scorer has one call under way at a time. It takes along all responses that have arrived since the previous call.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import ray

from mrl.cluster.calls import gather, late, unwrap
from mrl.cluster.generations import write_generations
from mrl.cluster.process_logs import log_file
from mrl.config.schema import RewardConfig
from mrl.data.batch import Prompt
from mrl.data.dataset import load_tokenizer
from mrl.data.quick_tokenizer import quick_decoder
from mrl.data.samples import CALL_REASONS, STOP_REASONS, Samples, with_turns
from mrl.model.hub import local_folder
from mrl.process.ray_nodes import on_node
from mrl.reward.items import (
    FELL,
    LEFT_OUT,
    NOT_FINITE,
    OK,
    Question,
    RewardResult,
    RewardSpec,
    most_failures,
)
from mrl.reward.pool import RewardPool
from mrl.store.response_store import SMALL_OBJECTS, ResponseStore
from mrl.store.reward_texts import Texts, named, split

EVERY_S = 0.2  # shortest time between two calls of a scorer while generation goes on
IN_ALL_S = 0.1  # mean time between two calls of any scorers
WAIT_S = 0.5  # longest wait of a call for the results of its questions
# Longest call. A call fetches, decodes and waits WAIT_S, however slow the reward function is. If it takes longer, its
# process stands still.
EXCHANGE_S = 600.0
START_S = 120.0
WRITE_S = 3600.0
PHASE = "scoring"

Asked = tuple[int, int, Question]  # number of a block, row of it, what is asked of the response


@dataclass(frozen=True)
class PoolSettings:
    """Arguments of a RewardPool. `environment` and `folder` are those of the user's command."""

    spec: RewardSpec
    num_workers: int
    timeout_s: float
    failure_score: float
    log_path: Path
    environment: Mapping[str, str]
    folder: str

    def pool(self) -> RewardPool:
        """Starts a pool and waits until its workers are ready. Raises what RewardPool raises."""
        return RewardPool(
            self.spec,
            self.num_workers,
            self.timeout_s,
            self.failure_score,
            self.log_path,
            START_S,
            self.environment,
            self.folder,
        )


class Scorer:
    """A process beside engines. It loads `tokenizer` while engines start, and needs it for the first response."""

    def __init__(self, load: Callable[[], Any]):
        """`load` returns the tokenizer."""
        self._load = load
        self._pool = None

    def start(self, settings: PoolSettings) -> None:
        """Starts the pool. Raises what RewardPool raises. An unreadable tokenizer raises in the first `exchange`."""
        threading.Thread(target=lambda: self._tokenizer, daemon=True).start()
        self._pool = settings.pool()

    @cached_property
    def _tokenizer(self) -> Any:
        return self._load()

    def exchange(
        self, asked: Sequence[Asked], wait_s: float, *blocks: Samples
    ) -> tuple[list[RewardResult], list[Texts]]:
        """Starts scoring of what is asked, and waits at most `wait_s` seconds for all that is under way.

        Returns results that are ready, each once, and their long texts separately.
        """
        responses = [[response for _, response in block.spoken_last()] for block in blocks]
        turn_outcomes = [None if block.turn_counts is None else list(outcomes(block)) for block in blocks]
        left_out = []
        for block, row, question in asked:
            outcome = {}
            if turn_outcomes[block] is not None:
                outcome = turn_outcomes[block][row]
            if not blocks[block].finite[row]:
                left_out.append(_without_numbers(question, blocks[block], row))
                continue
            if has_failed(outcome):
                left_out.append(_left_out(question, blocks[block], row))
                continue
            text = self._tokenizer.decode(responses[block][row].tolist(), skip_special_tokens=True)
            self._pool.submit(replace(question, extra_info={**question.extra_info, **outcome}).answered(text))
        return split([*left_out, *self._pool.collect(0.0 if left_out else wait_s)])

    def write_generations(
        self,
        path: Path,
        prompts: Sequence[Prompt],
        stored: ResponseStore,
        results: Sequence[RewardResult],
        shown: Sequence[int],
    ) -> list[dict[str, Any]]:
        """Writes generations to a file (mrl.cluster.generations), here because a scorer has the tokenizer."""
        return write_generations(path, self._tokenizer, prompts, stored, results, shown)

    def close(self) -> None:
        """Ends the scoring processes."""
        if self._pool is not None:
            self._pool.close()


def outcomes(samples: Samples) -> Iterator[dict[str, Any]]:
    """Yields what a reward function finds in extra_info for each row of several turns.

    These are `num_turns` (verl's name), `turns` and `outcome`.
    """
    samples = with_turns(samples)
    counts = samples.counts()
    turns = _of_rows(counts["turn"], samples.turn_calls, samples.turn_rewards)
    parts = _of_rows(counts["part"], samples.part_names, samples.part_values)
    for stop, (calls, rewards), (names, values) in zip(samples.stop_reason.tolist(), turns, parts, strict=True):
        named = [name.decode() for name in names.tolist()]
        yield {
            "num_turns": len(calls),
            "turns": [{"calls": n, "reward": r} for n, r in zip(calls.tolist(), rewards.tolist(), strict=True)],
            "outcome": {
                "stop_reason": STOP_REASONS[stop],
                "reward": float(rewards.sum(dtype=np.float64)),
                "parts": dict(zip(named, values.tolist(), strict=True)),
            },
        }


def _of_rows(counts: np.ndarray, *columns: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields each row's part of the columns. `counts` says how many values it has."""
    ends = np.cumsum(counts)
    for start, end in zip((ends - counts).tolist(), ends.tolist(), strict=True):
        yield tuple(column[start:end] for column in columns)


def has_failed(outcome: Mapping[str, Any]) -> bool:
    """Whether the environment failed. `outcome` is one of `outcomes`."""
    return bool(outcome) and outcome["outcome"]["stop_reason"] == LEFT_OUT


# calls after which a response goes on; an unreadable image counts as the tool's failure, but ends nothing
_NO_FAILURES = (
    OK, "refused", "unread", "not_called", "overridden", "retry", "branch", "untrained", "lost_reward",
    "unreadable_image",
)  # fmt: skip


def _left_out(question: Question, samples: Samples, row: int) -> RewardResult:
    """Returns the result of a response that is not scored. Its detail names the last failed call of its last turn."""
    calls = samples.rows(slice(row, row + 1))
    pairs = list(zip(calls.call_names.tolist(), calls.call_reasons.tolist(), strict=True))
    of_last_turn = pairs[len(pairs) - int(calls.turn_calls[-1]) :]
    made = [(name.decode(), CALL_REASONS[reason]) for name, reason in of_last_turn]
    wrong = [f"{name}: {reason}" for name, reason in made if reason not in _NO_FAILURES]
    detail = "it did not begin"
    if wrong:
        detail = next((each for each in wrong if each.endswith(f": {FELL}")), wrong[-1])
    return RewardResult(question.sample_id, 0.0, {}, LEFT_OUT, detail, question.data_source)


def _without_numbers(question: Question, samples: Samples, row: int) -> RewardResult:
    """Returns the result of a response whose log-probs are not numbers."""
    detail = f"of prompt {samples.prompt_id[row]} under weight version {samples.weight_version[row]}"
    return RewardResult(question.sample_id, 0.0, {}, NOT_FINITE, detail, question.data_source)


@dataclass
class Channel:
    """A scorer as the driver sees it."""

    name: str
    handle: Any
    queued: list[tuple[Any, int, Question]] = field(default_factory=list)  # reference to a block, row in it, question
    under_way: Any = None  # reference to the results of the call under way
    texts: Any = None  # reference to its texts
    awaited: int = 0  # results that are still to come
    sent_at: float = 0.0
    patience_s: float = 0.0  # shortest time between two calls that send something

    def drop_withdrawn(self, asked: Container[int]) -> None:
        """Drops queued questions that nobody asks any more. `asked` holds the numbers of those that are still asked."""
        self.queued = [each for each in self.queued if each[2].sample_id in asked]

    def send(self) -> None:
        """Sends all that is queued."""
        blocks = {id(block): block for block, _, _ in self.queued}
        number = {key: i for i, key in enumerate(blocks)}
        asked = [(number[id(block)], row, question) for block, row, question in self.queued]
        self.awaited = self.awaited + len(asked)
        self.sent_at = time.monotonic()
        self.queued = []
        self.under_way, self.texts = self._call(asked, *blocks.values())

    def _call(self, asked: list[Asked], *blocks: Any) -> Sequence[Any]:
        return self.handle.exchange.options(num_returns=2).remote(asked, WAIT_S, *blocks)

    def _answer(self, finished: Any) -> list[RewardResult]:
        return unwrap(finished, self.name, PHASE)

    def write_generations(self, *arguments: Any) -> list[dict[str, Any]]:
        """Lets the process write generations, and waits for it."""
        return gather({self.name: self.handle.write_generations.remote(*arguments)}, WRITE_S, "writing generations")[
            self.name
        ]

    def receive(self) -> list[RewardResult]:
        """Returns the results of the finished call.

        Raises Interrupted when the process died, or a response was lost with its node.
        """
        finished = self.under_way
        texts = self.texts
        self.under_way = None
        self.texts = None
        results = named(self._answer(finished), texts)
        self.awaited -= len(results)
        return results


@dataclass
class _Exchange:
    """The part that all callers share: the scorers, and who gets which result."""

    channels: Sequence[Channel]
    near: Mapping[str, int]  # by engine, the number of the scorer that judges its responses
    lock: threading.RLock = field(default_factory=threading.RLock)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    askers: dict[int, tuple["ScorerGroup", int]] = field(default_factory=dict)  # number -> caller and its sample_id


class ScorerGroup:
    """All scorers, as one caller sees them. Each caller gets the results of its own questions.

    One thread at a time may use it. Several threads need one group each.
    """

    def __init__(self, channels: Sequence[Channel], near: Mapping[str, int]):
        """`near` maps an engine to the number of the scorer that scores its responses."""
        self._exchange = _Exchange(channels, near)
        self._results: dict[int, RewardResult] = {}  # sample_id -> result that was not collected yet
        self._awaited: dict[int, int] = {}  # sample_id -> number of its question

    def for_another(self) -> "ScorerGroup":
        """Returns a group for another caller, with the same scorers and its own questions."""
        other = type(self)(self.channels, self._exchange.near)
        other._exchange = self._exchange
        return other

    @property
    def channels(self) -> Sequence[Channel]:
        """The scorers."""
        return self._exchange.channels

    def __enter__(self) -> "ScorerGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, samples: ResponseStore, questions: Sequence[Question], engine: str, held_s: float = 0.0) -> None:
        """Queues responses of one engine, with a question each. `forward`, `collect` or `drain` sends them.

        `held_s` is the longest time that their engine held them. The scorer's next call may wait as long.
        """
        with self._exchange.lock:
            channel = self.channels[self._exchange.near[engine]]
            channel.patience_s = held_s
            for block, row, question in zip(samples.block.tolist(), samples.block_row.tolist(), questions, strict=True):
                number = next(self._exchange.numbers)
                self._exchange.askers[number] = self, question.sample_id
                self._awaited[question.sample_id] = number
                channel.queued.append((samples.blocks[block].samples, row, replace(question, sample_id=number)))

    def withdraw(self, sample_ids: Iterable[int]) -> None:
        """Withdraws questions. Their results are not returned any more."""
        with self._exchange.lock:
            for sample_id in sample_ids:
                self._results.pop(sample_id, None)
                if (number := self._awaited.pop(sample_id, None)) is not None:
                    del self._exchange.askers[number]  # what is queued without an asker is not sent

    def withdraw_all(self) -> None:
        """Withdraws all questions of this caller, and drops results that it did not collect."""
        with self._exchange.lock:
            self.withdraw([*self._awaited, *self._results])

    def forward(self, at_once: bool = False) -> None:
        """Takes results of finished calls and sends what is queued, without waiting.

        With `at_once` it also sends soon after the last call. Raises what made scoring impossible, and Late for a
        scorer that stands still.
        """
        with self._exchange.lock:
            for channel in self.channels:
                # without anything to send, calls that only fetch results keep the usual pace
                patience_s = 0.0
                if channel.queued:
                    patience_s = channel.patience_s
                every_s = max(EVERY_S, IN_ALL_S * len(self.channels), patience_s)
                if channel.under_way is not None and self._answered(channel):
                    self._hand_out(channel.receive())
                due = at_once or time.monotonic() - channel.sent_at >= every_s
                if channel.under_way is None and due:
                    channel.drop_withdrawn(self._exchange.askers)
                    if channel.queued or channel.awaited:
                        channel.send()

    def _hand_out(self, results: Sequence[RewardResult]) -> None:
        for result in results:
            asker, sample_id = self._exchange.askers.pop(result.sample_id, (None, 0))
            if asker is not None:  # else it was withdrawn
                del asker._awaited[sample_id]
                asker._results[sample_id] = replace(result, sample_id=sample_id)

    def collect(self, at_once: bool = False) -> list[RewardResult]:
        """Returns results that are ready, each once. Arguments and errors are those of `forward`."""
        self.forward(at_once)
        return self._finished_ones()

    def wait(self, seconds: float) -> None:
        """Returns once a call under way is finished, or the seconds are over."""
        self._finished(self.channels, seconds)

    def _finished_ones(self) -> list[RewardResult]:
        with self._exchange.lock:
            results = list(self._results.values())
            self._results = {}
            return results

    def drain(self, poll: Callable[[], None] = lambda: None, max_failures: int | None = None) -> list[RewardResult]:
        """Waits for all that was submitted. Returns the results that were not collected, sorted by sample_id.

        `poll` is called about twice a second and may raise. The wait ends early, with the results so far, once more
        than `max_failures` of them are failures. The caller refuses these, and can only close the scorers afterwards.
        Raises what `forward` raises.
        """
        self.forward(at_once=True)
        while self._awaited and not self._failed_more_than(max_failures):
            poll()
            self._finished(self.channels, WAIT_S)
            self.forward(at_once=True)
        return sorted(self._finished_ones(), key=lambda result: result.sample_id)

    def write_generations(
        self,
        path: Path,
        prompts: Sequence[Prompt],
        stored: ResponseStore,
        results: Sequence[RewardResult],
        shown: Sequence[int],
    ) -> list[dict[str, Any]]:
        """Lets a scorer write validation responses with their scores. Returns the rows `shown`.

        Raises EnvironmentFault for a full disk. Raises Interrupted when the process dies or is late.
        """
        return self.channels[0].write_generations(path.absolute(), list(prompts), stored, list(results), list(shown))

    def _failed_more_than(self, limit: int | None) -> bool:
        with self._exchange.lock:  # another thread may add some
            return limit is not None and most_failures(self._results.values()) > limit

    def _answered(self, channel: Channel) -> bool:
        """Whether the channel's call is finished. Raises Late where it has been under way for too long."""
        if self._finished([channel], 0):
            return True
        if time.monotonic() - channel.sent_at <= EXCHANGE_S:
            return False
        if self._finished([channel], WAIT_S):  # this process itself may have stood still and missed the answer
            return True
        raise late(PHASE, [channel.name], EXCHANGE_S)

    @staticmethod
    def _finished(channels: Sequence[Channel], timeout_s: float) -> bool:
        """Whether one of the calls under way is finished. Waits for the first."""
        refs = [ref for channel in channels if (ref := channel.under_way) is not None]  # another thread may take some
        return bool(refs and ray.wait(refs, timeout=timeout_s)[0])

    def close(self) -> None:
        """Kills all scorers, whatever they are doing."""
        for channel in self.channels:
            ray.kill(channel.handle)  # their scoring processes die with them


@dataclass(frozen=True)
class ScorerOrder:
    """The scoring processes of a run."""

    reward: RewardConfig
    spec: RewardSpec
    model_path: str  # has the tokenizer
    logs: Path


def start_scorers(order: ScorerOrder, nodes: Mapping[str, str]) -> ScorerGroup:
    """Starts `reward.num_workers` scoring processes over the nodes of the engines, and waits until they are ready.

    `nodes` maps engines to nodes. Raises ConfigError where the function cannot be loaded on a node. Raises
    EnvironmentFault where no process starts.
    """
    reward = order.reward
    own = dict(os.environ), str(Path.cwd())
    hosts, near = scorer_nodes(nodes, reward.num_workers)
    group = ScorerGroup(
        [Channel(f"scorer {i}", _actor(order.model_path, node)) for i, (node, _) in enumerate(hosts)], near
    )
    started = {}
    for channel, (_, share) in zip(group.channels, hosts, strict=True):
        log = order.logs.absolute() / log_file(channel.name)
        settings = PoolSettings(order.spec, share, reward.timeout_s, reward.failure_score or 0.0, log, *own)
        started[channel.name] = channel.handle.start.remote(settings)
    try:
        gather(started, START_S * 4, "starting the scorers")
    except BaseException:
        group.close()
        raise
    return group


def scorer_nodes(nodes: Mapping[str, str], workers: int) -> tuple[list[tuple[str, int]], dict[str, int]]:
    """Returns the nodes with a scorer and its number of processes, and the nearest scorer's number by engine.

    Where there are fewer processes than nodes, engines of the other nodes share them in turn.
    """
    distinct = list(dict.fromkeys(nodes.values()))
    hosts = [(node, len(range(i, workers, min(len(distinct), workers)))) for i, node in enumerate(distinct[:workers])]
    return hosts, {engine: distinct.index(node) % len(hosts) for engine, node in nodes.items()}


def _actor(model: str, node: str) -> ray.actor.ActorHandle:
    return (
        ray.remote(Scorer)
        .options(**on_node(node), max_restarts=0, runtime_env={"env_vars": SMALL_OBJECTS})
        .remote(lambda: _decoder(local_folder(model)))
    )


def _decoder(folder: str) -> Any:
    """Returns what decodes responses. Raises what `load_tokenizer` raises."""
    return quick_decoder(Path(folder)) or load_tokenizer(folder)
