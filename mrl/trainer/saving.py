"""Checkpoints of a run: written whole or not at all, and no more of them than are wanted."""

import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mrl.reshard.manifest import Manifest, RankFiles, checkpoint_steps, fsync, write_manifest
from mrl.trainer.preflight import fixed_values
from mrl.trainer.run import Run

HF_FILES = ("*.json", "*.jinja", "*.txt", "*.model")  # configuration and tokenizer of the model's folder


def save(run: Run, metrics: dict[str, float] | None = None) -> None:
    """A checkpoint of the last finished step, unless there is one; with the step's metrics, should the process die before their line."""
    if run.saved_step == run.state.step:
        return
    folder = run.run_dir.checkpoints / f"step-{run.state.step}"
    write_atomically(folder, lambda work: _write_checkpoint(run, work, metrics or {}))
    fsync(folder.parent)
    run.saved_step = run.state.step
    for old in superseded(run.run_dir.checkpoints, run.state.step, run.config.trainer.max_actor_ckpt_to_keep):
        shutil.rmtree(old)


def superseded(folder: Path, saved: int, keep: int) -> list[Path]:
    """Checkpoints that are not among the `keep` newest up to step `saved`, which was saved just now and is never one of them.

    A folder of a later step is of another attempt; it neither counts nor goes.
    """
    return [path for step, path in checkpoint_steps(folder) if step <= saved][:-keep]


def write_atomically(folder: Path, write: Callable[[Path], None]) -> None:
    """Calls `write(work)` on a fresh folder beside `folder`, then gives it that name. What was there before stays until then.

    A process killed in between leaves `work`, whose name ends in `.tmp-` and a suffix; opening the run directory again removes it.
    """
    work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        work.chmod(0o777 & ~_umask())  # mkdtemp lets nobody but the owner in
        write(work)
        if folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _umask() -> int:
    """This process's file mode mask; it can be read only by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _write_checkpoint(run: Run, work: Path, metrics: dict[str, float]) -> None:
    ranks = tuple(RankFiles.from_json(part) for part in run.actor.save(work))
    model = Path(run.config.model.path)
    (work / "hf").mkdir()
    for pattern in HF_FILES:
        for file in model.glob(pattern):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, work / "hf" / file.name)
    trainer = {
        "cursor": vars(run.state.cursor),
        "data_fingerprint": run.train_prompts.prompts.fingerprint,
        "fixed": fixed_values(run.config),
        "metrics": metrics,
    }
    hf_config = json.loads((model / "config.json").read_text())
    layout = run.config.actor.layout.model_dump()
    write_manifest(work, Manifest(run.state.step, layout, run.config.model.dtype, hf_config, ranks, trainer, _versions()))


def _versions() -> dict[str, Any]:
    names = ("mrl", "torch", "megatron-core", "mbridge", "transformers")
    return {"python": sys.version.split()[0]} | {name: importlib.metadata.version(name) for name in names}
