"""Inspects a Hugging Face checkpoint before a model is built: safetensors headers only, no weights and no pickles."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path

from mrl.errors import ConfigError, EnvironmentFault
from mrl.model import ModelSpec, load_model_spec, tensor_specs
from mrl.model.int4 import COLUMNS, PACKED
from mrl.model.mxfp4 import BLOCKS, CODE, GROUP_BYTES, SCALES
from mrl.model.registry import family_of, inner_tensors
from mrl.model.wrapped import VISION_TOWER
from mrl.plain_files import LFS_POINTER, NOT_PULLED, open_regular, parse_json, read_json, utf8

_HEADER_LIMIT = 100 * 1024**2  # bytes, the format's own limit
_SHOWN = 5
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_COMPARED = 16 * 1024**2  # bytes of two tensors that are compared at once
SINGLE = "model.safetensors"
# bits of an element, by dtype of the format; unknown for others
ITEM_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8}
FP8 = "F8_E4M3"
INT32 = "I32"
ITEM_BITS |= {FP8: 8, "F8_E5M2": 8}
INDEX = "model.safetensors.index.json"
HF_FILES = ("*.json", "*.jinja", "*.txt", "*.model")  # configuration and tokenizer in a model's folder


@dataclass(frozen=True)
class TensorBytes:
    """Location of a tensor in a safetensors file."""

    dtype: str  # the format's name: "F32", "BF16", ...
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    stop: int


def read_safetensors_header(file: Path) -> dict[str, TensorBytes]:
    """Returns tensor name -> dtype, shape and location.

    Raises EnvironmentFault when the file is missing, truncated or not safetensors.
    """
    try:
        size = file.stat().st_size
        header, length = _header(file, size)
        header.pop("__metadata__", None)
        tensors = {name: _tensor_bytes(entry, 8 + length) for name, entry in header.items()}
        _check_apart(tensors, 8 + length)
        end = max((tensor.stop for tensor in tensors.values()), default=8 + length) - 8 - length
        if size != 8 + length + end:
            why = "it was cut short" if size < 8 + length + end else "what lies behind them belongs to no tensor"
            raise ValueError(f"its header describes {8 + length + end} bytes and it has {size}: {why}")
        return tensors
    except FileNotFoundError:
        raise EnvironmentFault(f"{file} does not exist{_why_missing(file)}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvironmentFault(
            f"{file} cannot be read as safetensors: {error}; download the checkpoint again"
        ) from None


def _why_missing(file: Path) -> str:
    """Returns the end of a message about a missing file: what there is in its place."""
    pickles = file.with_suffix(".bin")
    if pickles.exists():
        return f": {pickles.name} beside it is a pickle, which is never read; save the tensors as safetensors"
    if (file.parent / INDEX).exists():
        return f" although {INDEX} lists it: download the checkpoint again"
    return ""


def safetensors_metadata(file: Path) -> dict[str, str]:
    """Returns the metadata of a file. Raises EnvironmentFault when it is not safetensors."""
    try:
        metadata = _header(file, file.stat().st_size)[0].get("__metadata__", {})
    except (OSError, ValueError, AttributeError) as error:
        raise EnvironmentFault(f"{file} cannot be read as safetensors: {error}") from None
    return metadata if isinstance(metadata, dict) else {}


def _header(file: Path, size: int) -> tuple[dict, int]:
    """Returns the JSON at a file's beginning, and its length. Raises OSError and ValueError."""
    with os.fdopen(open_regular(file), "rb") as stream:
        begin = stream.read(8)
        if begin == LFS_POINTER[:8]:
            raise ValueError(f"it {NOT_PULLED}")
        length = int.from_bytes(begin, "little")
        if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
            raise ValueError(f"its header claims {length} bytes of a file of {size}")
        return parse_json(utf8(stream.read(length))), length


def _tensor_bytes(entry: dict, base: int) -> TensorBytes:
    start, stop = entry["data_offsets"]
    shape = entry["shape"]
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or not isinstance(shape, list):
        raise ValueError(f"a tensor of dtype {str(dtype)[:40]} and shape {str(shape)[:40]}")
    if not all(type(number) is int and number >= 0 for number in (start, stop, *shape)) or stop < start:
        raise ValueError(f"a tensor of shape {str(shape)[:80]} from {str(start)[:40]} to {str(stop)[:40]}")
    return TensorBytes(dtype, tuple(shape), base + start, base + stop)


def _check_apart(tensors: dict[str, TensorBytes], begin: int) -> None:
    """Raises ValueError if tensors overlap or leave bytes between them, which the format's library refuses, or if one
    has another size than its shape needs.
    """
    end = begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != end:
            where = (
                "before the tensor ahead of it ends" if tensor.start < end else f"and bytes from {end} are no tensor's"
            )
            raise ValueError(f"{name[:80]} begins at byte {tensor.start}, {where}")
        size = ITEM_BITS.get(tensor.dtype)
        if size is not None and prod(tensor.shape) * size != (tensor.stop - tensor.start) * 8:
            raise ValueError(f"{name[:80]} has {tensor.stop - tensor.start} bytes, not those of its shape")
        end = tensor.stop


def hf_files(model: Path) -> list[Path]:
    """Returns configuration and tokenizer files of a checkpoint folder, without the index of weights."""
    found = {file for pattern in HF_FILES for file in model.glob(pattern)}
    wanted = sorted(file for file in found if not file.name.endswith(".index.json"))
    for file in wanted:
        check_own_file(file)
    return wanted


def check_own_file(file: Path) -> None:
    """Raises EnvironmentFault for a pipe, device or folder in a model's folder, and for a link that leaves it.

    A snapshot in the Hugging Face cache consists of links to blobs beside it, models--ORG--NAME/snapshots/COMMIT/FILE
    -> ../../blobs/HASH. Only such links are followed.
    """
    folder = file.parent.resolve()
    try:
        real = file.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError for circular links
        if not file.is_symlink():
            return  # the file is missing, which opening it will report
        raise EnvironmentFault(f"{file}: a link that leads nowhere ({error})") from None
    if not real.is_file():
        raise EnvironmentFault(f"{file}: not a regular file")
    repository = folder.parent.parent
    is_cached = folder.parent.name == "snapshots" and repository.name.startswith("models--")
    if real.parent != folder and not (is_cached and real.parent == repository / "blobs"):
        raise EnvironmentFault(
            f"{file}: a link to {real}, outside its folder, and is not followed: put the file itself there"
        )


def checkpoint_tensors(path: str | Path) -> dict[str, TensorBytes]:
    """Returns all tensors of a checkpoint directory by name.

    Raises EnvironmentFault if there are no safetensors files or one is broken. The same holds for a tensor that is in
    two files, of which each reader would take another one.
    """
    tensors: dict[str, TensorBytes] = {}
    for file in weight_files(Path(path)):
        found = read_safetensors_header(file)
        if twice := sorted(tensors.keys() & found.keys()):
            raise EnvironmentFault(f"{file}: {twice[0]} is stored in another file beside it, too; remove one of both")
        tensors.update(found)
    return tensors


def scale_of(name: str) -> str:
    """Returns the name of the tensor with the scales of an FP8 matrix."""
    return f"{name}_scale_inv"


def int4_scale_of(name: str) -> str:
    """Returns the name of the tensor with the scales of a matrix of 4-bit integers."""
    return f"{name}_scale"


def int4_parts(name: str) -> tuple[str, str, str]:
    """Returns the names of the tensors in which a matrix of 4-bit integers is stored."""
    return name + PACKED, int4_scale_of(name), f"{name}_shape"


def has_weights(folder: Path) -> bool:
    """Tells whether there is a safetensors file, or an index of some."""
    return (folder / INDEX).exists() or any(folder.glob("*.safetensors"))


def check_checkpoint(path: str | Path, model: ModelSpec, key: str = "model.path") -> None:
    """Raises EnvironmentFault if the files do not hold exactly the tensors of config.json.

    `key` is the configuration key that names them.
    """
    tensors = _under_their_names(path, checkpoint_tensors(path), model)
    wanted = {spec.name: spec.shape for spec in tensor_specs(model)}
    int4_problems = []
    if model.int4_group:
        tensors, int4_problems = _unpacked(tensors, model.int4_group)
    scales = {scale_of(name) for name in wanted if name in tensors and tensors[name].dtype == FP8}
    stored = {name: tensor.shape for name, tensor in tensors.items() if name not in scales}
    problems = [f"{name} is missing" for name in wanted.keys() - stored.keys()]
    problems += [
        f"{name} is not part of the model" for name in stored.keys() - wanted.keys() if not is_spare(name, model)
    ]
    problems += [
        f"{n} has shape {list(stored[n])}, not {list(wanted[n])}"
        for n in wanted.keys() & stored.keys()
        if stored[n] != wanted[n]
    ]
    problems += int4_problems + _eight_bit_problems(tensors, wanted, model.fp8_block)
    problems += _head_problems(path, model)
    # matrices that are missing follow from these
    problems = _mxfp4_problems(path, model) or problems
    if problems:
        shown = "; ".join(sorted(problems)[:_SHOWN])
        raise EnvironmentFault(
            f"{key} {path}: the weights are not those of the {model.family} model that config.json describes "
            f"({len(problems)} differences): {shown}{' ...' if len(problems) > _SHOWN else ''}"
        )


def _unpacked(tensors: dict[str, TensorBytes], group: int) -> tuple[dict[str, TensorBytes], list[str]]:
    """Returns the tensors with matrices of 4-bit integers under their own names and shapes, and what is wrong with
    them. `group`: columns of one scale.
    """
    found = dict(tensors)
    problems = []
    for key, packed in tensors.items():
        if not key.endswith(f".weight{PACKED}"):
            continue
        name = key.removesuffix(PACKED)
        rows, columns = packed.shape if len(packed.shape) == 2 else (0, 0)
        shape = (rows, columns * COLUMNS)
        scale = tensors.get(int4_scale_of(name))
        if name in tensors:
            problems.append(f"{name} is stored twice, once as {key}")
        if packed.dtype != "I32" or len(packed.shape) != 2:
            problems.append(f"{key} is {packed.dtype} of shape {list(packed.shape)}: only matrices of I32 are read")
        if scale is None or (scale.dtype, scale.shape) != ("BF16", (rows, shape[1] // group)):
            problems.append(f"{int4_scale_of(name)} must be BF16 of shape {[rows, shape[1] // group]}")
        for part in int4_parts(name):
            found.pop(part, None)
        found[name] = replace(packed, shape=shape)
    return found, problems


def _under_their_names(path: str | Path, tensors: dict[str, TensorBytes], model: ModelSpec) -> dict[str, TensorBytes]:
    """Returns the model's tensors, of which one in the files may hold several.

    Raises EnvironmentFault for a tensor that exists in both forms.
    """
    found: dict[str, TensorBytes] = {}
    for key, stored in tensors.items():
        for inner in inner_tensors(model, key, stored.shape):
            if inner.name in found:
                raise EnvironmentFault(f"{path}: {inner.name} is stored twice, once as {key}; remove one")
            found[inner.name] = replace(stored, shape=inner.shape)
    return found


def _head_problems(path: str | Path, model: ModelSpec) -> list[str]:
    """Returns why a stored output layer is not that of a model that ties it to its embeddings."""
    if not model.tie_word_embeddings:
        return []
    stored_in = {}
    for file in weight_files(Path(path)):
        for key, stored in read_safetensors_header(file).items():
            for inner in inner_tensors(model, key, stored.shape):
                if inner.name in (EMBEDDING, HEAD):
                    stored_in[inner.name] = (file, stored)
    if len(stored_in) < 2 or same_bytes(*stored_in.values()):
        return []
    return [
        f"{HEAD} differs from {EMBEDDING} though config.json says tie_word_embeddings: vLLM ties them and transformers "
        f"keeps both; remove {HEAD}, or set tie_word_embeddings to false"
    ]


def same_bytes(one: tuple[Path, TensorBytes], other: tuple[Path, TensorBytes]) -> bool:
    """Tells whether two tensors have the same dtype, shape and bytes."""
    if (one[1].dtype, one[1].shape) != (other[1].dtype, other[1].shape):
        return False
    with os.fdopen(open_regular(one[0]), "rb") as first, os.fdopen(open_regular(other[0]), "rb") as second:
        first.seek(one[1].start)
        second.seek(other[1].start)
        left = one[1].stop - one[1].start
        while left > 0:
            size = min(left, _COMPARED)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True


def _mxfp4_problems(path: str | Path, model: ModelSpec) -> list[str]:
    """Returns why 4-bit floating-point matrices of experts cannot be read as bfloat16."""
    if family_of(model).stored is None:
        return []
    problems = []
    tensors = checkpoint_tensors(path)
    for key, blocks in tensors.items():
        if not key.endswith(BLOCKS):
            continue
        scale = tensors.get(key.removesuffix(BLOCKS) + SCALES)
        if not model.is_mxfp4:
            problems.append(f"{key} is in MXFP4, but config.json has no quantization_config")
        if blocks.dtype != CODE or len(blocks.shape) != 4 or blocks.shape[-1] != GROUP_BYTES:
            problems.append(
                f"{key} is {blocks.dtype} of shape {list(blocks.shape)}: only {CODE} in blocks of 16 is read"
            )
        elif scale is None or (scale.dtype, scale.shape) != (CODE, blocks.shape[:-1]):
            name = key.removesuffix(BLOCKS) + SCALES
            problems.append(f"{name} must be {CODE} of shape {list(blocks.shape[:-1])}")
    return problems


def _eight_bit_problems(
    tensors: dict[str, TensorBytes], wanted: Iterable[str], block: tuple[int, int] | None
) -> list[str]:
    """Returns why 8-bit weights cannot be read as bfloat16. `block`: rows and columns of one scale."""
    problems = []
    for name in wanted:
        if name in tensors and tensors[name].dtype.startswith("F8"):
            problems += _scale_problems(name, tensors[name], tensors.get(scale_of(name)), block)
    return problems


def _scale_problems(
    name: str, weight: TensorBytes, scale: TensorBytes | None, block: tuple[int, int] | None
) -> list[str]:
    if block is None:
        return [f"{name} is {weight.dtype}, but config.json has no quantization_config for it"]
    if weight.dtype != FP8 or len(weight.shape) != len(block):
        return [f"{name} is {weight.dtype} of shape {list(weight.shape)}: only matrices of {FP8} are read"]
    if scale is None:
        return [f"{name} is {FP8} and its scales, {scale_of(name)}, are missing"]
    of_blocks = tuple(-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    if (scale.dtype, scale.shape) != ("F32", of_blocks):
        return [
            f"{scale_of(name)} is {scale.dtype} of shape {list(scale.shape)}, not F32 of shape {list(of_blocks)}: one "
            f"for {block[0]} by {block[1]} elements"
        ]
    return []


def check_same_architecture(key: str, path: str | Path, model: ModelSpec) -> None:
    """Raises ConfigError if config.json in `path`, which configuration key `key` names, describes another model."""
    if differing := other_architecture(path, model):
        raise ConfigError(
            f"{key} {path}: another architecture than model.path's ({differing}); give a checkpoint of the same one"
        )


def other_architecture(path: str | Path, model: ModelSpec) -> str:
    """Describes how config.json in `path` differs from `model`; empty if it does not, except in dtype."""
    other = load_model_spec(path, model.trained_part)
    compared = [field.name for field in fields(ModelSpec) if field.compare and field.name != "dtype"]
    names = [name for name in compared if getattr(other, name) != getattr(model, name)]
    return ", ".join(f"{name} {getattr(other, name)}, not {getattr(model, name)}" for name in names[:_SHOWN])


def is_spare(name: str, model: ModelSpec) -> bool:
    """Tells whether the model computes a checkpoint's tensor itself, or does not need it."""
    tied_head = name == HEAD and model.tie_word_embeddings
    return name.endswith("rotary_emb.inv_freq") or tied_head or family_of(model).is_left_out(name, model)


def _own(file: Path) -> Path:
    check_own_file(file)
    return file


def read_index(index: Path) -> dict[str, str]:
    """Returns the file of each tensor that an index lists. Raises EnvironmentFault if it lists none."""
    try:
        content = read_json(index)
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{index} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise EnvironmentFault(f"{index} holds no JSON object, but {_kind(content)}; it must have a weight_map")
    if "weight_map" not in content:
        raise EnvironmentFault(f"{index} has no weight_map, which lists the file of each tensor; write the index anew")
    listed = content["weight_map"]
    if not isinstance(listed, dict):
        raise EnvironmentFault(f"{index}: weight_map must be an object of tensors and their files, not {_kind(listed)}")
    if not listed:
        raise EnvironmentFault(f"{index}: weight_map is empty; write the index anew")
    for tensor, file in listed.items():
        if not isinstance(file, str):
            raise EnvironmentFault(f"{index}: weight_map must have a file's name for {tensor}, not {_kind(file)}")
    return listed


def _kind(value: object) -> str:
    kinds = {list: "a list", str: "a string", int: "a number", float: "a number", dict: "an object", bool: "a boolean"}
    return kinds.get(type(value), "null")


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a checkpoint folder.

    Raises EnvironmentFault if there are none or the index is invalid.
    """
    index = folder / INDEX
    if index.exists() or index.is_symlink():
        try:
            check_own_file(index)
        except OSError as error:
            raise EnvironmentFault(f"{index} cannot be read: {error}") from None
        names = sorted(set(read_index(index).values()))
        if outside := [n for n in names if Path(n).name != n]:
            raise EnvironmentFault(f"{index} names files outside its directory: {outside[:_SHOWN]}")
        if (folder / SINGLE).exists() and SINGLE not in names:
            raise EnvironmentFault(
                f"{folder}: {SINGLE} is stored beside {INDEX}, which lists other files: transformers reads the former "
                "and vLLM the latter; remove those of the two that are old"
            )
        return [_own(folder / name) for name in names]
    files = [_own(file) for file in sorted(folder.glob("*.safetensors"))]
    if not files:
        other = ""
        if any(folder.glob("*.bin")):
            other = "; it has .bin files, which are pickles and are never read"
        raise EnvironmentFault(
            f"model.path {folder}: no safetensors files there{other}. Convert or download the weights as safetensors"
        )
    return files


def tower_tensors(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yields each file of a checkpoint folder that has tensors of the vision tower, with their names.

    Raises EnvironmentFault for a folder without weights.
    """
    for file in weight_files(folder):
        keys = [key for key in read_safetensors_header(file) if key.startswith(VISION_TOWER)]
        if keys:
            yield file, keys


def in_tower(key: str) -> str:
    """Returns a tensor's name within the vision tower, given that in the files."""
    prefix = next(prefix for prefix in VISION_TOWER if key.startswith(prefix))
    return key.removeprefix(prefix)
