"""The system calls that a sandboxed program may make: for one process with one thread that computes and uses files.

Everything else is refused, including calls of later kernels. So there are no sockets, no other processes or threads, no
started programs, and no access to other processes. Files cannot be removed, renamed or created without a name. No call
can circumvent the limits of this one process.
"""

import struct
from collections.abc import Iterator, Sequence

# by machine: the audit number of its calls, and the column of ALLOWED
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# name: number on x86_64 and on aarch64; None if it does not exist
ALLOWED: dict[str, tuple[int, int | None]] = {
    # open descriptors, and new ones without a file
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "pread64": (17, 67),
    "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "preadv": (295, 69), "pwritev": (296, 70),
    "preadv2": (327, 286), "pwritev2": (328, 287), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "flock": (73, 32), "fsync": (74, 82), "fdatasync": (75, 83), "ftruncate": (77, 46), "fadvise64": (221, 223),
    "sendfile": (40, 71), "copy_file_range": (326, 285), "fstatfs": (138, 44), "close_range": (436, 436),
    "getdents": (78, None), "getdents64": (217, 61), "pipe": (22, None), "pipe2": (293, 59), "poll": (7, None),
    "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create": (213, None),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "eventfd2": (290, 19),
    # files by name; Landlock decides which may be opened
    "stat": (4, None), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291), "statfs": (137, 43),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "creat": (85, None),
    "readlink": (89, None), "readlinkat": (267, 78), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50),
    "umask": (95, 166),
    # memory
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "msync": (26, 227), "madvise": (28, 233),
    # its own signals and timers
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "pause": (34, None),
    "getitimer": (36, 102), "setitimer": (38, 103), "alarm": (37, None), "restart_syscall": (219, 128),
    # time, random numbers, and facts about itself
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrandom": (318, 278), "uname": (63, 160),
    "sysinfo": (99, 179), "getrusage": (98, 165), "getrlimit": (97, 163), "setrlimit": (160, 164),
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getpgrp": (111, None), "getpgid": (121, 155),
    "getsid": (124, 156), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177),
    "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158), "getpriority": (140, 141),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getcpu": (309, 168),
    # threads (it has none), and its end
    "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293), "wait4": (61, 260), "exit": (60, 93),
    "exit_group": (231, 94),
}  # fmt: skip
# name: numbers, the argument to check, and its allowed values
CHECKED: dict[str, tuple[tuple[int, int | None], int, tuple[int, ...]]] = {
    # cmd: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, locks, F_DUPFD_CLOEXEC; F_SETOWN could signal other processes
    "fcntl": ((72, 25), 1, (0, 1, 2, 3, 4, 5, 6, 7, 1030)),
    # request: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl": ((16, 29), 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
    "prlimit64": ((302, 261), 0, (0,)),  # its own limits
}
# name: numbers, the argument with the flags
OPENING: dict[str, tuple[tuple[int, int | None], int]] = {"open": ((2, None), 1), "openat": ((257, 56), 2)}
# What processes of a sandbox may not do, where everything else may be done: administer the kernel, mount, enter
# namespaces, and use interfaces that are not part of any namespace.
ADMINISTRATION: dict[str, tuple[int, int | None]] = {
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "open_tree_attr": (467, 467), "unshare": (272, 97), "setns": (308, 268),
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "syslog": (103, 116),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262), "vhangup": (153, 58),
    "iopl": (172, None), "ioperm": (173, None), "lookup_dcookie": (212, 18),
}  # fmt: skip
_SOCKET = (41, 198)
_FAMILIES = (1, 2, 10, 16)  # of sockets: local ones, IPv4, IPv6, and netlink, which looks at interfaces
_X32 = 0x40000000
SIGNALS = {"kill": (62, 129), "tgkill": (234, 131)}  # to this process
_O_TMPFILE = 0o20000000  # a file without a name, which nobody would find

_NEITHER = 3  # access neither for reading nor writing, which Landlock allows, although O_TRUNC empties the file

_LOAD = 0x20
_AND = 0x54
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_DENY = 0x00050000 | 13  # EACCES

# code, target if true and if false (None: the next instruction), number
Line = tuple[int, str | None, str | None, int]


def rules(machine: str, process: int) -> bytes | None:
    """Returns the filter for this process, for mrl.reward.confine.filter_calls; None if calls of the machine are
    unknown.
    """
    if machine not in MACHINES:
        return None
    audit, column = MACHINES[machine]
    blocks: dict[str, list[Line]] = {"start": [(_LOAD, None, None, 4), (_EQUAL, None, "deny", audit)]}
    blocks["start"] += [(_LOAD, None, None, 0), *_by_number(column)]
    for name, (_, argument, values) in CHECKED.items():
        blocks[name] = _one_of(argument, values)
    for name in SIGNALS:
        blocks[name] = _one_of(0, (process,))
    for name, (_, argument) in OPENING.items():
        blocks[name] = [
            _argument(argument),
            (_ANY_BIT, "deny", None, _O_TMPFILE),
            (_AND, None, None, _NEITHER),
            (_EQUAL, "deny", "allow", _NEITHER),
        ]
    blocks["allow"] = [(_RETURN, None, None, _ALLOW)]
    blocks["deny"] = [(_RETURN, None, None, _DENY)]
    return _assembled(blocks)


def without_administration(machine: str) -> bytes:
    """Returns the filter of processes in a sandbox, which may be many. Raises KeyError for an unknown machine."""
    audit, column = MACHINES[machine]
    blocks: dict[str, list[Line]] = {
        "start": [(_LOAD, None, None, 4), (_EQUAL, None, "deny", audit), (_LOAD, None, None, 0)],
        "socket": [
            _argument(0),
            *((_EQUAL, "allow", None, family) for family in _FAMILIES),
            (_RETURN, None, None, _DENY),
        ],
        "allow": [(_RETURN, None, None, _ALLOW)],
        "deny": [(_RETURN, None, None, _DENY)],
    }
    refused = [numbers[column] for numbers in ADMINISTRATION.values() if numbers[column] is not None]
    blocks["start"] += [(_AT_LEAST, "deny", None, _X32), (_EQUAL, "socket", None, _SOCKET[column])]
    blocks["start"] += [*((_EQUAL, "deny", None, number) for number in refused), (_RETURN, None, None, _ALLOW)]
    return _assembled(blocks)


def _by_number(column: int) -> Iterator[Line]:
    """Yields comparisons of the loaded call number."""
    looked_at = {name: numbers for name, (numbers, *_) in (CHECKED | OPENING).items()} | SIGNALS
    for name, numbers in looked_at.items():
        if numbers[column] is not None:
            yield _EQUAL, name, None, numbers[column]
    for numbers in ALLOWED.values():
        if numbers[column] is not None:
            yield _EQUAL, "allow", None, numbers[column]
    yield _RETURN, None, None, _DENY


def _one_of(argument: int, values: Sequence[int]) -> list[Line]:
    tests: list[Line] = [(_EQUAL, "allow", None, value) for value in values]
    return [_argument(argument), *tests, (_RETURN, None, None, _DENY)]


def _argument(number: int) -> Line:
    """Loads the lower half of an argument, which both machines store first."""
    return _LOAD, None, None, 16 + 8 * number


def _assembled(blocks: dict[str, list[Line]]) -> bytes:
    """Concatenates instructions, and turns names of blocks into relative jumps."""
    begins = {}
    lines: list[Line] = []
    for name, block in blocks.items():
        begins[name] = len(lines)
        lines += block
    packed = []
    for at, (code, so, otherwise, number) in enumerate(lines):
        jumps = [0 if name is None else begins[name] - at - 1 for name in (so, otherwise)]
        packed.append(struct.pack("HBBI", code, *jumps, number))
    return b"".join(packed)
