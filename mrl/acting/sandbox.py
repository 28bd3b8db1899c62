"""The process that runs one program of a model: it gives up all other rights and then runs it.

    python -c "from mrl.acting.sandbox import main; main()" LIMITS WATCHER REPORT      in its folder

Landlock removes access to files, except reading libraries, and reading and writing (not removing) in its own folder.
seccomp removes all calls outside of mrl.acting.system_calls. Rights of root are dropped. Limits restrict memory,
processor time and the size of files. Only one process with one thread remains, so its limits are limits of everything.
This needs no namespace, so it also works in containers. Uses the standard library and mrl.reward.confine only.
"""

import ctypes
import json
import math
import os
import platform
import resource
import runpy
import signal
import sys
import sysconfig
import traceback
from dataclasses import dataclass

from mrl.acting.system_calls import rules
from mrl.reward.confine import KEEPS_WHOLE, filter_calls, keep_files, landlock_version

CODE = "program.py"
MIB = 2**20
_OPEN_FILES = 64
# bits of Landlock, and the version that introduced more kinds of access
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_FOLDER = 1 << 3
_MAKE_FILE = 1 << 8
_CUT_FILE = 1 << 14
_KINDS = ((KEEPS_WHOLE, 15), (5, 16))
_PR_SET_PDEATHSIG = 1
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache")
_CAPABILITIES = 0x20080522  # version 3 of capset(2)


@dataclass(frozen=True)
class PythonLimits:
    """Limits of one program. Names are those of `rollout.turns.python`."""

    max_seconds: float = 5.0
    max_memory_gib: float = 1.0
    max_files_mib: float = 16.0
    unconfined: bool = False


def main() -> None:
    """Runs the program in the working directory.

    Arguments: the limits as JSON, the watching process, and a descriptor. On it this process reports what it could not
    give up. The program does not get that descriptor, so every exit status is its own.
    """
    limits = PythonLimits(**json.loads(sys.argv[1]))
    end_with(int(sys.argv[2]))
    report = int(sys.argv[3])
    fault = give_up(limits)
    if fault is not None and not limits.unconfined:
        os.write(report, fault.encode())
        os._exit(1)
    os.close(report)
    run()


def end_with(watcher: int) -> None:
    """Makes the kernel end this process when the watching process ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != watcher:  # it has already ended
        os._exit(1)


def give_up(limits: PythonLimits) -> str | None:
    """Gives up what the program must not have. Returns what could not be given up. It cannot be undone."""
    _limit(limits)
    if sys.platform != "linux":
        return "it needs Linux"
    calls = rules(platform.machine(), os.getpid())
    if calls is None:
        return f"system calls of the processor {platform.machine()} are not known here"
    version = landlock_version()
    if version < 1:
        return "the kernel has no Landlock, or it is off (CONFIG_SECURITY_LANDLOCK and lsm=landlock,...)"
    if version < KEEPS_WHOLE:
        return f"Landlock is of version {version} here, which lets files be emptied; Linux 6.2 has {KEEPS_WHOLE}"
    if not _drop_rights():
        return "rights of root stay with the process"
    if not keep_files((1 << max(bits for since, bits in _KINDS if version >= since)) - 1, _allowed_paths()):
        return "Landlock does not take files from a process"
    if not filter_calls(calls):
        return "seccomp does not take system calls from a process"
    return None


def _limit(limits: PythonLimits) -> None:
    """Sets hard limits, none above the present one."""
    seconds = math.ceil(limits.max_seconds) + 1  # the watcher ends it earlier, with a reason
    for kind, most in (
        (resource.RLIMIT_CPU, seconds),  # in case that nobody watches any more
        (resource.RLIMIT_AS, int(limits.max_memory_gib * 1024 * MIB)),
        (resource.RLIMIT_FSIZE, int(limits.max_files_mib * MIB)),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        own = resource.getrlimit(kind)[1]
        if own != resource.RLIM_INFINITY:
            most = min(most, own)
        resource.setrlimit(kind, (most, most))


def _drop_rights() -> bool:
    """Drops rights of root and returns whether this succeeded. Without such rights there is nothing to drop."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0)
    none = (ctypes.c_uint32 * 6)()
    return ctypes.CDLL(None).capset(header, none) == 0


def _allowed_paths() -> dict[str, int]:
    """Returns the remaining access by path: reading libraries, reading and writing the folder."""
    paths = sysconfig.get_paths()
    read = {paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    read |= {f"{sys.base_prefix}/lib", *_LIBRARIES}
    allowed = {path: _READ_FILE | (_READ_FOLDER if os.path.isdir(path) else 0) for path in read}
    allowed |= dict.fromkeys(_DEVICES, _READ_FILE)
    allowed["/dev/null"] |= _WRITE_FILE | _CUT_FILE
    allowed[os.getcwd()] = _READ_FILE | _READ_FOLDER | _WRITE_FILE | _MAKE_FILE | _CUT_FILE
    return {path: access for path, access in allowed.items() if os.path.exists(path)}


def run() -> None:
    """Runs the program as `__main__`. An exception is printed as Python does, with the program's own lines, and gives
    status 1.

    The program's own exit status is kept.
    """
    sys.argv[:] = [CODE]
    try:
        runpy.run_path(CODE, run_name="__main__")
    except Exception as error:
        lines = error.__traceback__
        while lines is not None and lines.tb_frame.f_code.co_filename != CODE:
            lines = lines.tb_next
        traceback.print_exception(error.with_traceback(lines))
        sys.exit(1)
