"""Writes weights as a torch_dist checkpoint that megatron-core 0.16.1 loads at any layout: its files and their
description.

The output is what Megatron-LM's `--load` takes: a tracker that says `release`, and the checkpoint in a folder of that
name. Every parameter is stored whole, with one block for each layer and expert, which Megatron's loader slices.
`common.pt` only says that no training has made the weights. There are no arguments, optimizer or random states. A
module's `_extra_state` (Transformer Engine's data of 8-bit scales) is None, as Megatron's own modules without
Transformer Engine write it; a loader requires that it exists.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mrl.checkpoint.convert import copy_hf_folder
from mrl.checkpoint.convert_job import ConversionReport, Options, Target, run_conversion
from mrl.checkpoint.manifest import HF_FOLDER, WEIGHT, FileFacts, StoredTensor
from mrl.checkpoint.open_checkpoint import TORCH_DIST_METADATA, TORCH_DIST_TRACKER, Checkpoint, code_of
from mrl.checkpoint.planned_file import PlannedFile, entry_ranges, file_portions
from mrl.model import ModelSpec
from mrl.tools.torch_dist.archive import ArchiveFrame, pickle_archive
from mrl.tools.torch_dist.names import KeyPosition, whole_parameters, written_position
from mrl.tools.torch_dist.pickles import Named, write_pickle
from mrl.tools.torch_dist.read import open_torch_dist

RELEASE = "release"  # the tracker's word for weights that were not trained by Megatron
_DCP = "torch.distributed.checkpoint.metadata"
_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# all extra states are this one
_NONE = pickle_archive(write_pickle([None]))
_NONE_FILE = "__1_0.distcp"
_LINEAR_LAYOUT = Named("torch.serialization", "_get_layout", ("torch.strided",))


def write_torch_dist(
    source: Checkpoint, output: str | Path, separate_layers: bool = False, options: Options | None = None
) -> ConversionReport:
    """Writes the weights in Megatron's own format. Such a checkpoint has no layout.

    `separate_layers`: keys of Megatron's non_homogeneous_layers. Raises the errors of
    `mrl.checkpoint.convert.write_hf`.
    """
    plan = TorchDistFiles(source.model, source.dtype, separate_layers)

    def finish(folder: Path, _: FileFacts) -> FileFacts:
        hf_files = copy_hf_folder(source, folder)
        plan.finish(folder)
        return {f"{HF_FOLDER}/{name}": facts for name, facts in hf_files.items()}

    return run_conversion(
        source, Target(plan.files, plan.container, False, finish, open_torch_dist), Path(output), options
    )


@dataclass(frozen=True)
class TorchArchives:
    """The `Container` of consecutive archives, as torch.distributed.checkpoint writes them."""

    dtype: str
    leading: Mapping[str, int]  # key of an entry -> axes of length one before its own
    checksums: ClassVar[bool] = True

    def head(self, file: PlannedFile) -> bytes:
        return b""

    def before(self, entry: StoredTensor) -> bytes:
        return self._frame(entry).before()

    def after(self, entry: StoredTensor, crc: int) -> bytes:
        return self._frame(entry).after(crc)

    def _frame(self, entry: StoredTensor) -> ArchiveFrame:
        return ArchiveFrame(code_of(entry.role, self.dtype), (1,) * self.leading[entry.key] + entry.shape)


class TorchDistFiles:
    """The plan of one torch_dist checkpoint."""

    def __init__(self, model: ModelSpec, dtype: str, separate_layers: bool):
        """`separate_layers`: Megatron's non-homogeneous keys, which a model with two kinds of layers always has."""
        self.dtype = dtype
        self.separate_layers = separate_layers or (model.is_moe and len(model.moe_layers) != model.num_layers)
        shards = whole_parameters(model)
        self._positions = {
            shard.megatron_name: written_position(shard, model, self.separate_layers) for shard in shards
        }
        entries = [
            StoredTensor("", shard.megatron_name, WEIGHT, shard.local_shape, None, shard.pieces) for shard in shards
        ]
        names = ((f"{RELEASE}/__0_{n}.distcp", portion) for n, portion in enumerate(file_portions(entries, dtype)))
        self.files = tuple(PlannedFile(name, 0, tuple(portion)) for name, portion in names)
        self.container = TorchArchives(dtype, {name: len(position.lead) for name, position in self._positions.items()})

    def finish(self, folder: Path) -> None:
        """Writes the description, and what Megatron reads in addition."""
        release = folder / RELEASE
        (release / _NONE_FILE).write_bytes(_NONE)
        (release / TORCH_DIST_METADATA).write_bytes(write_pickle(self._description()))
        content = {}
        if self.separate_layers:
            content = {"non_homogeneous_layers": True}
        common = {"checkpoint_version": 3.0, "iteration": 0, "content_metadata": content}
        (release / "common.pt").write_bytes(pickle_archive(write_pickle(common)))
        (release / "metadata.json").write_text(json.dumps(_CONFIG))
        (folder / TORCH_DIST_TRACKER).write_text(RELEASE)

    def _description(self) -> Named:
        """Makes a `Metadata` of torch.distributed.checkpoint."""
        tensors: dict[str, tuple[tuple[int, ...], list[Named]]] = {}
        storage: dict[Named, Named] = {}
        for file in self.files:
            for entry, (at, length) in zip(file.entries, entry_ranges(self.container, file), strict=True):
                position = self._positions[entry.key]
                offsets, sizes = _block(position, entry)
                _, blocks = tensors.setdefault(position.key, ((*position.lead, *entry.shape), []))
                index = {"fqn": position.key, "index": len(blocks), "offset": _size(offsets)}
                storage[_made("MetadataIndex", index)] = _stored(Path(file.name).name, at, length)
                blocks.append(_made("ChunkStorageMetadata", {"offsets": _size(offsets), "sizes": _size(sizes)}))
        described = {key: self._tensor(size, blocks) for key, (size, blocks) in tensors.items()}
        for key in self._extra_states():
            described[key] = _made("BytesStorageMetadata", {})
            storage[_made("MetadataIndex", {"fqn": key, "index": None})] = _stored(_NONE_FILE, 0, len(_NONE))
        facts = {"planner_data": {}, "storage_meta": None, "version": None}
        return _made("Metadata", {"state_dict_metadata": described, "storage_data": storage} | facts)

    def _extra_states(self) -> list[str]:
        """Returns the keys of every module that may have an extra state, each a Megatron `ShardedObject`."""
        keys: dict[str, None] = {}
        for position in self._positions.values():
            module = position.key.rpartition(".")[0]
            modules = [module]
            if module.endswith("self_attention.linear_proj"):
                modules.append(module.replace("linear_proj", "core_attention"))  # it has no parameter
            index, count = (".".join(map(str, axes)) for axes in (position.index or (0,), position.lead or (1,)))
            keys |= dict.fromkeys(f"{name}._extra_state/shard_{index}_{count}" for name in modules)
        return list(keys)

    def _tensor(self, size: tuple[int, ...], blocks: list[Named]) -> Named:
        contiguous = Named(_DCP, "_MEM_FORMAT_ENCODING", (0,))
        properties = _made("TensorProperties", (Named("torch", self.dtype), _LINEAR_LAYOUT, False, contiguous, False))
        return _made("TensorStorageMetadata", {"properties": properties, "size": _size(size), "chunks": blocks})


def _block(position: KeyPosition, entry: StoredTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (offsets, sizes) in the global tensor."""
    return (*position.index, *(0 for _ in entry.shape)), (*(1 for _ in position.lead), *entry.shape)


def _stored(file: str, at: int, length: int) -> Named:
    info = {"relative_path": file, "offset": at, "length": length}
    return Named("torch.distributed.checkpoint.filesystem", "_StorageInfo", state=info)


def _made(name: str, state: Any) -> Named:
    return Named(_DCP, name, state=state)


def _size(sizes: tuple[int, ...]) -> Named:
    return Named("torch", "Size", (sizes,))
