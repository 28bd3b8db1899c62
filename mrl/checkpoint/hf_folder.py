"""Configuration and tokenizer of a model, which go with every checkpoint."""

from pathlib import Path

from mrl.checkpoint.manifest import FileFacts, facts_of, fsync
from mrl.model.hf_files import hf_files


def copy_hf_files(model: Path, folder: Path) -> FileFacts:
    """Copies configuration and tokenizer from one folder into another, durably; size and digest of what was read.

    Raises OSError as the disk does.
    """
    facts = {}
    for file in hf_files(model):
        data = file.read_bytes()
        facts[file.name] = facts_of(data)
        (folder / file.name).write_bytes(data)
        fsync(folder / file.name)
    fsync(folder)
    return facts
