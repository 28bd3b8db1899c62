"""Stand-ins for object store, scorers and ranks: responses in memory, judged here,
and replicas that compute of tokens what real ranks do.
"""

from dataclasses import replace

import numpy as np
from small_model import SIZES

from mrl.cluster.replica_rows import ReplicaRows
from mrl.cluster.scoring import Channel, Scorer, ScorerGroup
from mrl.cluster.stored_samples import ResponseBlock, StoredSamples, in_blocks
from mrl.data.samples import Samples, packed
from mrl.megatron.loss_parameters import loss_parameters
from mrl.model import model_spec
from mrl.model.layout import TrainLayout


class InMemory(StoredSamples):
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
    return InMemory.joined([InMemory.whole(block) for block in in_blocks([packed(samples)])])


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


class Replica:
    """One rank that is a whole replica; the model's log-probs are `gap` and `ref_gap` above generation's."""

    def __init__(self, config, gap: float, ref_gap: float, samples, own, cut, readers):
        self.rows, self.own, self.cut, self.gap, self.ref_gap = None, own, cut, np.float32(gap), np.float32(ref_gap)
        self.parameters = loss_parameters(config)
        self.rows = ReplicaRows(config.algorithm, samples.read(), config.rollout.temperature)

    def log_probs(self):
        rollout = self.rows.batch.rollout_log_probs
        return self._of_own(self.rows.set_old(rollout + self.gap)), (0.5 * len(rollout), float(len(rollout)))

    def old_log_probs_of(self, rows):
        return self.rows.old_log_probs_of(rows)

    def differences(self, rows):
        return self.rows.differences(rows)

    def before_update(self):
        """As RankStep.update says it: on policy the update is the pass."""
        return self.log_probs() if self.rows.batch.old_log_probs is None else None

    def ref_log_probs(self):
        self.rows.set_reference(self.rows.batch.rollout_log_probs + self.ref_gap)

    def correct(self):
        return self._of_own(self.rows.correct())

    def moments(self, advantages):
        return self._of_own(self.rows.moments(advantages))

    def set_advantages(self, advantages):
        return self._of_own(self.rows.set_advantages(advantages))

    def find(self, means):
        return self.rows.find(self.parameters, self.cut.trained_rows(), means)

    def select(self, least):
        self.rows.select(least)

    def _of_own(self, found):
        return {name: values[self.own] for name, values in found.items()}


class Replicas:
    """An actor group of `data` replicas, a rank each. `update` is the test's."""

    def __init__(self, config, data: int, gap: float = 0.1, ref_gap: float = 0.2, update=None):
        layout = {
            "world_size": data,
            "tensor_model_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "sequence_parallel": False,
        }
        self.config, self.model, self.route_readers = config, model_spec(SIZES), {}
        self.layout = TrainLayout.build(layout, self.model)
        self.replicas, self._gaps, self._update = [None] * data, (gap, ref_gap), update

    def each(self, method, arguments, phase, interruptible=False):
        if method == "begin_step":
            self.replicas = [Replica(self.config, *self._gaps, *own) for own in arguments]
            return [None] * len(arguments)
        called = [own[0] for own in arguments]
        assert len(set(called)) == 1
        if called[0] == "update":
            parts = [self._update(own[1], replica) for own, replica in zip(arguments, self.replicas, strict=True)]
            return [(each, replica.before_update()) for each, replica in zip(parts, self.replicas, strict=True)]
        return [getattr(replica, own[0])(*own[1:]) for own, replica in zip(arguments, self.replicas, strict=True)]

    def refs_each(self, method, arguments):
        return dict(enumerate(self.each(method, arguments, method)))

    def of_tokens(self, name: str, rows: list[np.ndarray]) -> np.ndarray:
        """A column of all tokens in the order of the step's rows; `rows` are those that each replica holds."""
        lengths, parts = {}, {}
        for replica, numbers in zip(self.replicas, rows, strict=True):
            values, batch = getattr(replica.rows.batch, name), replica.rows.batch
            ends = np.cumsum(batch.response_lengths)
            for number, end, length, own in zip(
                numbers.tolist(), ends, batch.response_lengths, replica.own, strict=True
            ):
                if own:
                    parts[number], lengths[number] = values[end - length : end], length
        return np.concatenate([parts[number] for number in sorted(parts)])
