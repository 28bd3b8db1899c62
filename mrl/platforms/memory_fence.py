"""Orders writes to memory that processes share without a lock: data first, then the word that announces it."""

from threading import Lock

_LOCK = Lock()


def memory_fence() -> None:
    """Orders all earlier reads and writes before all later ones, on x86 and ARMv8.

    x86 keeps writes in order by itself. ARM keeps neither writes nor reads in order. No access moves below the release
    of a lock or above its acquisition. With one lock, both neighbours may move in between and change their order there.
    With two, the first release and the second acquisition separate them. ARMv8 keeps a release and a later acquisition
    in order, and x86 keeps all locked operations in order. mrl supports hosts of these two kinds alone.
    """
    for _ in range(2):
        with _LOCK:
            pass
