"""What a scoring process is given of the machine: variables by name, no network unless the run asks for it, and
temporary folders, with those that the run names, to write into.

Linux alone can take these away from a process without rights (seccomp, Landlock), on processors whose system calls are
known here; elsewhere the log of rewards says what is on. Sockets of this machine's own (AF_UNIX) stay, and so does
reading.
"""

import ctypes
import os
import platform
import struct
import sys
import tempfile
from collections.abc import Mapping
from fnmatch import fnmatchcase

# Names, or patterns, of what programs need to start, to find files and to be quiet; keys and tokens are not among them.
GIVEN = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "PYTHON*", "VIRTUAL_ENV",
    "CONDA_PREFIX", "LD_LIBRARY_PATH", "DYLD_*", "OMP_*", "MKL_*", "OPENBLAS_*", "TOKENIZERS_PARALLELISM", "HF_HOME",
    "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME", "NLTK_DATA", "MRL_*",
)  # fmt: skip
OFF = "reward functions have no network without reward.network: true, and write into temporary and reward.folders alone"
NETWORK_STAYS = "the network cannot be taken from reward functions on this machine, and is on for them"
WRITING_STAYS = "files cannot be taken from reward functions on this machine, which may write whatever its user may"

_SYSTEM_CALLS = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}  # audit number, socket(2)
_IO_URING_SETUP = 425
_X32 = 0x40000000
_AF_UNIX = 1
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
# of Landlock, on every processor
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_BENEATH = 1
_VERSION = 1
# To write, remove or make files of any kind; then, by version, to link them elsewhere and to cut them short.
_WRITES = 0b1_1111_1111_0010 & ~0b1100
KEEPS_WHOLE = 3  # the version of Landlock since which it refuses to empty a file: Linux 6.2
_LATER_WRITES = ((2, 1 << 13), (KEEPS_WHOLE, 1 << 14))
# of classic BPF
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_RETURN = 0x06
# the latter with EACCES
_ALLOW = 0x7FFF0000
_DENY = 0x00050000 | 13


def given_environment(own: Mapping[str, str], further: tuple[str, ...]) -> dict[str, str]:
    """Keeps those of these variables that GIVEN or the run names, as a pattern or in full."""
    wanted = (*GIVEN, *further)
    return {name: value for name, value in own.items() if any(fnmatchcase(name, each) for each in wanted)}


def without_network() -> bool:
    """Refuses this process, and all that it starts, every socket but those of this machine's own; whether it could.

    There is no way back.
    """
    numbers = _SYSTEM_CALLS.get(platform.machine())
    if numbers is None:
        return False
    return filter_calls(_rules(*numbers))


def filter_calls(rules: bytes) -> bool:
    """Puts a filter of system calls (seccomp(2)) over this process and all that it starts; whether it could.

    `rules`: classic BPF, eight bytes an instruction. There is no way back.
    """
    if sys.platform != "linux":
        return False
    program = ctypes.create_string_buffer(rules)
    described = struct.pack("HL", len(rules) // 8, ctypes.addressof(program))
    libc = ctypes.CDLL(None)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    return libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described, 0, 0) == 0


def without_writing(folders: tuple[str, ...]) -> bool:
    """Refuses this process, and all that it starts, every change to files but below temporary folders, /dev and
    `folders`; whether it could. There is no way back.

    Landlock before version KEEPS_WHOLE refuses what it can, and lets files be emptied: the answer is no.
    """
    version = landlock_version()
    writes = _WRITES | sum(access for since, access in _LATER_WRITES if version >= since)
    places = {tempfile.gettempdir(), "/dev", *folders}
    kept = keep_files(writes, {folder: writes for folder in places if os.path.isdir(folder)})
    return kept and version >= KEEPS_WHOLE


def landlock_version() -> int:
    """Version of Landlock that this host has; below 1: none."""
    if sys.platform != "linux":
        return 0
    return ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)


def keep_files(refused: int, allowed: Mapping[str, int]) -> bool:
    """Refuses this process, and all that it starts, kinds of access to files (landlock(7)); whether it could.

    `refused`: bits that this version of Landlock knows. `allowed`: bits that stay at, and below, a path that is there.
    There is no way back.
    """
    if landlock_version() < 1:
        return False
    libc = ctypes.CDLL(None)
    attributes = struct.pack("Q", refused)
    rules = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return False
    for place, access in allowed.items():
        handle = os.open(place, os.O_PATH | os.O_CLOEXEC)
        libc.syscall(_ADD_RULE, rules, _BENEATH, struct.pack("=Qi", access, handle), 0)
        os.close(handle)
    done = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and libc.syscall(_RESTRICT_SELF, rules, 0) == 0
    os.close(rules)
    return done


def _rules(audit: int, socket: int) -> bytes:
    """Instructions of a filter: (code, jump if so, jump if not, number) one after another."""
    lines = [
        (_LOAD, 0, 0, 4),  # the processor's kind; a program of another kind has other numbers
        (_EQUAL, 0, 7, audit),
        (_LOAD, 0, 0, 0),  # the number of the call
        (_AT_LEAST, 5, 0, _X32),
        (_EQUAL, 4, 0, _IO_URING_SETUP),  # which opens sockets too
        (_EQUAL, 0, 2, socket),
        (_LOAD, 0, 0, 16),  # its first argument
        (_EQUAL, 0, 1, _AF_UNIX),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)
