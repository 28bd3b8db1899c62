"""Configuration and tokenizer of a model, which every checkpoint contains."""

import json
from pathlib import Path

from mrl.checkpoint.manifest import FileFacts, facts_of, fsync
from mrl.errors import EnvironmentFault
from mrl.model.hf_config import QUANTIZATION, without_quantization
from mrl.model.hf_files import hf_files
from mrl.plain_files import parse_json, read_bytes
from mrl.units import MIB

MODEL_FILE_BYTES = 512 * MIB  # the largest tokenizers have some tens of MiB


def copy_hf_files(model: Path, folder: Path) -> FileFacts:
    """Copies configuration and tokenizer between folders, durably. Returns size and digest of each file.

    config.json loses its FP8 settings, because weights are never written in FP8. Raises OSError, or EnvironmentFault
    for a file that is not a regular one of the model or is too large.
    """
    facts = {}
    for file in hf_files(model):
        try:
            data = read_bytes(file, MODEL_FILE_BYTES)
            if file.name == "config.json" and QUANTIZATION.encode() in data:
                data = json.dumps(without_quantization(parse_json(data)), indent=2).encode()
        except ValueError as error:
            raise EnvironmentFault(f"{file}: {error}") from None
        facts[file.name] = facts_of(data)
        (folder / file.name).write_bytes(data)
        fsync(folder / file.name)
    fsync(folder)
    return facts
