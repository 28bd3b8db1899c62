"""Looks at a Hugging Face checkpoint before a model is built from it: safetensors headers only, no weights,
no pickle.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path

from mrl.errors import ConfigError, EnvironmentFault
from mrl.model import ModelSpec, load_model_spec, tensor_specs
from mrl.model.registry import family_of

_HEADER_LIMIT = 100 * 1024**2  # bytes; the format's own bound
_SHOWN = 5
INDEX = "model.safetensors.index.json"
HF_FILES = ("*.json", "*.jinja", "*.txt", "*.model")  # configuration and tokenizer of a model's folder


@dataclass(frozen=True)
class TensorBytes:
    """Where a tensor lies in a safetensors file."""

    dtype: str  # as the format names it: "F32", "BF16", ...
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    stop: int


def read_safetensors_header(file: Path) -> dict[str, TensorBytes]:
    """Tensor name -> dtype, shape and place.

    Raises EnvironmentFault when the file is missing, cut short or no safetensors file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
                raise ValueError(f"its header claims {length} bytes of a file of {size}")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size < 8 + length + end:
            raise ValueError(f"its header describes {8 + length + end} bytes and it has {size}: it was cut short")
        return {name: _tensor_bytes(entry, 8 + length) for name, entry in header.items()}
    except FileNotFoundError:
        raise EnvironmentFault(
            f"{file} does not exist although {INDEX} lists it: download the checkpoint again"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvironmentFault(
            f"{file} cannot be read as safetensors: {error}; download the checkpoint again"
        ) from None


def _tensor_bytes(entry: dict, base: int) -> TensorBytes:
    start, stop = entry["data_offsets"]
    return TensorBytes(entry["dtype"], tuple(entry["shape"]), base + start, base + stop)


def read_safetensors_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape. Raises as `read_safetensors_header` does."""
    return {name: tensor.shape for name, tensor in read_safetensors_header(file).items()}


def hf_files(model: Path) -> list[Path]:
    """Configuration and tokenizer in a checkpoint folder, without the index of its weights."""
    found = {file for pattern in HF_FILES for file in model.glob(pattern)}
    return sorted(file for file in found if not file.name.endswith(".index.json"))


def checkpoint_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a checkpoint directory.

    Raises EnvironmentFault when there are no safetensors files or one is broken.
    """
    folder = Path(path)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        shapes.update(read_safetensors_shapes(file))
    return shapes


def check_checkpoint(path: str | Path, model: ModelSpec) -> None:
    """Raises EnvironmentFault when the files do not hold exactly the tensors that config.json promises."""
    stored = checkpoint_shapes(path)
    wanted = {spec.name: spec.shape for spec in tensor_specs(model)}
    problems = [f"{name} is missing" for name in wanted.keys() - stored.keys()]
    problems += [
        f"{name} is not part of the model" for name in stored.keys() - wanted.keys() if not _is_spare(name, model)
    ]
    problems += [
        f"{n} has shape {list(stored[n])}, not {list(wanted[n])}"
        for n in wanted.keys() & stored.keys()
        if stored[n] != wanted[n]
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:_SHOWN])
        raise EnvironmentFault(
            f"model.path {path}: the weights are not those of the {model.family} model that config.json describes "
            f"({len(problems)} differences): {shown}{' ...' if len(problems) > _SHOWN else ''}"
        )


def check_same_architecture(key: str, path: str | Path, model: ModelSpec) -> None:
    """Raises ConfigError when config.json in `path`, which configuration key `key` names,
    describes another model than `model`.
    """
    other = load_model_spec(path)
    compared = [field.name for field in fields(model) if field.compare and field.name != "dtype"]
    names = [name for name in compared if getattr(other, name) != getattr(model, name)]
    if names:
        shown = ", ".join(f"{name} {getattr(other, name)}, not {getattr(model, name)}" for name in names[:_SHOWN])
        raise ConfigError(
            f"{key} {path}: another architecture than model.path's ({shown}); give a checkpoint of the same one"
        )


def _is_spare(name: str, model: ModelSpec) -> bool:
    """Tensors that some checkpoints carry and the model computes by itself or does without."""
    tied_head = name == "lm_head.weight" and model.tie_word_embeddings
    return name.endswith("rotary_emb.inv_freq") or tied_head or family_of(model).is_left_out(name, model)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder.

    Raises EnvironmentFault when there are none or the index cannot be followed.
    """
    index = folder / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise EnvironmentFault(f"{index} cannot be read: {error}") from None
        if outside := [n for n in names if not isinstance(n, str) or Path(n).name != n]:
            raise EnvironmentFault(f"{index} names files outside its directory: {outside[:_SHOWN]}")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        other = "; it has .bin files, which are pickles and are never read" if any(folder.glob("*.bin")) else ""
        raise EnvironmentFault(
            f"model.path {folder}: no safetensors files there{other}. Convert or download the weights as safetensors"
        )
    return files
