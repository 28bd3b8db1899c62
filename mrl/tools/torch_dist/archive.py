"""The archive that torch.save makes of one tensor: the location of its elements, and the bytes around them.

A torch_dist checkpoint consists of files of such archives, one after another. The format is PyTorch's
(caffe2/serialize/inline_container.h): an uncompressed zip whose `data.pkl` describes the tensor, and whose `data/0` has
its elements, aligned to 64 bytes. This module reads and writes it without torch, and never element by element.
`mrl.tools.torch_dist.pickles` reads the pickle.
"""

import io
import os
import struct
import zipfile
from dataclasses import dataclass
from functools import cached_property
from math import prod
from zlib import crc32

from mrl.checkpoint.safetensors_file import ITEM_BYTES
from mrl.tools.torch_dist.pickles import Named, Persistent, Recorded, read_pickle, write_pickle

STORAGES = {"F32": "FloatStorage", "BF16": "BFloat16Storage"}  # safetensors' dtype -> torch's storage class
_ROOT = "archive"
_ALIGNMENT = 64
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_STREAMED = 1 << 3  # a zip's flag: the checksum follows the data
_LARGE = 0xFFFFFFFF  # the sizes are in the extra field


@dataclass(frozen=True)
class StoredElements:
    """A tensor's elements in a file, contiguous."""

    start: int  # bytes from the beginning of the file
    stop: int
    dtype: str  # with safetensors' name
    shape: tuple[int, ...]
    # the bytes that the checksum covers; more than the tensor's if it was a view
    storage: tuple[int, int]
    crc: int  # CRC-32 of them; 0 if the writer computed none


def find_elements(handle: int, offset: int, length: int) -> StoredElements:
    """Reads the archive at `offset` of an open file. Raises ValueError that says what is wrong."""
    try:
        with zipfile.ZipFile(_FileRange(handle, offset, length)) as archive:
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        pickled = _contents(handle, offset, records["data.pkl"])
        info = records["data/0"]
        if "byteorder" in records and _contents(handle, offset, records["byteorder"]) != b"little":
            raise ValueError("its bytes are big-endian")
        begin = _data_start(handle, offset, info)
    except (zipfile.BadZipFile, KeyError, EOFError, struct.error, NotImplementedError) as error:
        raise ValueError(f"no archive of torch.save begins at byte {offset} ({error})") from None
    storage, first, shape = _described(pickled)
    item = ITEM_BYTES[storage]
    start = begin + first * item
    size = prod(shape) * item
    if start + size > begin + info.file_size or begin + info.file_size > offset + length:
        raise ValueError(f"it describes {size} bytes and has {info.file_size}")
    return StoredElements(start, start + size, storage, shape, (begin, begin + info.file_size), info.CRC)


def _data_start(handle: int, offset: int, info: zipfile.ZipInfo) -> int:
    """Returns where a record's bytes begin in the file."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{info.filename} is compressed")
    header = os.pread(handle, _LOCAL.size, offset + info.header_offset)
    return offset + info.header_offset + _LOCAL.size + sum(_LOCAL.unpack(header)[-2:])


def _contents(handle: int, offset: int, info: zipfile.ZipInfo) -> bytes:
    """Returns a small record. Checks its checksum if there is one, which torch.save can leave out."""
    data = os.pread(handle, info.file_size, _data_start(handle, offset, info))
    if info.CRC and crc32(data) != info.CRC:
        raise ValueError(f"the bytes of {info.filename} are not those that were written (CRC-32 differs)")
    return data


def _described(pickled: bytes) -> tuple[str, int, tuple[int, ...]]:
    """Returns (dtype, first element in its storage, shape) of the tensor that a `data.pkl` rebuilds."""
    tensor = read_pickle(pickled)
    if not isinstance(tensor, Recorded) or tensor.pickled_name != "torch._utils._rebuild_tensor_v2":
        raise ValueError("it holds something else than one plain tensor")
    (_, kind, *_), first, shape, strides, *_ = tensor.arguments
    names = {f"torch.{name}": code for code, name in STORAGES.items()}
    if kind.pickled_name not in names:
        raise ValueError(f"its elements are a {kind.pickled_name}; read are {', '.join(names)}")
    shape = tuple(shape)
    contiguous = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if any(size > 1 and stride != expected for size, stride, expected in zip(shape, strides, contiguous, strict=True)):
        raise ValueError("its elements are not in order (a transposed view)")
    return names[kind.pickled_name], first, shape


class _FileRange(io.RawIOBase):
    """A range of a file as a file of its own."""

    def __init__(self, handle: int, offset: int, length: int):
        self._handle = handle
        self._offset = offset
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, to + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer) -> int:
        data = os.pread(self._handle, min(len(buffer), max(0, self._length - self._at)), self._offset + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


@dataclass(frozen=True)
class ArchiveFrame:
    """The bytes before and after the elements of one tensor, which together form an archive that torch.load reads.

    The checksum is known only after the elements are written, so it follows them, as in PyTorch's own writer.
    """

    code: str  # safetensors' name
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return prod(self.shape) * ITEM_BYTES[self.code]

    def before(self) -> bytes:
        """Returns the bytes up to the first element, which is aligned."""
        small, _ = self._small
        name = f"{_ROOT}/data/0"
        sizes = struct.pack("<HHQQ", 1, 16, self.nbytes, self.nbytes)
        padding = -(len(small) + _LOCAL.size + len(name) + len(sizes) + 4) % _ALIGNMENT
        extra = sizes + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        return small + _local(name, _STREAMED, 0, _LARGE, extra)

    def after(self, crc: int) -> bytes:
        """Returns the bytes after the last element. `crc` is the elements' CRC-32; it does not change their number."""
        small, central = self._small
        descriptor = struct.pack("<IIQQ", 0x08074B50, crc, self.nbytes, self.nbytes)
        entry = _central(
            f"{_ROOT}/data/0", _STREAMED, crc, _LARGE, len(small), struct.pack("<HHQQ", 1, 16, self.nbytes, self.nbytes)
        )
        directory_offset = len(self.before()) + self.nbytes + len(descriptor)
        return descriptor + _directory([*central, entry], directory_offset)

    @cached_property
    def _small(self) -> tuple[bytes, list[bytes]]:
        return _records(_tensor_pickle(self.code, self.shape))


def pickle_archive(pickled: bytes) -> bytes:
    """Returns what torch.save makes of an object without tensors."""
    records, central = _records(pickled)
    return records + _directory(central, len(records))


def _records(pickled: bytes) -> tuple[bytes, list[bytes]]:
    """Returns the first records of every archive, and their entries in its directory."""
    records = b""
    central = []
    for name, data in ((f"{_ROOT}/data.pkl", pickled), (f"{_ROOT}/byteorder", b"little"), (f"{_ROOT}/version", b"3\n")):
        central.append(_central(name, 0, crc32(data), len(data), len(records), b""))
        records += _local(name, 0, crc32(data), len(data), b"") + data
    return records, central


def _directory(central: list[bytes], at: int) -> bytes:
    """Returns the end of an archive: the entries, which begin at byte `at`, and their location."""
    entries = b"".join(central)
    count = len(central)
    large = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, len(entries), at)
    locator = struct.pack("<IIQI", 0x07064B50, 0, at + len(entries), 1)
    return (
        entries
        + large
        + locator
        + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, len(entries), min(at, _LARGE), 0)
    )


def _local(name: str, flags: int, crc: int, size: int, extra: bytes) -> bytes:
    fields = _LOCAL.pack(0x04034B50, 45 if extra else 20, flags, 0, 0, 0, crc, size, size, len(name), len(extra))
    return fields + name.encode() + extra


def _central(name: str, flags: int, crc: int, size: int, at: int, extra: bytes) -> bytes:
    version = 20
    if extra:
        version = 45
    fields = _CENTRAL.pack(
        0x02014B50, version, version, flags, 0, 0, 0, crc, size, size, len(name), len(extra), 0, 0, 0, 0, at
    )
    return fields + name.encode() + extra


def _tensor_pickle(code: str, shape: tuple[int, ...]) -> bytes:
    """Returns the pickle of a call of `torch._utils._rebuild_tensor_v2` on the storage `data/0`."""
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    storage = Persistent(("storage", Named("torch", STORAGES[code]), "0", "cpu", prod(shape)))
    hooks = Named("collections", "OrderedDict", ())
    return write_pickle(Named("torch._utils", "_rebuild_tensor_v2", (storage, 0, shape, strides, False, hooks)))
