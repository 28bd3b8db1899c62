"""Limits what a scoring process can use of the machine: selected variables, no network by default, few writable
folders.

Only Linux lets an unprivileged process give these up (seccomp, Landlock), on processors whose system calls are known
here. Elsewhere the log of rewards says what is not limited. Local sockets (AF_UNIX) and reading stay allowed. Writable
are temporary folders and those that the run names.
"""

import ctypes
import os
import platform
import struct
import sys
import tempfile
from collections.abc import Mapping
from fnmatch import fnmatchcase

# Names or patterns of variables that programs need to start, find files and be quiet; keys and tokens are excluded.
GIVEN = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "PYTHON*", "VIRTUAL_ENV",
    "CONDA_PREFIX", "LD_LIBRARY_PATH", "DYLD_*", "OMP_*", "MKL_*", "OPENBLAS_*", "TOKENIZERS_PARALLELISM", "HF_HOME",
    "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME", "NLTK_DATA", "MRL_*",
)  # fmt: skip
OFF = "reward functions have no network without reward.network: true, and write into temporary and reward.folders alone"
NETWORK_STAYS = "this machine cannot deny reward functions the network, so they have it"
WRITING_STAYS = "this machine cannot keep reward functions from writing files, so they write whatever their user may"

_SYSTEM_CALLS = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}  # audit number, socket(2)
_IO_URING_SETUP = 425
_X32 = 0x40000000
_AF_UNIX = 1
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
# Landlock's calls, on every processor
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_BENEATH = 1
_VERSION = 1
# Rights to write, remove or create files of any kind; and, by version, to link them elsewhere and to truncate them.
_WRITES = 0b1_1111_1111_0010 & ~0b1100
KEEPS_WHOLE = 3  # version of Landlock from which it can refuse truncation: Linux 6.2
_LATER_WRITES = ((2, 1 << 13), (KEEPS_WHOLE, 1 << 14))
_CAPABILITIES = 0x20080522  # version 3 of capset(2)
_SIGHT = (19, 21, 38)  # SYS_PTRACE, SYS_ADMIN, PERFMON
# classic BPF
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_RETURN = 0x06
# deny with EACCES
_ALLOW = 0x7FFF0000
_DENY = 0x00050000 | 13


def given_environment(own: Mapping[str, str], further: tuple[str, ...]) -> dict[str, str]:
    """Returns those of these variables that match a name or pattern of GIVEN or of the run."""
    wanted = (*GIVEN, *further)
    return {name: value for name, value in own.items() if any(fnmatchcase(name, each) for each in wanted)}


def without_network() -> bool:
    """Refuses this process, and all that it starts, every socket except local ones. Returns whether this succeeded.

    It cannot be undone.
    """
    numbers = _SYSTEM_CALLS.get(platform.machine())
    if numbers is None:
        return False
    return filter_calls(_rules(*numbers))


def filter_calls(rules: bytes) -> bool:
    """Installs a filter of system calls (seccomp(2)) for this process and all that it starts. Returns whether this
    succeeded.

    `rules`: classic BPF, eight bytes for each instruction. It cannot be undone.
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
    """Refuses this process, and all that it starts, changes to files outside temporary folders, /dev and `folders`.

    Returns whether this succeeded. It cannot be undone. Landlock before version KEEPS_WHOLE refuses what it can, but
    cannot refuse truncation; then the result is False.
    """
    version = landlock_version()
    writes = _WRITES | sum(access for since, access in _LATER_WRITES if version >= since)
    writable = {tempfile.gettempdir(), "/dev", *folders}
    kept = keep_files(writes, {folder: writes for folder in writable if os.path.isdir(folder)})
    return kept and version >= KEEPS_WHOLE


def without_sight() -> None:
    """Gives up the rights of root to look into other processes (capabilities(7)). It cannot be undone.

    With them a process reads memory and variables of any other, Landlock or not. Without them it reads those of its
    user's, or with Landlock those of processes that it started alone.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0)
    rights = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable of the lower 32, then of the upper 32
    if libc.capget(header, rights):
        return
    for number in _SIGHT:
        for kind in range(3):
            rights[3 * (number // 32) + kind] &= ~(1 << number % 32)
    libc.capset(header, rights)


def landlock_version() -> int:
    """Returns the version of Landlock on this host; below 1: none."""
    if sys.platform != "linux":
        return 0
    return ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)


def keep_files(refused: int, allowed: Mapping[str, int]) -> bool:
    """Refuses this process, and all that it starts, kinds of access to files (landlock(7)). Returns whether this
    succeeded.

    `refused`: bits that this version of Landlock knows. `allowed`: bits that remain at and below an existing path. It
    cannot be undone.
    """
    if landlock_version() < 1:
        return False
    libc = ctypes.CDLL(None)
    attributes = struct.pack("Q", refused)
    rules = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return False
    for path, access in allowed.items():
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        libc.syscall(_ADD_RULE, rules, _BENEATH, struct.pack("=Qi", access, handle), 0)
        os.close(handle)
    done = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and libc.syscall(_RESTRICT_SELF, rules, 0) == 0
    os.close(rules)
    return done


def _rules(audit: int, socket: int) -> bytes:
    """Returns the instructions of a filter: (code, jump if true, jump if false, number), one after another."""
    lines = [
        (_LOAD, 0, 0, 4),  # the processor's kind; programs for another kind have other call numbers
        (_EQUAL, 0, 7, audit),
        (_LOAD, 0, 0, 0),  # the number of the call
        (_AT_LEAST, 5, 0, _X32),
        (_EQUAL, 4, 0, _IO_URING_SETUP),  # it opens sockets too
        (_EQUAL, 0, 2, socket),
        (_LOAD, 0, 0, 16),  # its first argument
        (_EQUAL, 0, 1, _AF_UNIX),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)
