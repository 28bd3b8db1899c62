"""Writes the adapters of an mrl checkpoint in PEFT's format."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mrl.checkpoint.adapter_reader import StoredAdapters
from mrl.checkpoint.convert_job import refuse_in_the_way
from mrl.checkpoint.open_checkpoint import CODES, open_adapters, step_folder
from mrl.checkpoint.safetensors_file import ITEM_BYTES, safetensors_header, write_blocks
from mrl.checkpoint.step_folders import write_atomically
from mrl.errors import EnvironmentFault
from mrl.model.adapters import adapter_shapes
from mrl.model.peft_files import BASE_DIGEST, CONFIG, WEIGHTS, name_in_file, peft_config


@dataclass(frozen=True)
class PeftReport:
    """Summary of what was written in PEFT's format."""

    tensors: int
    left_out_critic: bool  # the source has a critic beside the adapters


def write_peft(checkpoint: Path, output: Path) -> PeftReport:
    """Writes the adapters of a `step-N` folder, or of a run directory's newest one.

    Raises ConfigError for a checkpoint without adapters or an existing output, EnvironmentFault for a damaged source or
    a full disk.
    """
    folder = step_folder(checkpoint)
    refuse_in_the_way(output, folder)
    adapters, manifest = open_adapters(folder)
    base = manifest.adapters["base"]
    dropout = manifest.adapters.get("dropout", 0.0)
    described = peft_config(adapters.lora, base["path"], dropout, adapters.model.is_wrapped)
    config = json.dumps(described, indent=2)

    def write(work: Path) -> None:
        write_blocks(work / WEIGHTS, _blocks(adapters, base["digest"]), digest=False, durable=True)
        (work / CONFIG).write_text(config)

    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, write)
    except OSError as error:
        raise EnvironmentFault(f"{output} cannot be written ({error.strerror})") from error
    return PeftReport(len(adapter_shapes(adapters.model, adapters.lora)), bool(manifest.critic))


def _blocks(adapters: StoredAdapters, base_digest: str) -> Iterator[bytes | memoryview]:
    shapes = adapter_shapes(adapters.model, adapters.lora)
    code = CODES[adapters.dtype]
    described = (
        (name_in_file(name, adapters.model), code, (r, c), r * c * ITEM_BYTES[code]) for name, (r, c) in shapes.items()
    )
    yield safetensors_header(described, {"format": "pt", BASE_DIGEST: base_digest})
    reader = adapters.reader()
    try:
        for name in shapes:
            yield memoryview(adapters.factor(reader, name).reshape(-1)).cast("B")
    finally:
        reader.close()
