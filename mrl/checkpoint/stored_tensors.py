"""Reads a checkpoint of ours into any layout: stored boxes and wanted boxes are intersected in Hugging Face coordinates."""

from collections.abc import Iterable
from functools import lru_cache
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open

from mrl.checkpoint.manifest import Entry, Manifest, check_digest, check_disjoint, holders
from mrl.errors import EnvironmentFault
from mrl.model.megatron_shards import Piece


class StoredTensors:
    """The tensors of one checkpoint. Files are checked against their digests when they are first opened.

    Raises EnvironmentFault for a manifest that describes an element twice.
    """

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self._facts = folder, manifest.files()
        self._holders = holders(manifest.entries())
        check_disjoint(folder, self._holders)
        self._open = lru_cache(maxsize=None)(self._open_checked)
        self._tensor = lru_cache(maxsize=4)(self._read)

    def fill(self, role: str, pieces: Iterable[Piece], out: torch.Tensor) -> None:
        """Writes the elements that `pieces` name into `out`, a tensor in their local frame; elements under no piece stay.

        Raises EnvironmentFault when the checkpoint does not hold all of them.
        """
        for piece in pieces:
            filled = 0
            for group, held in self._holders[role, piece.hf_name]:
                common = held.hf_box.intersect(piece.hf_box)
                if common is None:
                    continue
                source = self._tensor(group)[common.rebase(held.hf_box, held.local_box).slices]
                out[common.rebase(piece.hf_box, piece.local_box).slices] = source
                filled += common.volume
            if filled != piece.hf_box.volume:
                raise EnvironmentFault(
                    f"{self.folder}: holds {filled} of {piece.hf_box.volume} elements of {piece.hf_name} ({role}); "
                    "it is damaged or of another model"
                )

    def tensor(self, file: str, key: str) -> torch.Tensor:
        """One stored tensor by file and key, such as a generator state."""
        return self._open(file).get_tensor(key)

    def _read(self, group: tuple[Entry, ...]) -> torch.Tensor:
        whole = [self.tensor(e.file, e.key) for e in group]
        if group[0].flat is None:
            return whole[0]
        flat = torch.cat([part.reshape(-1) for part in whole])
        if flat.numel() != prod(group[0].shape):
            raise EnvironmentFault(f"{self.folder}: {group[0].key} is stored in parts that do not add up; a rank's file is missing")
        return flat.reshape(group[0].shape)

    def _open_checked(self, file: str):
        check_digest(self.folder, file, self._facts)
        return safe_open(self.folder / file, "pt")
