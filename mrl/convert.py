"""Checkpoints of ours as Hugging Face checkpoints. No Megatron, no model: tensors are put together one at a time from stored boxes."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from mrl.errors import ConfigError, EnvironmentFault
from mrl.models import model_spec, tensor_specs
from mrl.reshard.boxes import Box
from mrl.reshard.manifest import MANIFEST, WEIGHT, newest_checkpoint, read_manifest
from mrl.reshard.source import Piece
from mrl.reshard.stored import StoredTensors

FILE_BYTES = 4 * 1024**3
HF_FOLDER = "hf"  # configuration and tokenizer, copied beside the weights of every checkpoint
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def megatron_to_hf(checkpoint: str | Path, output: str | Path) -> int:
    """Writes safetensors files with index, configuration and tokenizer; returns the number of tensors.

    `checkpoint` is a `step-N` folder, or a run directory, whose newest complete step is taken. The folder appears whole or not at all.
    Raises EnvironmentFault for a checkpoint that is not complete, ConfigError for an output that is in the way or cannot be written.
    """
    source, target = _source(Path(checkpoint)), Path(output)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not an empty folder; choose another output")
    work = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error.strerror}); choose another output") from error
    try:
        count = _write_tensors(source, work)
        for file in (source / HF_FOLDER).iterdir():
            shutil.copy(file, work / file.name)
        _name_dtype(work / "config.json", read_manifest(source).dtype)
        if target.exists():
            target.rmdir()
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return count


def _source(path: Path) -> Path:
    newest = path if (path / MANIFEST).exists() else _newest_of_run(path)
    if newest is None:
        raise EnvironmentFault(f"{path}: neither a checkpoint (no {MANIFEST}) nor a run directory with a complete one")
    if not (newest / HF_FOLDER / "config.json").is_file():
        raise EnvironmentFault(f"{newest / HF_FOLDER} is missing, the model's configuration and tokenizer; choose another checkpoint")
    return newest


def _newest_of_run(run_dir: Path) -> Path | None:
    found = newest_checkpoint(run_dir / "checkpoints", digests=False)  # of the one that is taken every file is checked when it is opened
    for error in found.damaged.values():
        print(f"passed over: {error}")
    return found.path


def _name_dtype(config: Path, dtype: str) -> None:
    """The configuration says what the written weights are. Its key is `dtype` since transformers 4.56, `torch_dtype` before."""
    data = json.loads(config.read_text())
    keys = [key for key in ("dtype", "torch_dtype") if key in data] or ["torch_dtype"]
    config.write_text(json.dumps(data | dict.fromkeys(keys, dtype), indent=2))


def _write_tensors(source: Path, work: Path) -> int:
    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(_files(source), 1):
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, work / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (work / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return len(weight_map)


def _files(source: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors by file, each file about FILE_BYTES."""
    manifest = read_manifest(source)
    stored, dtype = StoredTensors(source, manifest), DTYPES[manifest.dtype]
    tensors, size = {}, 0
    for spec in tensor_specs(model_spec(manifest.hf_config)):
        tensor, whole = torch.empty(spec.shape, dtype=dtype), Box.whole(spec.shape)
        stored.fill(WEIGHT, [Piece(spec.name, whole, whole)], tensor)
        if tensors and size + tensor.nbytes > FILE_BYTES:
            yield tensors
            tensors, size = {}, 0
        tensors[spec.name] = tensor
        size += tensor.nbytes
    yield tensors
