"""Saves the checkpoints of a run beside the training, and keeps only as many as configured.

The writing overlaps the steps that follow:

    step N      ranks copy their parts to host memory     training waits
    step N+1    a thread writes them to the disk          training continues
    step N+2    the result is requested                   a refusal of the disk is counted, and the run continues

All calls, with the process that runs each (ActorGroup and rank_worker.py only pass them on):

    driver    loop.py: copy_checkpoint -> Saver.take -> ActorGroup.take_checkpoint
    rank      rank_save.py: HostCopy.take, parts of this rank in host memory
    driver    loop.py: write_checkpoint -> Saver.write, whose thread begins step_folders.write_atomically
    rank      rank_save.py: HostCopy.write, write_tensors -> checkpoint/safetensors_file.py: write_blocks, then fsync;
              manifest.py: described, what the file holds
    driver    Hugging Face's files, groups ahead, manifest.write_manifest last; the folder gets its name; older ones go
"""

import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from mrl.checkpoint.disk_space import BESIDE_TENSORS, check_disk_space
from mrl.checkpoint.draft_layers import FILE as DRAFTS_FILE
from mrl.checkpoint.draft_layers import DraftLayers, draft_layers, keep
from mrl.checkpoint.group_files import name_again
from mrl.checkpoint.hf_folder import copy_hf_files
from mrl.checkpoint.manifest import HF_FOLDER, FileFacts, Manifest, RankFiles, write_manifest
from mrl.checkpoint.step_folders import discard, superseded, write_atomically
from mrl.checkpoint.vision_tower import TOWER
from mrl.config.schema import LayoutConfig, TrainerConfig
from mrl.driver.resume import RunIdentity
from mrl.errors import EnvironmentFault
from mrl.generate.train_state import TrainState
from mrl.model import load_model_spec, with_predicting
from mrl.model.hf_config import without_quantization
from mrl.model.trained_tower import PROJECTOR, TRAINED
from mrl.platforms.source import own_version


class SavingActor(Protocol):
    """The methods of the actor's ranks that saving needs."""

    def take_checkpoint(self) -> int:
        """Makes every rank copy its part to host memory. Returns the bytes that all of them will write."""

    def write_checkpoint(self, work: Path) -> list[dict[str, Any]]:
        """Makes every rank write its copy into `work`.

        Returns RankFiles as JSON, with those of a critic under `critic`.
        """


@dataclass(frozen=True)
class WriteResult:
    """The result of a write."""

    step: int
    seconds: float
    fault: str | None  # the error of the disk; None: the checkpoint is complete


class BackgroundWrite:
    """Runs one write at a time in a thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._running: tuple[int, Future[WriteResult]] | None = None

    def begin(self, step: int, write: Callable[[], None]) -> None:
        """Starts `write()`.

        Raises RuntimeError if the previous result was not requested, because it would be lost.
        """
        if self._running is not None:
            raise RuntimeError(
                f"step {step} is to be saved before it is known how the save of step {self._running[0]} ended"
            )
        self._running = step, self._thread.submit(_timed, step, write)

    def result(self, wait: bool) -> WriteResult | None:
        """Returns the result of the write, once.

        Returns None if there is no write, or without `wait` if it is still running. A refusal of the disk is a result.
        Any other error of `write` is raised here.
        """
        if self._running is None or not (wait or self._running[1].done()):
            return None
        future = self._running[1]
        self._running = None
        return future.result()

    def close(self) -> None:
        """Waits for the current write, because its checkpoint is useful however the run ends.

        Prints a message if it fails.
        """
        try:
            result = self.result(wait=True)
            if result is not None and result.fault:
                print(f"error: step {result.step} is not saved: {result.fault}", flush=True)
        except Exception as error:  # the run is ending, usually for the same reason, and raises that error
            print(f"error: a checkpoint is not saved: {error}", flush=True)
        self._thread.shutdown()


def _timed(step: int, write: Callable[[], None]) -> WriteResult:
    began = time.perf_counter()
    fault = None
    try:
        write()
    except (OSError, EnvironmentFault) as error:
        fault = str(error)
    return WriteResult(step, time.perf_counter() - began, fault)


@dataclass(frozen=True)
class SavedRun:
    """The facts about a run in each of its checkpoints, independent of the step."""

    identity: RunIdentity
    layout: LayoutConfig  # of the actor's ranks
    data_fingerprint: str  # of the training prompts, which a resume compares
    token_routes: int = 0  # bytes of one token's routes, in kept samples


class Saver:
    """Saves one run into `folder`/step-N.

    `check` is called before a checkpoint gets its name and before each older one is removed. It raises LostLock if
    nothing may be written any more.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        saved: SavedRun,
        folder: Path,
        actor: SavingActor,
        saved_step: int,
        check: Callable[[], None] = lambda: None,
    ):
        self.saved_step = saved_step  # of the newest complete checkpoint
        self.failed_saves = 0
        self.tell_saved: Callable[[int], None] = lambda step: None  # called for each complete checkpoint
        self.last_s = 0.0  # duration of the last save: the ranks' copies and the writing
        self._failed_in_a_row = 0
        self._last_fault = ""  # the reason of the newest failure
        self._taking_s = 0.0
        self._copied_step: int | None = None  # step whose copy the ranks hold, before it is written
        self._copied_bytes = 0  # size of that copy
        self._trainer = trainer
        self._saved = saved
        self._folder = folder
        self._actor = actor
        self._check = check
        self._drafts: DraftLayers | None = None  # of model.path, once they were looked for
        self._written_drafts: tuple[Path, FileFacts] | None = None  # the newest file of them, and its facts
        self._writing = BackgroundWrite()

    def save(self, state: TrainState, metrics: dict[str, float] | None = None) -> dict[str, float]:
        """Calls `take` and `write`: begins a checkpoint of `state`, unless there is one."""
        previous = self.take(state.step)
        return previous | self.write(state, metrics)

    def take(self, step: int) -> dict[str, float]:
        """Makes the ranks copy their parts of the checkpoint of `step` to host memory, for `write`, unless there is
        one.

        They do so after the previous save has ended. Returns the metrics of `finished`. If the disk refuses a
        checkpoint, training continues. The failure is printed and counted, and existing checkpoints stay.
        """
        previous = self.finished(wait=True)
        self._copied_step = None
        if self.saved_step == step:
            return previous
        began = time.perf_counter()
        try:
            self._copied_bytes = self._actor.take_checkpoint()
            check_disk_space(self._folder, self._copied_bytes + BESIDE_TENSORS)
            self._copied_step = step
            self._taking_s = time.perf_counter() - began
        except EnvironmentFault as fault:
            self._count_failure(step, str(fault))
        return previous

    def write(self, state: TrainState, metrics: dict[str, float] | None = None) -> dict[str, float]:
        """Begins to write the copy of `state`, if there is one, while training continues.

        `metrics`: of its step, in case their line gets lost. Returns the metrics of `finished`.
        """
        if self._copied_step != state.step:
            return {}
        self._copied_step = None
        if state.ahead is not None:
            state.ahead.hold()
        self._writing.begin(state.step, partial(self._write_held, state, dict(metrics or {})))
        if self._trainer.async_save:
            return {}
        return self.finished(wait=True)

    def finished(self, wait: bool = False) -> dict[str, float]:
        """Returns the metrics of the current save, if it has ended.

        Raises its errors, except a refusal of the disk.
        """
        result = self._writing.result(wait)
        if result is None:
            return {}
        if result.fault:
            self._count_failure(result.step, result.fault)
        else:
            self.saved_step = result.step
            self.tell_saved(result.step)
            self.last_s = self._taking_s + result.seconds
            self._failed_in_a_row = 0
        return {"perf/checkpoint_write_s": result.seconds}

    def save_last(self, state: TrainState, metrics: dict[str, float] | None = None) -> None:
        """Saves a final checkpoint of `state`. `metrics`: of its step, in case their line is missing.

        Raises EnvironmentFault if the disk refuses it.
        """
        self.save(state, metrics)
        self.finished(wait=True)
        if self.saved_step != state.step:
            fault = f"step {state.step} is not saved ({self._last_fault})"
            raise EnvironmentFault(f"{self._folder}: {fault}; {self._newest()}. Make room and pass --resume")

    def close(self) -> None:
        """Waits for the current write."""
        self._writing.close()

    def count_on(self, before: "Saver") -> None:
        """Takes over failed saves, and the duration of a save, of `before`. It saved this run until ranks were lost."""
        self.failed_saves = before.failed_saves
        self.last_s = before.last_s
        self._failed_in_a_row = before._failed_in_a_row
        self._last_fault = before._last_fault

    def _count_failure(self, step: int, fault: str) -> None:
        self.failed_saves += 1
        self._failed_in_a_row += 1
        self._last_fault = fault
        print(f"error: step {step} is not saved: {fault}. The checkpoints before it are as they were", flush=True)
        if 0 < self._trainer.max_failed_saves <= self._failed_in_a_row:
            raise EnvironmentFault(
                f"{self._folder}: {self._failed_in_a_row} saves in a row failed (trainer.max_failed_saves), the last "
                f"of step {step}: {fault}; {self._newest()}. Make room and pass --resume"
            )

    def _newest(self) -> str:
        if not self.saved_step:
            return "there is no checkpoint"
        return f"the newest checkpoint is that of step {self.saved_step}"

    def _write_held(self, state: TrainState, metrics: dict[str, float]) -> None:
        try:
            self._write(state, metrics)
        finally:
            if state.ahead is not None:
                state.ahead.release()

    def _write(self, state: TrainState, metrics: dict[str, float]) -> None:
        """Does the part of a save after the ranks' copies. It runs in a thread, so it uses only data that does not
        change.
        """
        if state.ahead is not None:
            kept_bytes = state.ahead.bytes_to_write(self._saved.token_routes)
            check_disk_space(self._folder, self._copied_bytes + BESIDE_TENSORS + kept_bytes)
        folder = self._folder / f"step-{state.step}"
        write_atomically(folder, lambda work: self._write_checkpoint(state, work, metrics), self._check)
        for old in superseded(self._folder, state.step, self._trainer.max_actor_ckpt_to_keep):
            self._check()
            discard(old)

    def _write_checkpoint(self, state: TrainState, work: Path, metrics: dict[str, float]) -> None:
        parts = self._actor.write_checkpoint(work)
        ranks = tuple(map(RankFiles.from_json, parts))
        critic = tuple(RankFiles.from_json(part["critic"]) for part in parts if "critic" in part)
        identity = self._saved.identity
        model = Path(identity.model.path)
        hf = work / HF_FOLDER
        hf.mkdir()
        hf_files = copy_hf_files(model, hf) | self._keep_drafts(model, hf, state.step)
        trainer = {
            "cursor": vars(state.cursor),
            "data_fingerprint": self._saved.data_fingerprint,
            "fixed": dict(identity.fixed),
            "metrics": metrics,
            "weights": state.weights,
        } | ({"ahead": state.ahead.write(work)} if state.ahead else {})
        if state.kl_coef is not None:
            trainer["kl_coef"] = state.kl_coef
        if identity.tower is not None:
            trainer[TOWER] = identity.tower
        hf_config = without_quantization(json.loads((model / "config.json").read_text()))
        hf_config = with_predicting(hf_config, identity.trains_predicting)
        layout = self._saved.layout.model_dump()
        dtype = identity.model.dtype
        adapters = dict(identity.adapters)
        versions = _versions()
        manifest = Manifest(state.step, layout, dtype, hf_config, ranks, trainer, versions, hf_files, adapters, critic)
        if identity.model.vision in (TRAINED, PROJECTOR):
            manifest = replace(manifest, vision=identity.model.vision)
        write_manifest(work, manifest)

    def _keep_drafts(self, model: Path, hf: Path, step: int) -> FileFacts:
        """Writes what the model's predicting layers have beside the saved weights: once, and then as another name of
        the file. It is all of them, or the names of copies if they are trained. Adapters have them in their base model.
        """
        if self._drafts is None:
            is_there = not self._saved.identity.adapters
            held = load_model_spec(model).holding(self._saved.identity.trains_predicting)
            self._drafts = draft_layers(model, held) if is_there else DraftLayers()
        if not self._drafts:
            return {}
        if self._written_drafts is not None and self._written_drafts[0].exists():
            written, facts = self._written_drafts
            name_again(written, hf / DRAFTS_FILE)
        else:
            check_disk_space(self._folder, self._copied_bytes + BESIDE_TENSORS + self._drafts.own_bytes)
            facts = keep(self._drafts, hf)
        self._written_drafts = self._folder / f"step-{step}" / HF_FOLDER / DRAFTS_FILE, facts
        return facts


def _versions() -> dict[str, Any]:
    names = ("torch", "megatron-core", "mbridge", "transformers")
    versions = {name: importlib.metadata.version(name) for name in names}
    return {"python": sys.version.split()[0], "mrl": own_version()} | versions
