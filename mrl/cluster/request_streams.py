"""Requests under way at the engines, and responses as they come back: blocks that stay where they are, and numbers.

An engine's process yields a block, its routes where they were asked for, then what the driver is told of it; see
StoredSamples. Where a response goes on from tokens that were generated before, the engine's process fetches those by
reference and gives back the two together.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import ray

from mrl.cluster.calls import LostPeer, blame, unwrap
from mrl.cluster.engine_progress import EngineProgress
from mrl.cluster.stored_samples import Block, StoredSamples
from mrl.data.samples import SampleRows
from mrl.vllm.requests import Request, Sampling

AHEAD = 64  # objects of a stream, two a block, that nobody has taken yet
PHASE = "generation"


class Arrived(NamedTuple):
    """Responses of one engine that finished together."""

    samples: StoredSamples
    engine: str


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
        self._streams: dict[ray.ObjectRefGenerator, tuple[str, bool]] = {}  # engine, and whether routes come
        self._begun: dict[ray.ObjectRefGenerator, list[ray.ObjectRef]] = {}  # blocks whose numbers are to come

    @property
    def waiting_for(self) -> list[str]:
        """Engines that have requests, each once."""
        return list(dict.fromkeys(engine for engine, _ in self._streams.values()))

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
        self._streams[generate.remote(list(requests), sampling, before)] = engine, sampling.routes

    def take(self, timeout_s: float) -> list[Arrived]:
        """What has come back since, at most one block an engine and call; waits for the first of it.

        Raises Interrupted when an engine died, or made no token for too long.
        """
        self.progress.check(self.waiting_for)
        ready = self._ready(0.0) or self._ready(timeout_s)
        arrived = [self._next(stream) for stream in ready]
        return [each for each in arrived if each is not None]

    def _ready(self, timeout_s: float) -> list[ray.ObjectRefGenerator]:
        every = 1 if timeout_s else len(self._streams)
        # a block is not for this node
        return ray.wait(list(self._streams), num_returns=every, timeout=timeout_s, fetch_local=False)[0]

    def _next(self, stream: ray.ObjectRefGenerator) -> Arrived | None:
        """A block with what is told of it; None while that is to come.

        An engine that stops in between holds up nobody.
        """
        begun = self._begun.setdefault(stream, [])
        try:
            begun.append(next(stream))
        except StopIteration:
            engine, _ = self._streams.pop(stream)
            del self._begun[stream]
            return self._told(begun, engine) if begun else None  # nothing follows an engine's error
        engine, routed = self._streams[stream]
        if len(begun) == 2 + routed:
            del self._begun[stream]
            return self._told(begun, engine)
        return self._next(stream) if ray.wait([stream], timeout=0, fetch_local=False)[0] else None

    def _told(self, items: list[ray.ObjectRef], engine: str) -> Arrived:
        try:
            rows = SampleRows.from_bytes(unwrap(items[-1], engine, PHASE))
        except LostPeer as error:  # whom it lost, the lost one's own front end knows, also one that had no request
            raise blame(error, self._all_there(), PHASE) from error
        block = Block(items[0], items[1] if len(items) == 3 else None, self._nodes[engine])
        return Arrived(StoredSamples.of(rows, block), engine)
