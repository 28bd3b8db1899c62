"""Stand-ins for object store, scorers and ranks: responses in memory, judged here,
and replicas that compute of tokens what real ranks do.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
from small_model import SIZES

from mrl.cluster.scoring import Channel, Scorer, ScorerGroup
from mrl.data.samples import Samples, packed
from mrl.driver.step_batch import StepBatch
from mrl.generate.rollouts import compared, metric_values
from mrl.model import model_spec
from mrl.model.layout import TrainLayout
from mrl.rank.exchange import FailedElsewhere
from mrl.rank.loss_parameters import loss_parameters
from mrl.rank.rank_step import CRITIC, TEACHER, RankStep, Scored
from mrl.rank.row_results import RowResult, UpdateResult
from mrl.rank.second_rows import SecondRows
from mrl.store.response_store import ResponseBlock, ResponseStore, in_blocks


class InMemory(ResponseStore):
    """References are the responses themselves, and their routes."""

    @staticmethod
    def _get(references):
        return list(references)

    @classmethod
    def whole(cls, samples: Samples, node: str = ""):
        """One block."""
        return cls.of(samples.numbers, ResponseBlock(replace(samples, routes=None), samples.routes, node))

    put_here = whole


def stored(samples) -> InMemory:
    rows = samples if isinstance(samples, Samples) else packed(samples)
    return InMemory.joined([InMemory.whole(block) for block in in_blocks([rows])])


class Here(Channel):
    """A scorer in this process; blocks are the responses themselves."""

    def _call(self, asked, *blocks):
        return self.handle.exchange(asked, 0.01, *blocks)

    def _answer(self, finished):
        return finished

    def write_generations(self, *arguments):
        return self.handle.write_generations(*arguments)


class HereAlone(ScorerGroup):
    """One scorer, in this process."""

    @staticmethod
    def _finished(channels, timeout_s):
        return True

    def close(self):
        for channel in self.channels:
            channel.handle.close()


def scorers(pool, tokenizer, *engines: str) -> ScorerGroup:
    """The product's but for Ray, around a pool of the test's."""
    scorer = Scorer(lambda: tokenizer)
    scorer._pool = pool
    return HereAlone([Here("scorer 0", scorer)], dict.fromkeys(engines or ("engine 0",), 0))


class Together:
    """Exchanges bytes between ranks, each of which is a thread. `calls` counts exchanges."""

    def __init__(self, ranks: int):
        self.calls, self._given, self._met = 0, [b""] * ranks, threading.Barrier(ranks, self._count, timeout=20)

    def _count(self):
        self.calls += 0.5

    def end(self, rank: int):
        def gather(data: bytes) -> list[bytes]:
            self._given[rank] = data
            self._met.wait()
            every = list(self._given)
            self._met.wait()  # nobody gives the next before all have read
            return every

        return gather


def in_threads(calls) -> list:
    """What calls return that wait for each other. Raises the first's error of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        begun = [pool.submit(call) for call in calls]
    failed = [each.exception() for each in begun if each.exception() is not None]
    for error in sorted(failed, key=lambda error: isinstance(error, FailedElsewhere)):
        raise error
    return [each.result() for each in begun]


class ReplicaActor:
    """Stands in for MegatronActor as one rank that is a whole replica, and for its model.

    Log-probs of what was sampled are `gap` and `ref_gap` above generation's: a number, or a function of those.
    `updated` makes the metrics of an update from its counts and the replica's number.
    """

    on_last_stage = holds_result = True
    routing = None

    def __init__(self, config, number=0, gap=0.0, ref_gap=0.0, updated=None):
        self.config, self.number, self.gap, self.ref_gap, self.updated = config, number, gap, ref_gap, updated
        self.loss_parameters = loss_parameters(config.algorithm, config.distillation)
        self.teacher = None
        self.gather_bytes = lambda data: [data]

    @property
    def rank(self):
        return self.number

    def policy_log_probs(self, batch, micros=()):
        return self._above(batch, self.gap)

    def reference_log_probs(self, batch, micros=()):
        return self._above(batch, self.ref_gap)

    def update_replica(self, batch, mini_batches, counts):
        """On policy the update is the pass."""
        old = self.policy_log_probs(batch) if batch.old_log_probs is None else None
        return UpdateResult(self.updated(counts, self.number), [], old)

    @staticmethod
    def _above(batch, gap):
        own = batch.rollout_log_probs[batch.is_sampled]
        gap = gap(own) if callable(gap) else np.float32(gap)
        return RowResult(np.arange(len(batch)), own + gap, (0.5 * len(own), float(len(own))))


class ReplicaCritic:
    """Stands in for MegatronCritic of a rank; keeps what it is updated with. On `last` ranks it has results, and those
    that hold them hand them out.

    Values are `value` of what generation's log-probs of the sampled tokens are.
    """

    def __init__(self, value=lambda own: 0.5 * own, last=True, holds_result=True):
        self.value, self.updates = value, []
        self.on_last_stage, self.holds_result = last, holds_result

    def prepared(self, batch):
        return batch

    def columns(self, batch, micros):
        if not self.on_last_stage:
            return None
        rows = np.unique(np.concatenate([micro.rows for micro in micros if not micro.is_filler]))
        own = self.value(batch.rollout_log_probs[batch.sampled_indices(rows)])
        return rows, {"critic_values": own.astype(np.float32)}

    def update_replica(self, batch, mini_batches, counts):
        self.updates.append((batch, mini_batches, counts))
        return [{"critic/vf_loss": (float(c.tokens), float(c.tokens))} for c in counts]


class Replicas:
    """An actor group of `data` replicas, a rank each; see ReplicaActor. The critic's degrees may be others."""

    def __init__(self, config, data: int, gap=0.1, ref_gap=0.2, updated=None):
        layout = {
            "world_size": data,
            "tensor_model_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "sequence_parallel": False,
        }
        self.config, self.model, self.route_readers = config, model_spec(SIZES), {}
        self.layout = TrainLayout.build(layout, self.model)
        self.teacher = None
        own = config.critic.layout
        self.critic_layout = TrainLayout.build(own, self.model) if own else self.layout
        self.second: list[SecondRows] = []
        self.actors = [ReplicaActor(config, number, gap, ref_gap, updated) for number in range(data)]
        self.steps: list[RankStep] = []
        self.stops = lambda rank: False

    @property
    def batches(self):
        """The rows of each rank, and what is computed of them."""
        return [step._tokens for step in self.steps]

    def score(self, arguments):
        self.together = Together(len(self.actors))
        for number, actor in enumerate(self.actors):
            actor.gather_bytes = self.together.end(number)
        self.steps = [
            RankStep(actor, rows, partial(self.stops, actor.rank))
            for actor, (rows, *_) in zip(self.actors, arguments, strict=True)
        ]
        asked = zip(self.steps, arguments, strict=True)
        answers = in_threads([lambda step=step, own=own: step.score(*own[1:3], own[3:]) for step, own in asked])
        return [first for first, _ in answers], [second for _, second in answers]

    def each_keeping(self, method, arguments, phase):
        asked = list(zip(self.actors, arguments, strict=True))
        assert method == "score_by"
        self.second = [SecondRows(actor, *own) for actor, own in asked]
        return [None] * len(asked), [rows.columns() for rows in self.second]

    def each(self, method, arguments, phase, interruptible=False):
        if method == "update_critic":
            asked = zip(self.second, self.steps, arguments, strict=True)
            return [batch.update(step.critic_counts(), returns) for batch, step, returns in asked]
        if method == "shown":
            return [step.shown(*own) for step, own in zip(self.steps, arguments, strict=True)]
        assert method == "update"
        steps = self.steps
        if arguments[0]:  # the actor is left as it is
            self.steps = []
            return [([], {})] * len(steps)
        return in_threads([step.update for step in steps])

    def refs_each(self, method, arguments):
        return dict(enumerate(self.each(method, arguments, method)))

    def of_tokens(self, name: str, rows: list[np.ndarray]) -> np.ndarray:
        """A column of all tokens in the order of the step's rows; `rows` are those that each replica holds.

        Columns of the critic are those before it was handed what it is trained on.
        """
        lengths, parts = {}, {}
        for replica, numbers in zip(self.batches, rows, strict=True):
            batch = getattr(replica, "kept", replica.batch)
            values = getattr(batch, name)
            ends = np.cumsum(batch.response_lengths)
            for number, end, length, own in zip(
                numbers.tolist(), ends, batch.response_lengths, replica.own, strict=True
            ):
                if own:
                    parts[number], lengths[number] = values[end - length : end], length
        return np.concatenate([parts[number] for number in sorted(parts)])


def scored_step(actor: Replicas, rollouts, counted=None, kl_coef=None) -> tuple[StepBatch, Scored]:
    """A step on the ranks, after all that the loop asks of them before an update."""
    config, step = actor.config, StepBatch(actor, rollouts.samples, 1)
    if counted is None:
        counted = compared(step.rows.group_id, rollouts.results, config.compares_responses)
    if config.distillation.enabled:
        step.score_by(TEACHER)
    if config.algorithm.needs_critic:
        step.score_by(CRITIC)
    keys = config.algorithm.gdpo_reward_keys
    return step, step.score(
        rollouts.rewards,
        counted,
        {key: metric_values(key, rollouts.results, rollouts.rewards) for key in keys},
        by_reference=config.algorithm.needs_reference,
        kl_coef=kl_coef,
    )


def trained_of(actor: Replicas) -> np.ndarray:
    """Trained tokens of each row, as every rank has them."""
    for step in actor.steps[1:]:
        np.testing.assert_array_equal(step._trained, actor.steps[0]._trained)
    return actor.steps[0]._trained
