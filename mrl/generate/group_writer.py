"""Writes files of groups in separate processes, one group at a time, from where the responses are stored.

A second writer starts when a quarter of what may wait for each writer is waiting. Above the limit no group is queued,
because waiting groups hold their responses in the object store.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray

from mrl.checkpoint.group_files import GroupRecord, write_group
from mrl.cluster.calls import gather_all
from mrl.data.samples import column_bytes
from mrl.process.ray_nodes import on_node
from mrl.reward.items import RewardResult
from mrl.store.response_store import ResponseStore
from mrl.store.reward_texts import with_texts

MOST_WRITERS = 4  # each takes a processor while it writes
MOST_WAITING = 256 * 1024**2  # most bytes of responses that wait for one writer
RESTARTS = 3


@dataclass(frozen=True)
class GroupParts:
    """One attempt at a group, while its responses are in object stores."""

    number: int
    attempt: int
    responses: Mapping[int, ResponseStore]  # by index in the group, one row each; only those that have tokens
    results: Mapping[int, RewardResult]  # by index; only those that are scored

    def bytes(self, route_bytes: int) -> int:
        """Upper bound of the bytes of the responses' columns. `route_bytes` is the size of one token's routes."""
        lengths = [part.lengths for part in self.responses.values()]
        return sum(column_bytes(prompt, response, route_bytes) for prompt, response in lengths)

    @property
    def newest(self) -> int:
        """Returns the newest version of weights that made one of its tokens."""
        return max(int(part.versions.max()) for part in self.responses.values())

    @property
    def joined(self) -> ResponseStore | None:
        """Joins the group's responses under its number and their index in it. Request ids depend on the order of
        arrival.
        """
        if not self.responses:
            return None
        indices = sorted(self.responses)
        together = type(self.responses[indices[0]]).joined([self.responses[index] for index in indices])
        return together.renumbered(np.full(len(indices), self.number), np.array(indices))


def record_of(parts: GroupParts) -> GroupRecord:
    """Fetches the whole group into this process, with routes and long texts of rewards."""
    joined = parts.joined
    results = dict(parts.results)
    whole = dict(zip(results, with_texts(list(results.values())), strict=True))
    return GroupRecord(parts.number, parts.attempt, joined and joined.read(with_routes=True), whole)


class _Writer:
    """The process that writes."""

    def write(self, path: Path, parts: GroupParts) -> dict[str, Any]:
        return write_group(path, record_of(parts))


@dataclass
class _Queue:
    """The files given to one writer, with their bytes."""

    writer: Any
    under_way: dict[ray.ObjectRef, int] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        """Bytes that wait to be written."""
        return sum(self.under_way.values())

    def look(self) -> None:
        """Removes files that are written."""
        every = list(self.under_way)
        if every:
            for ref in ray.wait(every, num_returns=len(every), timeout=0)[0]:
                del self.under_way[ref]


class GroupWriter:
    """Writes beside generation and training, on this process's node. Only one thread at a time may use it."""

    def __init__(self, timeout_s: float, route_bytes: int):
        """`route_bytes` is the size of one token's routes, as they arrive with responses."""
        self._timeout_s = timeout_s
        self._route_bytes = route_bytes
        self._most = min(MOST_WRITERS, os.cpu_count() or 1)
        self._queues: list[_Queue] = []

    def begin(self, path: Path, parts: GroupParts) -> ray.ObjectRef | None:
        """Queues a file behind earlier ones. Returns a reference to its facts, or None where too much waits already."""
        size = parts.bytes(self._route_bytes)
        for queue in self._queues:
            queue.look()
        queue = min(self._queues, key=lambda queue: queue.waiting, default=None)
        if queue is None or (queue.waiting > MOST_WAITING // 4 and len(self._queues) < self._most):
            queue = self._started()
        if queue.waiting and queue.waiting + size > MOST_WAITING:
            return None
        ref = queue.writer.write.remote(path, parts)
        queue.under_way[ref] = size
        return ref

    def _started(self) -> _Queue:
        options = on_node() | {"max_restarts": RESTARTS, "max_task_retries": RESTARTS}  # a file is written whole
        self._queues.append(_Queue(ray.remote(_Writer).options(**options).remote()))
        return self._queues[-1]

    def facts(self, under_way: Mapping[str, ray.ObjectRef]) -> dict[str, dict[str, Any]]:
        """Waits until all files are written, and returns size and digest of each by name.

        Raises EnvironmentFault for a full disk. Raises Interrupted when writing takes too long or responses are lost.
        """
        return gather_all(dict(under_way), self._timeout_s, "writing groups")

    def written(self, under_way: ray.ObjectRef) -> dict[str, Any] | None:
        """Size and digest of a file; None before it is written. Raises as `facts` does."""
        if not ray.wait([under_way], timeout=0)[0]:
            return None
        return self.facts({"": under_way})[""]

    def close(self) -> None:
        """Ends the processes."""
        for queue in self._queues:
            ray.kill(queue.writer)
