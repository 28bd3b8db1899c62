"""Checkpoints of a run: written whole or not at all, beside the training, and no more of them than are wanted."""

import importlib.metadata
import json
import secrets
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mrl.checkpoint.disk_space import BESIDE_TENSORS, check_room
from mrl.checkpoint.manifest import Manifest, RankFiles, checkpoint_steps, fsync, write_manifest
from mrl.errors import EnvironmentFault
from mrl.model.hf_files import copy_hf_files
from mrl.train.resume import TrainState, fixed_values
from mrl.train.run import Run


def save(run: Run, metrics: dict[str, float] | None = None) -> dict[str, float]:
    """Begins a checkpoint of the last finished step, unless there is one; with its metrics, should the process die before their line.

    The ranks copy their parts to host memory and write them while training goes on; a save waits for the one before it. A disk that
    does not take a checkpoint is no reason to stop: it is said, counted, and the checkpoints that are there stay. Returns what `heard`
    does.
    """
    told = heard(run, wait=True)
    state = run.state
    if run.saved_step == state.step:
        return told
    try:
        check_room(run.run_dir.checkpoints, run.actor.take_checkpoint() + BESIDE_TENSORS)
    except EnvironmentFault as fault:
        _count_failure(run, state.step, str(fault))
        return told
    run.writing.begin(state.step, partial(_write, run, state, dict(metrics or {})))
    return told if run.config.trainer.async_save else told | heard(run, wait=True)


def heard(run: Run, wait: bool = False) -> dict[str, float]:
    """How the save under way ended, if it did: the time it took. Raises what went wrong with it, a disk's refusal excepted."""
    ended = run.writing.ended(wait)
    if ended is None:
        return {}
    if ended.fault:
        _count_failure(run, ended.step, ended.fault)
    else:
        run.saved_step = ended.step
    return {"perf/checkpoint_write_s": ended.seconds}


def finish(run: Run) -> None:
    """Leaves a checkpoint of the last finished step behind. Raises EnvironmentFault when the disk takes none, even now."""
    save(run)
    heard(run, wait=True)
    if run.saved_step != run.state.step:
        newest = f"the newest checkpoint is that of step {run.saved_step}" if run.saved_step else "there is no checkpoint"
        raise EnvironmentFault(
            f"{run.run_dir.checkpoints}: step {run.state.step} is not saved ({run.last_fault}); {newest}. Make room and pass --resume"
        )


def _count_failure(run: Run, step: int, fault: str) -> None:
    run.failed_saves += 1
    run.last_fault = fault
    print(f"error: step {step} is not saved: {fault}. Training goes on; the checkpoints before it are as they were", flush=True)


def _write(run: Run, state: TrainState, metrics: dict[str, float]) -> None:
    """The whole of a save but for the ranks' copies; in a thread, so of `run` it uses only what does not change."""
    folder = run.run_dir.checkpoints / f"step-{state.step}"
    write_atomically(folder, lambda work: _write_checkpoint(run, state, work, metrics))
    for old in superseded(run.run_dir.checkpoints, state.step, run.config.trainer.max_actor_ckpt_to_keep):
        discard(old)


def discard(checkpoint: Path) -> None:
    """Removes a checkpoint. It loses its name first: killed in the middle, this leaves no folder that looks like a damaged one."""
    aside = checkpoint.with_name(f"{checkpoint.name}.tmp-{secrets.token_hex(4)}")
    try:
        shutil.rmtree(checkpoint.rename(aside))
    except OSError as error:
        print(f"warning: {checkpoint}, which is no longer wanted, cannot be removed: {error}", flush=True)


def superseded(folder: Path, saved: int, keep: int) -> list[Path]:
    """Checkpoints that are not among the `keep` newest up to step `saved`, which was saved just now and is never one of them.

    A folder of a later step is of another attempt; it neither counts nor goes.
    """
    return [path for step, path in checkpoint_steps(folder) if step <= saved][:-keep]


def write_atomically(folder: Path, write: Callable[[Path], None]) -> None:
    """Calls `write(work)` on a fresh folder beside `folder`, then gives it that name, durably. What was there before stays until then.

    A process killed in between leaves `work`, whose name ends in `.tmp-` and a suffix; opening the run directory again removes it.
    """
    work = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
    work.mkdir()
    try:
        write(work)
        if folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)
        fsync(folder.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _write_checkpoint(run: Run, state: TrainState, work: Path, metrics: dict[str, float]) -> None:
    ranks = tuple(RankFiles.from_json(part) for part in run.actor.write_checkpoint(work))
    model = Path(run.config.model.path)
    hf = work / "hf"
    hf.mkdir()
    copy_hf_files(model, hf)
    for path in (*hf.iterdir(), hf):
        fsync(path)
    trainer = {
        "cursor": vars(state.cursor),
        "data_fingerprint": run.train_prompts.prompts.fingerprint,
        "fixed": fixed_values(run.config),
        "metrics": metrics,
    }
    hf_config = json.loads((model / "config.json").read_text())
    layout = run.config.actor.layout.model_dump()
    write_manifest(work, Manifest(state.step, layout, run.config.model.dtype, hf_config, ranks, trainer, _versions()))


def _versions() -> dict[str, Any]:
    names = ("mrl", "torch", "megatron-core", "mbridge", "transformers")
    return {"python": sys.version.split()[0]} | {name: importlib.metadata.version(name) for name in names}
