"""Finds, describes and reads Megatron's own checkpoints (format torch_dist), as stored blocks in Hugging Face
coordinates.

A checkpoint is a folder of `*.distcp` files, each a sequence of torch.save archives, and `.metadata`. This is a pickle
with the location of every block of a tensor (torch/distributed/checkpoint/metadata.py). Nothing in it is executed.
`common.pt`, the pickle of everything except tensors, is never opened. Optimizer states are left out.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

from mrl.checkpoint.manifest import HF_FOLDER, WEIGHT, StoredTensor
from mrl.checkpoint.open_checkpoint import (
    DTYPES,
    TORCH_DIST_METADATA,
    Checkpoint,
    find_torch_dist,
    one_dtype,
)
from mrl.checkpoint.stored_boxes import Boxes
from mrl.errors import ConfigError, EnvironmentFault
from mrl.model import load_model_spec, read_hf_config, tensor_specs
from mrl.model.hf_files import TensorBytes
from mrl.tools.torch_dist.archive import StoredElements, find_elements
from mrl.tools.torch_dist.names import GlobalTensor, global_tensors
from mrl.tools.torch_dist.pickles import Recorded, read_pickle
from mrl.units import MIB

_HF_FOLDERS = (HF_FOLDER, "huggingface")  # mrl's and verl's
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
_WRAPPERS = re.compile(r"((module|model)\.)*")
_TORCH_DTYPES = {"torch.float32": "F32", "torch.bfloat16": "BF16"}
_READ_BYTES = MIB
_SHOWN = 5


@dataclass(frozen=True)
class StoredBlock:
    """One stored block of a tensor."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int  # in bytes
    length: int  # bytes of the archive
    dtype: str


@dataclass(frozen=True)
class DescribedTensor:
    """A tensor as `.metadata` describes it."""

    size: tuple[int, ...]
    dtype: str  # safetensors' name, or torch's if it has none
    blocks: tuple[StoredBlock, ...]


def open_torch_dist(path: Path, hf_files: Path | None = None) -> Checkpoint:
    """Opens a checkpoint, or the newest in a folder of them, from its description. Call it only if its user trusts it.

    `hf_files` has configuration and tokenizer, which such a checkpoint lacks; by default folders beside it are
    searched. Raises EnvironmentFault that names what is missing, unknown or of another model, ConfigError if there is
    no config.json.
    """
    folder = find_torch_dist(path)
    if folder is None or not (folder / TORCH_DIST_METADATA).is_file():
        old = any((folder or path).glob("mp_rank_*"))
        why = "the save was interrupted"
        if old:
            why = "it is of the older format `torch`, which is not read: save it as torch_dist"
        raise EnvironmentFault(
            f"{(folder or path) / TORCH_DIST_METADATA}, which describes the files, is missing: {why}"
        )
    hf_files = _hf_files(folder, hf_files)
    model = load_model_spec(hf_files)
    stored = read_description(folder / TORCH_DIST_METADATA)
    weights = {key: tensor for key, tensor in stored.items() if not _OPTIMIZER.match(key)}
    known = global_tensors(model)
    _check_keys(folder, weights, known)
    _check_blocks(folder, weights)
    entries, blocks = _entries(weights, known)
    _check_files(folder, blocks)
    dtype = DTYPES[one_dtype(folder, {key: tensor.dtype for key, tensor in weights.items()})]
    left_out = tuple(sorted(stored.keys() - weights))
    files = ArchiveFiles(folder, blocks)
    checkpoint = Checkpoint(folder, hf_files, model, read_hf_config(hf_files), dtype, entries, files, None, left_out)
    _check_whole(checkpoint)
    return checkpoint


def _hf_files(folder: Path, given: Path | None) -> Path:
    beside = [parent / name for parent in (folder, folder.parent) for name in _HF_FOLDERS]
    folders = [given] if given else [*beside, folder, folder.parent]
    for candidate in folders:
        if (candidate / "config.json").is_file():
            return candidate
    raise ConfigError(
        f"{folder}: a torch_dist checkpoint does not describe its model, and there is no config.json in "
        f"{', '.join(map(str, folders))}; give the folder of its Hugging Face configuration and tokenizer with "
        "--hf-files"
    )


def read_description(file: Path) -> dict[str, DescribedTensor]:
    """Returns key -> tensor from `.metadata`, without other objects.

    Raises EnvironmentFault for a file without such a description.
    """
    try:
        metadata = read_pickle(file.read_bytes())
        infos = {}
        for index, info in metadata.attribute("storage_data").items():
            offset = index.state.get("offset")
            infos[index.attribute("fqn"), None if offset is None else _size(offset)] = info.state
        described = metadata.attribute("state_dict_metadata").items()
        return {
            key: _described(key, tensor, infos) for key, tensor in described if _is(tensor, "TensorStorageMetadata")
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise EnvironmentFault(
            f"{file} is not the description of a torch_dist checkpoint ({error}); choose another checkpoint"
        ) from error


def _is(thing: Any, name: str) -> bool:
    return isinstance(thing, Recorded) and thing.pickled_name == f"torch.distributed.checkpoint.metadata.{name}"


def _size(size: Recorded) -> tuple[int, ...]:
    """Returns a torch.Size as a tuple."""
    if isinstance(size, Recorded):
        return tuple(size.arguments[0])
    return tuple(size)


def _described(key: str, tensor: Recorded, infos: dict) -> DescribedTensor:
    properties = tensor.attribute("properties").state
    dtype = (properties["dtype"] if isinstance(properties, dict) else properties[0]).pickled_name
    code = _TORCH_DTYPES.get(dtype, dtype)
    blocks = []
    size = _size(tensor.attribute("size"))
    for chunk in tensor.attribute("chunks"):
        offsets = _size(chunk.attribute("offsets"))
        sizes = _size(chunk.attribute("sizes"))
        info = infos[key, offsets]
        if info.get("transform_descriptors"):
            raise ValueError(f"{key} is stored through {info['transform_descriptors']}, which is not read")
        if Path(info["relative_path"]).name != info["relative_path"]:
            raise ValueError(f"{key} is recorded to be in {info['relative_path']}, outside the checkpoint")
        if not all(
            type(number) is int and number >= 0 for number in (*size, *offsets, *sizes, info["offset"], info["length"])
        ):
            raise ValueError(
                f"{key} has a block at {offsets} of {sizes}, byte {info['offset']} of "
                f"{info['length']}: not whole numbers"
            )
        blocks.append(StoredBlock(key, offsets, sizes, info["relative_path"], info["offset"], info["length"], code))
    return DescribedTensor(size, code, tuple(blocks))


def _plain(key: str) -> str:
    """Removes the prefixes of wrapped models from a key."""
    return key[_WRAPPERS.match(key).end() :]


def _check_keys(folder: Path, weights: Mapping[str, DescribedTensor], known: Mapping[str, GlobalTensor]) -> None:
    problems = [f"{key} is not part of the model" for key in weights if _plain(key) not in known]
    for key, tensor in weights.items():
        part = known.get(_plain(key))
        if part is not None and not part.fits(tensor.size):
            problems.append(f"{key} has shape {list(tensor.size)}, not {[*part.lead, *part.shape]}")
    if problems:
        shown = "; ".join(sorted(problems)[:_SHOWN])
        raise EnvironmentFault(
            f"{folder}: its tensors are not those of the model that config.json describes ({len(problems)} "
            f"differences): {shown}{' ...' if len(problems) > _SHOWN else ''}; give the configuration of its own model"
        )


def _check_blocks(folder: Path, weights: Mapping[str, DescribedTensor]) -> None:
    """Checks that every block is inside its tensor, and that blocks do not exceed it.

    What is built from them later then has the model's size.
    """
    for key, tensor in weights.items():
        for block in tensor.blocks:
            ranks = {len(tensor.size), len(block.offsets), len(block.sizes)}
            if len(ranks) > 1 or any(
                start + size > end for start, size, end in zip(block.offsets, block.sizes, tensor.size, strict=True)
            ):
                raise EnvironmentFault(
                    f"{folder / TORCH_DIST_METADATA}: {key} of shape {list(tensor.size)} is recorded with a block of "
                    f"{list(block.sizes)} at {list(block.offsets)}; the checkpoint is damaged, choose another one"
                )
        if sum(prod(block.sizes) for block in tensor.blocks) > prod(tensor.size):
            raise EnvironmentFault(
                f"{folder / TORCH_DIST_METADATA}: the blocks of {key} are more than its shape {list(tensor.size)}, so "
                "some are stored twice; the checkpoint is damaged, choose another one"
            )


def _entries(
    weights: Mapping[str, DescribedTensor], known: Mapping[str, GlobalTensor]
) -> tuple[tuple[StoredTensor, ...], dict[tuple[str, str], StoredBlock]]:
    entries = []
    blocks = {}
    for key, tensor in weights.items():
        part = known[_plain(key)]
        for block in (block for block in tensor.blocks if prod(block.sizes)):  # a rank may have saved an empty block
            shape, pieces = part.pieces(block.offsets, block.sizes)
            if pieces:
                name = f"{key}{list(block.offsets)}"
                entries.append(StoredTensor(block.file, name, WEIGHT, shape, None, pieces))
                blocks[block.file, name] = block
    return tuple(entries), blocks


def _check_files(folder: Path, blocks: Mapping[tuple[str, str], StoredBlock]) -> None:
    """Checks that every file exists and is long enough."""
    ends: dict[str, int] = {}
    for block in blocks.values():
        ends[block.file] = max(ends.get(block.file, 0), block.at + block.length)
    for name, end in sorted(ends.items()):
        file = folder / name
        size = None
        if file.is_file():
            size = file.stat().st_size
        if size is None or size < end:
            state = "is missing"
            if size is not None:
                state = f"has {size} bytes, not {end}"
            raise EnvironmentFault(f"{file} {state}; the checkpoint is damaged, choose another one")


def _check_whole(checkpoint: Checkpoint) -> None:
    """Checks that every element of every tensor of the model is stored exactly once."""
    volumes: dict[str, int] = {}
    for piece in (piece for entry in checkpoint.entries for piece in entry.pieces):
        volumes[piece.hf_name] = volumes.get(piece.hf_name, 0) + piece.hf_box.volume
    wanted = {spec.name: prod(spec.shape) for spec in tensor_specs(checkpoint.model)}
    odd = [
        f"{name}: {volumes.get(name, 0)} of {size} elements"
        for name, size in wanted.items()
        if volumes.get(name) != size
    ]
    if odd:
        shown = "; ".join(odd[:_SHOWN])
        raise EnvironmentFault(
            f"{checkpoint.folder}: {len(odd)} tensors of the model that config.json describes are incomplete: "
            f"{shown}{' ...' if len(odd) > _SHOWN else ''}; the checkpoint is damaged or of another model"
        )
    Boxes(checkpoint.entries).check_whole(checkpoint.folder)


@dataclass
class ArchiveFiles:
    """The files of a checkpoint, as `mrl.checkpoint.stored_boxes.TensorFiles`.

    An archive is read when it is requested, and compared with `.metadata`.
    """

    folder: Path
    blocks: dict[tuple[str, str], StoredBlock]  # by file and key of an entry
    _elements: dict[tuple[str, str], StoredElements] = field(default_factory=dict)

    def find(self, file: str, key: str) -> TensorBytes | None:
        if (file, key) not in self.blocks:
            return None
        elements = self.elements(file, key)
        return TensorBytes(elements.dtype, elements.shape, elements.start, elements.stop)

    def checkable(self) -> tuple[str, ...]:
        return tuple(sorted({file for file, _ in self.blocks}))

    def elements(self, file: str, key: str) -> StoredElements:
        """Returns the elements.

        Raises EnvironmentFault, naming file and tensor, for a damaged or unexpected archive.
        """
        if (file, key) not in self._elements:
            self._elements[file, key] = self._read_elements(self.blocks[file, key], key)
        return self._elements[file, key]

    def _read_elements(self, block: StoredBlock, key: str) -> StoredElements:
        try:
            with (self.folder / block.file).open("rb", buffering=0) as stream:
                elements = find_elements(stream.fileno(), block.at, block.length)
            if (elements.dtype, elements.shape) != (block.dtype, block.sizes):
                described = f"{TORCH_DIST_METADATA} says {block.dtype} {list(block.sizes)}"
                raise ValueError(f"it is {elements.dtype} {list(elements.shape)}, {described}")
        except (OSError, ValueError) as error:
            raise EnvironmentFault(
                f"{self.folder / block.file}: {key} cannot be read: {error}; the checkpoint is "
                "damaged, choose another one"
            ) from error
        return elements

    def check(self, file: str) -> int:
        """Reads the elements in one file. Returns how many tensors have no checksum, which torch.save can leave out.

        Raises EnvironmentFault, naming file and tensor, for a wrong checksum.
        """
        unchecked = 0
        buffer = memoryview(bytearray(_READ_BYTES))
        with (self.folder / file).open("rb", buffering=0) as stream:
            for key in (key for name, key in self.blocks if name == file):
                elements = self.elements(file, key)
                crc = 0
                unchecked += elements.crc == 0
                stream.seek(elements.storage[0])
                left = 0
                if elements.crc:
                    left = elements.storage[1] - elements.storage[0]
                while left and (count := stream.readinto(buffer[:left])):
                    crc = crc32(buffer[:count], crc)
                    left = left - count
                if left or crc != elements.crc:
                    raise EnvironmentFault(
                        f"{self.folder / file}: the bytes of {key} are not those that were written (CRC-32 differs); "
                        "the checkpoint is damaged, choose another one"
                    )
        return unchecked
