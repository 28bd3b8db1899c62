"""Order in memory that processes share without a lock: data, and then the word that says that it is there."""

from threading import Lock

_LOCK = Lock()


def memory_fence() -> None:
    """Orders what was written or read before against what comes after, on x86 and on ARMv8.

    x86 keeps the order of writes by itself; ARM does not, neither of writes nor of reads. Nothing sinks below the
    release of a lock, and nothing rises above its taking. Of one lock both may slip in between, and change places
    there. Two times are enough: the first release and the second taking stand between them. ARMv8 runs a release and a
    taking after it in order, as x86 runs all that is locked. Devices are used on hosts of these two alone.
    """
    for _ in range(2):
        with _LOCK:
            pass
