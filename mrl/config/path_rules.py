"""Files that a configuration names. Checked only where the run is to happen: a preset is legal on a machine without its data."""

import os
from collections.abc import Iterator
from pathlib import Path

from mrl.config.schema import RunConfig
from mrl.config.violation import Broken


def run_dir(config: RunConfig) -> Path:
    """Where the run writes: trainer.run_dir, else runs/<experiment_name>."""
    return Path(config.trainer.run_dir or Path("runs") / config.trainer.experiment_name)


def path_rules(config: RunConfig) -> Iterator[Broken]:
    if not config.data.train_files:
        yield Broken("data.train_files", "names no file", "training needs prompts; --set data.train_files=[FILE, ...]")
    for field, files in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        yield from (Broken(field, f"{file} is not a file that can be read", _from_here(file)) for file in files if not _readable(file))
    custom = config.reward.custom_reward_function
    if custom is not None and not _readable(str(Path(custom.path).expanduser())):
        yield Broken("reward.custom_reward_function.path", "is not a file that can be read", _from_here(custom.path))
    loss = config.algorithm.policy_loss.custom
    if loss is not None and not _readable(loss.path):
        yield Broken("algorithm.policy_loss.custom.path", "is not a file that can be read", _from_here(loss.path))
    yield from _writable(config)


def _readable(file: str) -> bool:
    return Path(file).is_file() and os.access(file, os.R_OK)


def _from_here(file: str) -> str:
    return "" if Path(file).is_absolute() else f"a relative path starts at the current directory, {Path.cwd()}"


def _writable(config: RunConfig) -> Iterator[Broken]:
    folder = run_dir(config).absolute()
    there = next(p for p in (folder, *folder.parents) if p.exists())
    if not there.is_dir():
        yield Broken("trainer.run_dir", f"cannot be made: {there} is a file", "the run writes its checkpoints and metrics there")
    elif not os.access(there, os.W_OK | os.X_OK):
        yield Broken("trainer.run_dir", f"cannot be written: no permission in {there}", "the run writes its checkpoints and metrics there")
