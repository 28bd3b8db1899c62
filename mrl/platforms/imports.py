"""Speeds up imports of large packages, and tells errors of those that only ranks can use."""

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

_OF_RANKS = ("torch.distributed", "torch.cuda", "torch_npu", "triton", "megatron")


def needs_ranks(error: BaseException) -> bool:
    """Tells whether an error comes from a device or a process group, which processes beside the ranks do not have."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return "same device" in str(error) or any(module.startswith(_OF_RANKS) for module in modules)


@contextmanager
def many_imports() -> Iterator[None]:
    """Suspends garbage collection during imports, where it takes a fifth of the time.

    An import makes about a million objects, and nearly all of them stay. So they are frozen: no later collection looks
    at them, and no process that is forked from this one copies them because of it. The few that are garbage stay, too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
