"""What stands around the tensors in a written file: safetensors' header, or an archive of torch.save around each tensor."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from mrl.checkpoint.manifest import Entry
from mrl.checkpoint.open_checkpoint import code_of
from mrl.checkpoint.planned_file import PlannedFile, entry_bytes
from mrl.checkpoint.safetensors_header import safetensors_header
from mrl.extras.torch_dist.archive import Frame


class Container(Protocol):
    """A kind of file."""

    checksums: ClassVar[bool]  # does `after` need the CRC-32 of the tensor's bytes?

    def head(self, file: PlannedFile) -> bytes:
        """The first bytes of the file."""
        ...

    def before(self, entry: Entry) -> bytes:
        """The bytes before a tensor."""
        ...

    def after(self, entry: Entry, crc: int) -> bytes:
        """The bytes after it; their number does not depend on `crc`."""
        ...


@dataclass(frozen=True)
class Safetensors:
    """All descriptions first, then all tensors."""

    dtype: str  # of the weights, as the configuration names it
    checksums: ClassVar[bool] = False

    def head(self, file: PlannedFile) -> bytes:
        tensors = ((e.key, code_of(e.role, self.dtype), e.shape, entry_bytes(e, self.dtype)) for e in file.entries)
        return safetensors_header(tensors, {"format": "pt"})

    def before(self, entry: Entry) -> bytes:
        return b""

    def after(self, entry: Entry, crc: int) -> bytes:
        return b""


@dataclass(frozen=True)
class TorchArchives:
    """One archive after another, as torch.distributed.checkpoint writes them."""

    dtype: str
    leading: dict[str, int]  # key of an entry -> axes of length one before its own
    checksums: ClassVar[bool] = True

    def head(self, file: PlannedFile) -> bytes:
        return b""

    def before(self, entry: Entry) -> bytes:
        return self._frame(entry).before()

    def after(self, entry: Entry, crc: int) -> bytes:
        return self._frame(entry).after(crc)

    def _frame(self, entry: Entry) -> Frame:
        return Frame(code_of(entry.role, self.dtype), (1,) * self.leading[entry.key] + entry.shape)


def places(container: Container, file: PlannedFile, dtype: str) -> list[tuple[int, int]]:
    """(first byte, number of bytes) of every entry of a file with what stands around it, and one more: where the file ends, and 0."""
    at, found = len(container.head(file)), []
    for entry in file.entries:
        size = len(container.before(entry)) + entry_bytes(entry, dtype) + len(container.after(entry, 0))
        found.append((at, size))
        at += size
    return [*found, (at, 0)]
