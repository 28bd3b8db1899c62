"""Brings new weights into one engine, from the engine's side: by buckets (slow path) or by the plan (fast path).

The meaning of an update for the engine's state and version is not known here, but in mrl.engine.vllm_engine.
"""

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mrl.engine.engine_calls import EngineCalls
from mrl.engine.leftovers import new_folder
from mrl.engine.requests import EngineSettings
from mrl.errors import EnvironmentFault, Interrupted, described


class EngineUpdates:
    """Drives vLLM's workers through updates, and keeps the files that these need."""

    def __init__(self, calls: EngineCalls, settings: EngineSettings, note_files: Callable[[], None]):
        """`note_files` is called whenever `files` has changed."""
        self._calls = calls
        self._settings = settings
        self._note_files = note_files
        self._numbers = itertools.count()  # of buckets
        self._buckets: Path | None = None  # folder of an update by the slow path
        self._path = ""  # "slow" or "fast": the path for which vLLM's workers are ready
        self._arenas: tuple[Path, ...] = ()  # files of weight syncs that are not unlinked yet

    @property
    def files(self) -> set[Path]:
        """The files and folders that exist in shared memory now."""
        existing = set(self._arenas)
        if self._buckets:
            existing.add(self._buckets)
        return existing

    async def connect_slow(self) -> None:
        """Makes vLLM's workers ready for the slow path, if they are not."""
        if self._path != "slow":
            expected = {name: list(shape) for name, shape in self._settings.expected}
            await self._calls.workers("init_weight_transfer_engine", {"path": "slow", "expected": expected})
            self._path = "slow"

    async def begin(self) -> None:
        """Enters an update by the slow path, and drops the rest of an unfinished one."""
        self.drop_buckets()
        await self.connect_slow()
        self._buckets = new_folder()
        self._note_files()
        await self._calls.workers("start_weight_update")

    async def load_bucket(self, data: np.ndarray, sha256: str) -> int:
        """Loads one bucket: safetensors bytes as a uint8 array, with their SHA-256. Returns bytes."""
        # each bucket has its own file: workers keep tensors of a layer mapped until its last bucket has come
        path = self._buckets / f"bucket-{next(self._numbers)}.safetensors"
        with path.open("wb") as file:
            file.write(memoryview(data))
        await self._calls.workers("update_weights", {"bucket": str(path), "sha256": sha256})
        path.unlink()
        return len(data)

    async def finish(self) -> None:
        """Leaves the slow path's update. Raises RuntimeError when a tensor did not come or was not written."""
        await self._calls.workers("finish_weight_update")
        self.drop_buckets()
        self._note_files()

    def drop_buckets(self) -> None:
        """Removes the folder of an update by the slow path, if there is one."""
        if self._buckets is not None:
            shutil.rmtree(self._buckets, ignore_errors=True)
            self._buckets = None

    async def agree_on_fast(self, setup: dict[str, Any], plan_hash: str, holds_weights: bool) -> int:
        """Agrees on the plan of weight syncs and checks vLLM's parameters against it; returns the bytes of the weights.

        `holds_weights`: the parameters hold numbers, so that reading them back can be tried. Raises EnvironmentFault
        for another plan, and for parameters that differ from the plan, by name.
        """
        from mrl.reshard.setup import SyncSetup
        from mrl.reshard.transport_shm import arena_files

        agreed = SyncSetup.from_json(setup)
        engine = self._settings.engine_id
        agreed.check_hash(plan_hash, self._settings.name)
        workers = [agreed.worker(engine, position) for position in self._settings.positions]
        self._arenas = tuple(path for worker in workers for path in arena_files(agreed, worker))
        self._note_files()
        info = {
            "path": "fast",
            "setup": setup,
            "engine": engine,
            "plan_hash": plan_hash,
            "holds_weights": holds_weights,
        }
        with self._cannot_take():
            await self._calls.workers("init_weight_transfer_engine", info)
        self._path = "fast"
        return sum(await self._calls.workers("weight_bytes"))

    async def connect_fast(self) -> None:
        """Connects with the ranks, which do the same now.

        Raises EnvironmentFault when they do not come, or when memory for messages is missing.
        """
        with self._cannot_take():
            await self._calls.workers("meet_ranks")

    @contextmanager
    def _cannot_take(self) -> Iterator[None]:
        try:
            yield
        except Interrupted:
            raise
        except Exception as error:
            raise EnvironmentFault(
                f"{self._settings.name} cannot take weights by the plan: {error}; reshard.path: slow goes "
                "through vLLM's own loader"
            ) from error

    def release_arenas(self) -> None:
        """Unlinks shared memory, once every rank has it open. So no file is left behind, however a process ends."""
        for path in self._arenas:
            path.unlink(missing_ok=True)
        self._arenas = ()
        self._note_files()

    async def receive(self, update: int, read_back: bool) -> list[dict[str, Any]]:
        """Takes one sync by the fast path; returns the report of each worker (WorkerExtension.weight_update_report)."""
        try:
            await self._calls.workers("start_weight_update")
            await self._calls.workers("update_weights", {"update": update, "read_back": read_back})
            await self._calls.workers("finish_weight_update")
        except Interrupted:
            raise
        except Exception as error:
            await self._abandon(error)
            raise
        return await self._calls.workers("weight_update_report")

    async def _abandon(self, error: Exception) -> None:
        """Drops the update that `error` ended. Raises RuntimeError with both causes when that fails too."""
        try:
            await self._calls.workers("abandon_update")
        except Interrupted:
            raise
        except Exception as second:
            raise RuntimeError(f"{described(error)}; and dropping the update failed: {described(second)}") from error
