"""Files written past the cache have every byte, on file systems that know direct writes and on those that do not."""

import errno
import fcntl
import os

import numpy as np
import pytest

from mrl.checkpoint import safetensors_file
from mrl.checkpoint.safetensors_file import BUFFER_BYTES, DirectFile

SIZES = [0, 1, 4095, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, 5 * BUFFER_BYTES + 17]


def some_bytes(size: int) -> bytes:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()


def write(path, data: bytes, block: int = 1_000_003, durable: bool = False) -> int:
    """Through one array that is overwritten after each write, as readers do."""
    scratch = np.empty(block, np.uint8)
    with DirectFile(path) as out:
        for begin in range(0, len(data), block):
            part = np.frombuffer(data[begin : begin + block], np.uint8)
            scratch[: len(part)] = part
            out.write(memoryview(scratch[: len(part)]))
        out.finish(durable)
    return out.size


@pytest.mark.parametrize("size", SIZES)
def test_every_byte_is_there(tmp_path, size):
    data = some_bytes(size)
    (tmp_path / "a").write_bytes(b"something longer that was there before" * 9)
    assert write(tmp_path / "a", data, durable=True) == size
    assert (tmp_path / "a").read_bytes() == data


def test_one_write_may_be_longer_than_all_buffers(tmp_path):
    data = some_bytes(SIZES[-1])
    assert write(tmp_path / "a", data, block=len(data)) == len(data)
    assert (tmp_path / "a").read_bytes() == data


UNKNOWN = [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS]  # what file systems say of direct writes


@pytest.mark.parametrize("number", UNKNOWN)
def test_a_file_system_without_direct_writes_is_written_through_the_cache(tmp_path, monkeypatch, number):
    real = fcntl.fcntl

    def refuses(handle, command, flags=0):
        if flags & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return real(handle, command, flags)

    monkeypatch.setattr(safetensors_file.fcntl, "fcntl", refuses)
    data = some_bytes(SIZES[-1])
    write(tmp_path / "a", data)
    assert (tmp_path / "a").read_bytes() == data


@pytest.mark.parametrize("number", UNKNOWN)
def test_a_file_system_that_refuses_the_writes_only_is_too(tmp_path, monkeypatch, number):
    real, refused = os.pwrite, []

    def refuses(handle, view, at):
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(at)
            raise OSError(number, os.strerror(number))
        return real(handle, view, at)

    monkeypatch.setattr(safetensors_file.os, "pwrite", refuses)
    data = some_bytes(SIZES[-1])
    write(tmp_path / "a", data)
    assert (tmp_path / "a").read_bytes() == data
    assert refused


def test_writes_that_take_less_than_they_are_given_are_gone_on_with(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(safetensors_file.os, "pwrite", lambda handle, view, at: real(handle, view[:1_234_567], at))
    data = some_bytes(SIZES[-1])
    write(tmp_path / "a", data)
    assert (tmp_path / "a").read_bytes() == data


@pytest.mark.parametrize("failing", [0, 4 * BUFFER_BYTES])
def test_a_full_disk_is_told_by_a_later_write_or_at_the_end(tmp_path, monkeypatch, failing):
    real = os.pwrite

    def full(handle, view, at):
        if at == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, view, at)

    monkeypatch.setattr(safetensors_file.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "a", some_bytes(SIZES[-1]))


def test_an_error_of_the_disk_is_not_taken_for_a_file_system_without_direct_writes(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(safetensors_file.os, "pwrite", fails)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "a", some_bytes(BUFFER_BYTES))


@pytest.mark.timeout(20)
def test_a_file_system_that_takes_no_bytes_and_names_no_reason_is_not_asked_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_file.os, "pwrite", lambda handle, view, at: 0)
    with pytest.raises(OSError, match=f"writes none of {BUFFER_BYTES} bytes"):
        write(tmp_path / "a", some_bytes(BUFFER_BYTES))
