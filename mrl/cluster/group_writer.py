"""Files of groups are written by a process of their own, one group at a time, from where the responses are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from mrl.checkpoint.group_files import write_group
from mrl.cluster.calls import gather_all
from mrl.cluster.helper_actors import on_node
from mrl.cluster.stored_samples import StoredSamples


class _Writer:
    """The process."""

    def write(self, path: Path, responses: StoredSamples) -> dict[str, Any]:
        return write_group(path, responses.read(with_routes=True))


class GroupWriter:
    """Writes beside generation and training, on the node of this process."""

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._writer = ray.remote(_Writer).options(**on_node()).remote()

    def begin(self, path: Path, responses: StoredSamples) -> ray.ObjectRef:
        """Begins with a file as soon as those before it are written; facts of it to come."""
        return self._writer.write.remote(path, responses)

    def facts(self, under_way: Mapping[str, ray.ObjectRef]) -> dict[str, dict[str, Any]]:
        """Size and digest of each file, by name, once all are written.

        Raises EnvironmentFault for a full disk, Interrupted when they take too long or responses are lost.
        """
        return gather_all(dict(under_way), self._timeout_s, "writing groups")

    def close(self) -> None:
        """Ends the process."""
        ray.kill(self._writer)
