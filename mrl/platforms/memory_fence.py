"""Order in memory that processes share without a lock: data, and then the word that says that it is there."""

from threading import Lock

_LOCK = Lock()


def memory_fence() -> None:
    """Orders what was written or read before against what comes after, on every architecture.

    x86 keeps the order of writes by itself; ARM does not, neither of writes nor of reads.
    """
    for _ in range(2):
        with _LOCK:
            pass
