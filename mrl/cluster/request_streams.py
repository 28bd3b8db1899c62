"""Requests under way at the engines, and responses as they come back: blocks that stay where they are, and numbers.

An engine's process yields a block, its routes where they were asked for, then what the driver is told of it; see
StoredSamples. Where a response goes on from tokens that were generated before, the engine's process fetches those by
reference and gives back the two together.

Whoever is woken for each response of a large step is busy with waking: what has come back waits for more, a hundredth
of the time that it took, and all of it is taken together.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import ray

from mrl.cluster.calls import LostPeer, blame, unwrap
from mrl.cluster.engine_progress import EngineProgress
from mrl.cluster.stored_samples import Block, StoredSamples
from mrl.data.samples import SampleRows
from mrl.vllm.requests import Request, Sampling

AHEAD = 64  # objects of a stream, two a block, that nobody has taken yet
REST_S = 0.1  # between two takes that bring something, at most
REST_SHARE = 0.01  # of the time that the newest response took: so much longer a freed place of an engine is empty
PHASE = "generation"


class Arrived(NamedTuple):
    """Responses of one engine that finished together."""

    samples: StoredSamples
    engine: str


class Sent(NamedTuple):
    """A call of an engine that streams responses."""

    engine: str
    routed: bool  # routes come, too
    at: float  # of time.monotonic


class RequestStreams:
    """What was sent to engines, by name, and is not all back."""

    def __init__(
        self,
        workers: Mapping[str, ray.actor.ActorHandle],
        all_there: Callable[[], dict[str, ray.ObjectRef]],
        nodes: Mapping[str, str],
        limit_s: float,
    ):
        """`all_there`: asks each engine whether all of it lives, answers to come by name. `nodes`: of engines, by name.

        `limit_s`: that an engine may make no token.
        """
        self._workers, self._all_there, self._nodes = workers, all_there, nodes
        self.progress = EngineProgress(lambda engine: workers[engine].reading.remote(), limit_s)
        self._streams: dict[ray.ObjectRefGenerator, Sent] = {}
        self._begun: dict[ray.ObjectRefGenerator, list[ray.ObjectRef]] = {}  # blocks whose numbers are to come
        self._rests_until = 0.0  # of time.monotonic

    @property
    def waiting_for(self) -> list[str]:
        """Engines that have requests, each once."""
        return list(dict.fromkeys(sent.engine for sent in self._streams.values()))

    def send(
        self,
        engine: str,
        requests: Sequence[Request],
        sampling: Sampling,
        kept: Mapping[int, StoredSamples] | None = None,
    ) -> None:
        """Asks one engine for responses. `kept`: by sample_id, the row that a response goes on from."""
        if not requests:
            return
        if engine not in self.waiting_for:
            self.progress.begin(engine)
        generate = self._workers[engine].generate.options(
            num_returns="streaming", _generator_backpressure_num_objects=AHEAD
        )
        before = {number: (row.blocks[0], int(row.place[0])) for number, row in (kept or {}).items()}
        sent = Sent(engine, sampling.routes, time.monotonic())
        self._streams[generate.remote(list(requests), sampling, before)] = sent

    def take(self, timeout_s: float) -> list[Arrived]:
        """All that has come back since; waits for the first of it, and rests a little after what came before.

        Raises Interrupted when an engine died, or made no token for too long.
        """
        self.progress.check(self.waiting_for)
        time.sleep(max(0.0, self._rests_until - time.monotonic()))
        ready = self._ready(0.0) or self._ready(timeout_s)
        return [arrived for stream in ready for arrived in self._all_of(stream)]

    def _ready(self, timeout_s: float) -> list[ray.ObjectRefGenerator]:
        every = 1 if timeout_s else len(self._streams)
        # a block is not for this node
        return ray.wait(list(self._streams), num_returns=every, timeout=timeout_s, fetch_local=False)[0]

    def _all_of(self, stream: ray.ObjectRefGenerator) -> Iterator[Arrived]:
        """Blocks of one stream that are there, each with what is told of it; the stream has something, or is at its
        end.

        An engine that stops in between holds up nobody: what it began is gone on with by the next call.
        """
        items, sent = self._begun.pop(stream, []), self._streams[stream]
        while True:
            try:
                items.append(next(stream))
            except StopIteration:
                del self._streams[stream]
                if items:  # nothing follows an engine's error
                    yield self._told(items, sent)
                return
            if len(items) == 2 + sent.routed:
                yield self._told(items, sent)
                items = []
            if not stream.next_ready():
                if items:
                    self._begun[stream] = items
                return

    def _told(self, items: list[ray.ObjectRef], sent: Sent) -> Arrived:
        engine, now = sent.engine, time.monotonic()
        self._rests_until = now + min(REST_S, REST_SHARE * (now - sent.at))
        try:
            rows = SampleRows.from_bytes(unwrap(items[-1], engine, PHASE))
        except LostPeer as error:  # whom it lost, the lost one's own front end knows, also one that had no request
            raise blame(error, self._all_there(), PHASE) from error
        block = Block(items[0], items[1] if len(items) == 3 else None, self._nodes[engine])
        return Arrived(StoredSamples.of(rows, block), engine)
