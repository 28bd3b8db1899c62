"""The checkpoints of a run: saved beside the training, and no more of them than are wanted."""

import importlib.metadata
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from mrl.checkpoint.disk_space import BESIDE_TENSORS, check_room
from mrl.checkpoint.manifest import Manifest, RankFiles, fsync, write_manifest
from mrl.checkpoint.step_folders import discard, superseded, write_atomically
from mrl.errors import EnvironmentFault
from mrl.model.hf_files import copy_hf_files
from mrl.train.resume import TrainState, fixed_values
from mrl.train.run import Run


def save(run: Run, metrics: dict[str, float] | None = None) -> dict[str, float]:
    """Begins a checkpoint of the last finished step, unless there is one. `metrics`: of the step, should their line get lost.

    The ranks copy their parts to host memory and write them while training goes on; a save waits for the one before it.
    A disk that does not take a checkpoint is no reason to stop: it is said, counted, and the checkpoints that are there
    stay. Returns what `finished_save` does.
    """
    previous = finished_save(run, wait=True)
    state = run.state
    if run.saved_step == state.step:
        return previous
    try:
        check_room(run.run_dir.checkpoints, run.actor.take_checkpoint() + BESIDE_TENSORS)
    except EnvironmentFault as fault:
        _count_failure(run, state.step, str(fault))
        return previous
    run.writing.begin(state.step, partial(_write, run, state, dict(metrics or {})))
    return previous if run.config.trainer.async_save else previous | finished_save(run, wait=True)


def finished_save(run: Run, wait: bool = False) -> dict[str, float]:
    """The metrics of the save under way, if it has ended. Raises what went wrong with it, a disk's refusal excepted."""
    result = run.writing.result(wait)
    if result is None:
        return {}
    if result.fault:
        _count_failure(run, result.step, result.fault)
    else:
        run.saved_step = result.step
    return {"perf/checkpoint_write_s": result.seconds}


def finish(run: Run) -> None:
    """Leaves a checkpoint of the last finished step behind. Raises EnvironmentFault when the disk takes none now."""
    save(run)
    finished_save(run, wait=True)
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
