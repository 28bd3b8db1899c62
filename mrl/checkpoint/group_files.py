"""One attempt at a group as a file: the columns of its responses, and its rewards. Equal groups give equal bytes.

    group-17.2.npz    group 17, which began again twice before
      *.npy           large columns of the responses that have tokens, as they travel through a run
      small.npy       the other columns, one behind the other
      record.npy      number, attempt, rewards and what is in small.npy, as JSON

Tokens, rewards and attempt form one record with one digest, so parts of different attempts cannot be mixed. A file
appears completely or not at all and never changes afterwards. If it was written before, a checkpoint gets a hard link,
and its bytes are on the disk once.
"""

import io
import json
import math
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mrl.checkpoint.manifest import file_facts, fsync
from mrl.data.samples import NO_ENGINE, Samples
from mrl.reward.items import RewardResult
from mrl.whole_file import appears_whole

RECORD = "record"
SMALL = "small"
_ENGINE = "engine"  # a column that is left out: it depends on which engine was free, and equal groups have equal bytes
_IMAGES = "image_names"  # a column of Samples
SMALL_BYTES = 2048  # of a column; a member of its own costs more than its bytes
TRIED_BYTES = 64 * 1024  # of a column, from its middle, to see whether compression helps
WORTH = 0.8  # share of its bytes; a column that compresses less is stored uncompressed, at the disk's speed


@dataclass(frozen=True)
class GroupRecord:
    """One attempt at a group."""

    number: int
    attempt: int  # how often it began again before
    samples: Samples | None  # responses with tokens, `sample_id` being the index in the group; None: there are none
    results: Mapping[int, RewardResult]  # by index, for judged responses


GROUPS = "group-*.npz"  # names of all such files


def group_file(number: int, attempt: int) -> str:
    """Returns the file name of one attempt."""
    return f"group-{number}.{attempt}.npz"


def write_group(path: Path, record: GroupRecord) -> dict[str, Any]:
    """Writes `path` durably. Returns its size and digest."""
    with appears_whole(path) as work:
        with zipfile.ZipFile(work, "w") as archive:
            for name, column in _members(record).items():
                _add(archive, name, column)
        return file_facts(work)


def _members(record: GroupRecord) -> dict[str, np.ndarray]:
    columns = {} if record.samples is None else record.samples.arrays
    columns.pop(_ENGINE, None)
    small = {name: column for name, column in columns.items() if column.nbytes <= SMALL_BYTES}
    described = {
        "number": record.number,
        "attempt": record.attempt,
        "results": [[index, vars(record.results[index])] for index in sorted(record.results)],
        SMALL: [[name, column.dtype.str, column.shape] for name, column in small.items()],
    }
    joined = b"".join(column.tobytes() for column in small.values())
    members = {RECORD: np.frombuffer(json.dumps(described).encode(), np.uint8)}
    if small:
        members[SMALL] = np.frombuffer(joined, np.uint8)
    return members | {name: column for name, column in columns.items() if name not in small}


def _add(archive: zipfile.ZipFile, name: str, column: np.ndarray) -> None:
    """Appends one column in numpy's format, compressed if that saves a fifth."""
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(column), allow_pickle=False)
    data = file.getbuffer()
    first = max(0, len(data) // 2 - TRIED_BYTES // 2)
    tried = data[first : first + TRIED_BYTES]
    how = zipfile.ZIP_DEFLATED if len(zlib.compress(tried, 1)) < WORTH * len(tried) else zipfile.ZIP_STORED
    archive.writestr(zipfile.ZipInfo(f"{name}.npy"), data, how, compresslevel=1)


def read_group(path: Path) -> GroupRecord:
    """Reads what `write_group` wrote."""
    with np.load(path) as file:
        columns = dict(file)
    described = json.loads(columns.pop(RECORD).tobytes())
    results = {index: RewardResult(**result) for index, result in described["results"]}
    columns |= _small(described[SMALL], columns.pop(SMALL, np.empty(0, np.uint8)).tobytes())
    samples = None
    if columns:
        nobody = np.full(len(columns["sample_id"]), NO_ENGINE, np.int16)
        samples = Samples(**columns | {_ENGINE: nobody})
    return GroupRecord(described["number"], described["attempt"], samples, results)


def images_of_group(path: Path) -> frozenset[str]:
    """Returns the names of the images that responses of a group have. Reads no other column.

    Raises OSError, and ValueError or LookupError for a damaged file.
    """
    try:
        with np.load(path) as file:
            names = file[_IMAGES] if _IMAGES in file.files else None
            if names is None and SMALL in file.files:
                described = json.loads(file[RECORD].tobytes())
                names = _small(described[SMALL], file[SMALL].tobytes()).get(_IMAGES)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return frozenset() if names is None else frozenset(name.decode() for name in names.tolist())


def _small(described: Iterable[tuple[str, str, list[int]]], joined: bytes) -> dict[str, np.ndarray]:
    """The columns that were joined, in their order."""
    columns = {}
    offset = 0
    for name, dtype, shape in described:
        count = math.prod(shape)
        columns[name] = np.frombuffer(joined, dtype, count, offset).reshape(shape).copy()
        offset += columns[name].nbytes
    return columns


def name_again(written: Path, path: Path) -> None:
    """Links `path` to an existing file, or copies it if the disk has no hard links."""
    try:
        os.link(written, path)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(written, path)
        fsync(path)
