"""Conversions between Hugging Face's form and mrl's: the plan of files, and the files beside the weights.

A conversion is a source, opened by `mrl.checkpoint.open_checkpoint`, and a form to write: `write_hf` or `write_layout`.
`mrl.tools.torch_dist` adds one more source and form.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mrl.checkpoint.convert_job import ConversionReport, Options, Target, run_conversion
from mrl.checkpoint.draft_layers import FILE as DRAFTS_FILE
from mrl.checkpoint.draft_layers import draft_layers, export, keep
from mrl.checkpoint.group_files import name_again
from mrl.checkpoint.hf_folder import copy_hf_files
from mrl.checkpoint.manifest import (
    CONSTANT,
    EXP_AVG,
    HF_FOLDER,
    MASTER,
    WEIGHT,
    WEIGHTS_ONLY,
    WITH_OPTIMIZER,
    FileFacts,
    Manifest,
    RankFiles,
    StoredTensor,
    check_digest,
    facts_of,
    write_manifest,
)
from mrl.checkpoint.open_checkpoint import (
    Checkpoint,
    of_role,
    open_hf,
    open_mrl,
    stored_tensor,
    weight_role,
    whole_tensor,
)
from mrl.checkpoint.planned_file import PlannedFile, Safetensors, entry_bytes, file_portions, planned_file
from mrl.checkpoint.vision_tower import FILE as VISION_FILE
from mrl.checkpoint.vision_tower import Whole, copy_tower
from mrl.errors import ConfigError
from mrl.model import ModelSpec, tensor_specs
from mrl.model.hf_config import MTP_KEYS, without_quantization
from mrl.model.hf_files import INDEX, check_same_architecture, read_safetensors_header, scale_of
from mrl.model.layout import TrainLayout
from mrl.model.megatron_shards import source_shards
from mrl.model.registry import family_of, own_config
from mrl.model.tensors import stored_shapes
from mrl.model.trained_tower import PROJECTOR, TRAINED
from mrl.model.wrapped import with_text_config

NO_OPTIMIZER = {"step": None, "num_updates": 0, "lr": None, "scheduler": None}


@dataclass(frozen=True)
class ExpectedModel:
    """What a configuration says about its model. A checkpoint of another model is refused."""

    config: str  # path of the configuration, for messages
    path: str  # model.path
    dtype: str  # model.dtype
    vision: str | None = None  # model.vision

    def check(self, source: Checkpoint) -> None:
        """Raises ConfigError for a checkpoint of another dtype or architecture."""
        if source.dtype != self.dtype:
            raise ConfigError(
                f"{source.folder}: weights are {source.dtype}, model.dtype in {self.config} is {self.dtype}; "
                "set model.dtype to match"
            )
        if (self.vision in (TRAINED, PROJECTOR)) != (source.model.trained_tower is not None):
            has = "the text model alone" if source.model.trained_tower is None else "a vision tower that was trained"
            raise ConfigError(f"{source.folder} has {has}, and model.vision in {self.config} is {self.vision}")
        if (Path(self.path) / "config.json").is_file():
            check_same_architecture(f"{self.config}: model.path", self.path, source.model)


def write_hf(
    source: Checkpoint, output: str | Path, options: Options | None = None, whole: Whole | None = None
) -> ConversionReport:
    """Writes safetensors files with index, configuration and tokenizer. The folder appears completely or not at all.

    `whole` is the model around a text model: its form is written, with its vision tower. Without it only the text model
    is written. Raises EnvironmentFault for a damaged source, ConfigError for an output that exists or cannot be
    written, and for a vision tower that was trained without the model around it.
    """
    if source.model.trained_tower is not None and whole is None:
        raise ConfigError(
            f"{source.folder}: its vision tower was trained, too, and an export needs the form of the whole model: "
            "give --vision-from FOLDER, the folder that model.path of the run named"
        )
    files = hf_plan(source.model, source.dtype)
    drafts = draft_layers(source.hf_files, source.model)
    predicts = bool(drafts) or source.model.predicting_layers > 0
    container = Safetensors(source.dtype, stored_shapes(source.model))
    if whole is not None:
        files = _in_files(whole.entries, source.dtype)
        container = Safetensors(source.dtype, whole.shapes)

    def finish(folder: Path, _: FileFacts) -> FileFacts:
        copied = copy_hf_files(source.hf_files, folder)
        if whole is not None:
            copied |= copy_tower(whole, folder)
        if drafts:
            copied |= export(drafts, source, folder)
        made = {
            "config.json": _config_of_export(source, whole, predicts),
            INDEX: _index(files, source.dtype, whole, folder if drafts else None),
        }
        for name, data in made.items():
            (folder / name).write_bytes(data)
        return copied | {name: facts_of(data) for name, data in made.items()}

    predicting = source.model.predicting_layers > 0
    lacks_named = not predicts and any(key in own_config(source.hf_config) for key in MTP_KEYS)
    reopen = partial(open_hf, predicting=predicting, vision=source.model.trained_part)
    report = run_conversion(source, Target(files, container, False, finish, reopen), Path(output), options)
    return replace(
        report,
        left_out=tuple(name for name in report.left_out if name not in {*drafts.names, *map(scale_of, drafts.scales)}),
        left_out_layers=source.model.left_out_layers if lacks_named else 0,
        of_vision_tower=len(whole.tower) if whole else 0,
        drafting=0 if source.model.predicting_layers else len(drafts.names),
        other_copies=drafts.differing,
    )


def write_layout(
    source: Checkpoint,
    output: str | Path,
    degrees: Mapping[str, Any],
    weights_only: bool = False,
    options: Options | None = None,
) -> ConversionReport:
    """Writes an mrl checkpoint at the layout `degrees`, which has the keys of actor.layout.

    Writes master weights, moments and schedule too if the source has them, unless `weights_only`. Raises ConfigError
    for an illegal layout, and the errors of `write_hf`.
    """
    if source.adapters is not None and not weights_only:
        raise ConfigError(
            f"{source.folder}: adapters are loaded at any layout as they are; --weights-only writes the full model "
            "that they make, without their optimizer"
        )
    roles = tuple(role for role in source.roles if role in (WEIGHT, CONSTANT)) if weights_only else source.roles
    layout = TrainLayout.build(degrees, source.model)
    files = layout_plan(source.model, layout, roles, source.dtype)

    def finish(folder: Path, facts: FileFacts) -> FileFacts:
        ranks = _rank_files(source, layout, files, roles, facts)
        manifest = replace(_manifest(source, degrees, roles, ranks), hf_files=copy_hf_folder(source, folder))
        _name_groups_again(source.folder, folder, manifest.files_beside())
        write_manifest(folder, manifest)
        return manifest.all_files()

    return run_conversion(
        source, Target(files, Safetensors(source.dtype), True, finish, open_mrl), Path(output), options
    )


def hf_plan(model: ModelSpec, dtype: str) -> tuple[PlannedFile, ...]:
    """Plans files `model-NNNNN.safetensors` with tensors in the order of layers."""
    if family_of(model).stored is not None:
        return _in_files([stored_tensor(model, key, shape) for key, shape in stored_shapes(model).items()], dtype)
    entries = [whole_tensor(spec.name, spec.shape, role=weight_role(spec)) for spec in tensor_specs(model)]
    return _in_files(entries, dtype)


def _in_files(entries: list[StoredTensor], dtype: str) -> tuple[PlannedFile, ...]:
    portions = file_portions(entries, dtype)
    return tuple(planned_file(f"model-{n:05d}.safetensors", 0, portion) for n, portion in enumerate(portions, 1))


def layout_plan(model: ModelSpec, layout: TrainLayout, roles: Iterable[str], dtype: str) -> tuple[PlannedFile, ...]:
    """Plans the files of every rank. Only the first of a local tensor's replicas writes it, and completely."""
    files: list[PlannedFile] = []
    for rank in range(layout.world_size):
        shards = [shard for shard in source_shards(model, layout, rank) if shard.primary == rank]
        entries = [
            StoredTensor(
                "", f"{role}/{shard.vp_chunk}.{shard.megatron_name}", role, shard.local_shape, None, shard.pieces
            )
            for role in roles
            for shard in of_role(shards, role)
        ]
        portions = list(file_portions(entries, dtype))
        names = [f"rank-{rank:05d}{f'-{n:05d}' if len(portions) > 1 else ''}.safetensors" for n in range(len(portions))]
        files += [planned_file(name, rank, portion) for name, portion in zip(names, portions, strict=True)]
    return tuple(files)


def copy_hf_folder(source: Checkpoint, folder: Path) -> FileFacts:
    """Copies configuration, tokenizer and predicting layers into the folder that every checkpoint of another form has
    for them.
    """
    (folder / HF_FOLDER).mkdir(exist_ok=True)
    copied = copy_hf_files(source.hf_files, folder / HF_FOLDER)
    if drafts := draft_layers(source.hf_files, source.model):
        copied |= keep(drafts, folder / HF_FOLDER)
    return copied


def _name_groups_again(source: Path, folder: Path, files: FileFacts) -> None:
    """Links the files of groups generated ahead, which belong to a checkpoint of any layout.

    Raises DamagedCheckpoint for a file whose bytes have changed.
    """
    for name in files:
        check_digest(source, name, files)
        (folder / name).unlink(missing_ok=True)  # left by a start that was killed
        name_again(source / name, folder / name)


def _rank_files(
    source: Checkpoint, layout: TrainLayout, files: tuple[PlannedFile, ...], roles: tuple[str, ...], facts: FileFacts
) -> tuple[RankFiles, ...]:
    """Describes the files of every rank. A rank that is the first replica of no tensor has none."""
    optimizer = NO_OPTIMIZER if _only_weights(source, roles) else source.manifest.optimizer
    ranks = []
    for rank in range(layout.world_size):
        own = [file for file in files if file.rank == rank]
        entries = tuple(entry for file in own for entry in file.entries)
        ranks.append(RankFiles(entries, {file.name: facts[file.name] for file in own}, optimizer))
    return tuple(ranks)


def _manifest(
    source: Checkpoint, degrees: Mapping[str, Any], roles: tuple[str, ...], ranks: tuple[RankFiles, ...]
) -> Manifest:
    # takes as long to import as everything else, and the disk is already busy
    from mrl.config.schema import LayoutConfig

    weights_only = _only_weights(source, roles)
    old = source.manifest
    converted = {"converted": WEIGHTS_ONLY if weights_only else WITH_OPTIMIZER}
    return Manifest(
        step=0 if weights_only else old.step,
        layout=LayoutConfig(**degrees).model_dump(),
        dtype=source.dtype,
        hf_config=source.hf_config,
        ranks=ranks,
        trainer=converted if weights_only else old.trainer | converted,
        versions={} if old is None else old.versions,
        vision=source.model.trained_part,
    )


def _only_weights(source: Checkpoint, roles: tuple[str, ...]) -> bool:
    """Tells whether only weights are written. A checkpoint before the first update has moments too, which are zeros."""
    return not {MASTER, EXP_AVG}.intersection(roles) or source.manifest is None


def _config_of_export(source: Checkpoint, whole: Whole | None, predicts: bool) -> bytes:
    """Returns config.json of an export, without layers and code that the export lacks. `predicts`: it has the
    predicting layers.

    It names the dtype of the weights: as `dtype` since transformers 4.56, as `torch_dtype` before.
    """
    if whole is not None:
        of_whole = whole.checkpoint.hf_config
        return json.dumps(
            with_text_config(of_whole, _of_export(of_whole["text_config"], source, predicts)), indent=2
        ).encode()
    data = own_config(without_quantization(json.loads((source.hf_files / "config.json").read_text())))
    return json.dumps(_of_export(data, source, predicts), indent=2).encode()


def _of_export(config: Mapping[str, Any], source: Checkpoint, predicts: bool) -> dict[str, Any]:
    data = dict(config)
    data.pop("auto_map", None)
    keys = [key for key in ("dtype", "torch_dtype") if key in data] or ["torch_dtype"]
    left_out = [key for key in MTP_KEYS if key in data and source.model.left_out_layers and not predicts]
    return data | dict.fromkeys(keys, source.dtype) | dict.fromkeys(left_out, 0)


def _index(files: tuple[PlannedFile, ...], dtype: str, whole: Whole | None, drafts_in: Path | None) -> bytes:
    """Returns the index of an export. `drafts_in`: the folder with its predicting layers; None if it has none."""
    weight_map = {entry.key: file.name for file in files for entry in file.entries}
    total = sum(entry_bytes(entry, dtype) for file in files for entry in file.entries)
    if whole is not None:
        weight_map |= dict.fromkeys(whole.tower, VISION_FILE)
        total += whole.tower_bytes
    if drafts_in is not None:
        header = read_safetensors_header(drafts_in / DRAFTS_FILE)
        weight_map |= dict.fromkeys(header, DRAFTS_FILE)
        total += sum(tensor.stop - tensor.start for tensor in header.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2).encode()
