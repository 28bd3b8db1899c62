"""Stand-ins for object store, scorers and ranks: responses in memory, judged here,
and replicas that compute of tokens what real ranks do.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from small_model import SIZES

from mrl.cluster.scoring import Channel, Scorer, ScorerGroup
from mrl.data.samples import Samples, packed
from mrl.model import model_spec
from mrl.model.layout import TrainLayout
from mrl.rank.batching import RowResult, UpdateResult
from mrl.rank.critic_rows import CriticBatch
from mrl.rank.loss_parameters import loss_parameters
from mrl.rank.rank_batch import RankBatch
from mrl.rank.teacher_rows import scored
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

    def values(self, batch, micros):
        if not self.on_last_stage:
            return None
        rows = np.unique(np.concatenate([micro.rows for micro in micros if not micro.is_filler]))
        own = self.value(batch.rollout_log_probs[batch.sampled_places_of(rows)])
        return SimpleNamespace(rows=rows, values=own.astype(np.float32))

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
        self.computed: list = []
        self.critic_batches: list[CriticBatch] = []
        self.actors = [ReplicaActor(config, number, gap, ref_gap, updated) for number in range(data)]
        self.batches: list[RankBatch] = []

    def each(self, method, arguments, phase, interruptible=False):
        if method == "begin_step":
            self.batches = [RankBatch.fetched(actor, *own) for actor, own in zip(self.actors, arguments, strict=True)]
            return [None] * len(arguments)
        if method == "ask_teacher":
            self.computed = [scored(actor, *own) for actor, own in zip(self.actors, arguments, strict=True)]
            return [None] * len(arguments)
        if method == "ask_critic":
            self.critic_batches = [CriticBatch(actor, *own) for actor, own in zip(self.actors, arguments, strict=True)]
            self.computed = [batch.values() for batch in self.critic_batches]
            return [None] * len(arguments)
        if method == "hand_out":
            return self.computed
        if method == "update_critic":
            asked = zip(self.critic_batches, arguments, strict=True)
            return [batch.update(counts, returns) for batch, (counts, *returns) in asked]
        assert method == "do" and len({verb for verb, *_ in arguments}) == 1
        return [batch.do(*own) for batch, own in zip(self.batches, arguments, strict=True)]

    def refs_each(self, method, arguments):
        return dict(enumerate(self.each(method, arguments, method)))

    def of_tokens(self, name: str, rows: list[np.ndarray]) -> np.ndarray:
        """A column of all tokens in the order of the step's rows; `rows` are those that each replica holds."""
        lengths, parts = {}, {}
        for replica, numbers in zip(self.batches, rows, strict=True):
            values, batch = getattr(replica.batch, name), replica.batch
            ends = np.cumsum(batch.response_lengths)
            for number, end, length, own in zip(
                numbers.tolist(), ends, batch.response_lengths, replica.own, strict=True
            ):
                if own:
                    parts[number], lengths[number] = values[end - length : end], length
        return np.concatenate([parts[number] for number in sorted(parts)])
