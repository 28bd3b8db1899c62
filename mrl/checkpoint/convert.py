"""The three conversions: what is read, what is planned, and what goes beside the weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mrl.checkpoint.containers import Safetensors
from mrl.checkpoint.convert_job import Options, Report, Target, convert
from mrl.checkpoint.manifest import (
    MANIFEST,
    WEIGHT,
    WEIGHTS_ONLY,
    WITH_OPTIMIZER,
    Manifest,
    RankFiles,
    newest_checkpoint,
    write_manifest,
)
from mrl.checkpoint.open_checkpoint import HF_FOLDER, Checkpoint, open_hf, open_ours
from mrl.checkpoint.planned_file import PlannedFile, entry_bytes, hf_plan, rank_plan
from mrl.checkpoint.work_folder import Facts
from mrl.errors import ConfigError, EnvironmentFault
from mrl.extras.torch_dist.read import FLAG, Trust, find_torch_dist, open_torch_dist, refuse_untrusted
from mrl.extras.torch_dist.write import TorchDistFiles
from mrl.model.hf_files import INDEX, check_same_architecture, copy_hf_files
from mrl.model.layout import TrainLayout


@dataclass(frozen=True)
class Expected:
    """What a configuration says of the model that it trains, so that a checkpoint of another one is refused."""

    config: str  # the configuration's file, for messages
    path: str  # model.path
    dtype: str  # model.dtype

    def check(self, source: Checkpoint) -> None:
        """Raises ConfigError for a checkpoint of another dtype or architecture."""
        if source.dtype != self.dtype:
            raise ConfigError(
                f"{source.folder}: weights are {source.dtype}, model.dtype in {self.config} is {self.dtype}; set model.dtype to match"
            )
        if (Path(self.path) / "config.json").is_file():
            check_same_architecture(f"{self.config}: model.path", self.path, source.model)


NO_OPTIMIZER = {"step": None, "num_updates": 0, "lr": None, "scheduler": None}


@dataclass(frozen=True)
class TorchDist:
    """Megatron's own format as a target, instead of a layout: such a checkpoint is of none."""

    separate_layers: bool = False  # keys of Megatron's non_homogeneous_layers


def megatron_to_hf(checkpoint: str | Path, output: str | Path, options: Options | None = None, trust: Trust | None = None) -> Report:
    """Writes safetensors files with index, configuration and tokenizer.

    `checkpoint` is a `step-N` folder, or a run directory, whose newest complete step is taken, or with `trust` one in Megatron's
    torch_dist format. The folder appears whole or not at all.
    Raises EnvironmentFault for a checkpoint that is not complete, ConfigError for an output that is in the way or cannot be written.
    """
    source = _open_megatron(Path(checkpoint), trust)
    files = hf_plan(source.model, source.dtype)

    def finish(folder: Path, _: Facts) -> None:
        copy_hf_files(source.hf_files, folder)
        _name_dtype(folder / "config.json", source.dtype)
        _write_index(folder, files, source.dtype)

    return convert(source, Target(files, Safetensors(source.dtype), False, finish, open_hf), Path(output), options or Options())


def hf_to_megatron(
    model: str | Path,
    output: str | Path,
    target: Mapping[str, Any] | TorchDist,
    expected: Expected | None = None,
    options: Options | None = None,
    trust: Trust | None = None,
) -> Report:
    """Writes the weights as a checkpoint of ours at a layout, step 0; `target` has the keys of actor.layout. Or, with `trust`, torch_dist.

    Raises ConfigError for an illegal layout or an unsupported or unexpected model, EnvironmentFault for files that are not its weights.
    """
    if find_torch_dist(Path(model)) is not None:
        raise ConfigError(
            f"{model}: Megatron's torch_dist format, not Hugging Face files; use mrl convert megatron-to-megatron with {FLAG}"
        )
    return _to_megatron(open_hf(Path(model)), Path(output), target, expected, (WEIGHT,), options, trust)


def megatron_to_megatron(
    checkpoint: str | Path,
    output: str | Path,
    target: Mapping[str, Any] | TorchDist,
    expected: Expected | None = None,
    weights_only: bool = False,
    options: Options | None = None,
    trust: Trust | None = None,
) -> Report:
    """Writes a checkpoint of ours at another layout, with master weights, moments and schedule where it has them, without random states.

    With `trust`, source or target may be of Megatron's torch_dist format, of which only weights are read or written.
    Raises as `megatron_to_hf` and `hf_to_megatron` do.
    """
    source = _open_megatron(Path(checkpoint), trust)
    return _to_megatron(source, Path(output), target, expected, (WEIGHT,) if weights_only else source.roles, options, trust)


def _to_megatron(
    source: Checkpoint,
    output: Path,
    target: Mapping[str, Any] | TorchDist,
    expected: Expected | None,
    roles: tuple[str, ...],
    options: Options | None,
    trust: Trust | None,
) -> Report:
    if expected is not None:
        expected.check(source)
    made = _torch_dist(source, target, trust) if isinstance(target, TorchDist) else _ranks(source, target, roles)
    return convert(source, made, output, options or Options())


def _ranks(source: Checkpoint, degrees: Mapping[str, Any], roles: tuple[str, ...]) -> Target:
    layout = TrainLayout.build(degrees, source.model)
    files = rank_plan(source.model, layout, roles, source.dtype)

    def finish(folder: Path, facts: Facts) -> None:
        _copy_hf_files(source, folder)
        write_manifest(folder, _manifest(source, degrees, roles, _rank_files(source, layout, files, roles, facts)))

    return Target(files, Safetensors(source.dtype), True, finish, open_ours)


def _torch_dist(source: Checkpoint, target: TorchDist, trust: Trust | None) -> Target:
    if trust is None:
        raise ConfigError(
            f"torch_dist is a format of pickles, which whoever loads it lets run; give {FLAG} to write it, or leave --format out and "
            "get safetensors"
        )
    plan = TorchDistFiles(source.model, source.dtype, target.separate_layers)

    def finish(folder: Path, _: Facts) -> None:
        _copy_hf_files(source, folder)
        plan.finish(folder)

    return Target(plan.files, plan.container, False, finish, partial(open_torch_dist, trust=Trust()))


def _copy_hf_files(source: Checkpoint, folder: Path) -> None:
    (folder / HF_FOLDER).mkdir(exist_ok=True)
    copy_hf_files(source.hf_files, folder / HF_FOLDER)


def _rank_files(
    source: Checkpoint, layout: TrainLayout, files: tuple[PlannedFile, ...], roles: tuple[str, ...], facts: Facts
) -> tuple[RankFiles, ...]:
    """A rank that is no tensor's first replica has no file."""
    optimizer = NO_OPTIMIZER if _weights_only(source, roles) else source.manifest.optimizer
    ranks = []
    for rank in range(layout.world_size):
        own = [file for file in files if file.rank == rank]
        entries = tuple(entry for file in own for entry in file.entries)
        ranks.append(RankFiles(entries, {file.name: facts[file.name] for file in own}, optimizer))
    return tuple(ranks)


def _manifest(source: Checkpoint, degrees: Mapping[str, Any], roles: tuple[str, ...], ranks: tuple[RankFiles, ...]) -> Manifest:
    from mrl.config.schema import LayoutConfig  # as long to import as all the rest, and the disk is busy by now

    alone, old = _weights_only(source, roles), source.manifest
    converted = {"converted": WEIGHTS_ONLY if alone else WITH_OPTIMIZER}
    return Manifest(
        step=0 if alone else old.step,
        layout=LayoutConfig(**degrees).model_dump(),
        dtype=source.dtype,
        hf_config=source.hf_config,
        ranks=ranks,
        trainer=converted if alone else old.trainer | converted,
        versions={} if old is None else old.versions,
    )


def _weights_only(source: Checkpoint, roles: tuple[str, ...]) -> bool:
    """A checkpoint that was saved before the first update has moments too: zeros."""
    return roles == (WEIGHT,) or source.manifest is None


def _open_megatron(path: Path, trust: Trust | None) -> Checkpoint:
    refuse_untrusted(path, trust)
    return open_ours(step_folder(path)) if find_torch_dist(path) is None else open_torch_dist(path, trust)


def step_folder(path: Path) -> Path:
    """The folder of a checkpoint of ours: `path` itself, or the newest complete step of the run directory `path`.

    Raises ConfigError for a checkpoint of another kind, EnvironmentFault where there is none.
    """
    if find_torch_dist(path) is not None:
        raise ConfigError(
            f"{path}: Megatron's torch_dist format; convert it with mrl convert megatron-to-hf, and name the result as model.path"
        )
    newest = path if (path / MANIFEST).exists() else _newest_of_run(path)
    if newest is None:
        raise EnvironmentFault(f"{path}: neither a checkpoint (no {MANIFEST}) nor a run directory with a complete one")
    if not (newest / HF_FOLDER / "config.json").is_file():
        raise EnvironmentFault(f"{newest / HF_FOLDER} is missing, the model's configuration and tokenizer; choose another checkpoint")
    return newest


def _newest_of_run(run_dir: Path) -> Path | None:
    found = newest_checkpoint(run_dir / "checkpoints", digests=False)  # of the one that is taken every file is checked before it is used
    for error in found.damaged.values():
        print(f"passed over: {error}")
    return found.path


def _name_dtype(config: Path, dtype: str) -> None:
    """The configuration says what the written weights are. Its key is `dtype` since transformers 4.56, `torch_dtype` before."""
    data = json.loads(config.read_text())
    keys = [key for key in ("dtype", "torch_dtype") if key in data] or ["torch_dtype"]
    config.write_text(json.dumps(data | dict.fromkeys(keys, dtype), indent=2))


def _write_index(folder: Path, files: tuple[PlannedFile, ...], dtype: str) -> None:
    weight_map = {entry.key: file.name for file in files for entry in file.entries}
    total = sum(entry_bytes(entry, dtype) for file in files for entry in file.entries)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2))
