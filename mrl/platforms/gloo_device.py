"""Groups of gloo that share what a process listens with.

torch gives each group a device of its own, and gloo each device a thread that wakes a hundred times a second whether or
not anything came. Megatron makes a hundred groups, so a rank that waits was woken ten thousand times a second.
"""

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

INTERFACES = "GLOO_SOCKET_IFNAME"  # names with commas, which torch reads for each group
_THREADS = 2  # for each device, as torch has them


def share() -> None:
    """Lets groups of this process share their devices from here on; a second call changes nothing."""
    if distributed_c10d.ProcessGroupGloo is dist.ProcessGroupGloo:
        distributed_c10d.ProcessGroupGloo = sharing(distributed_c10d.ProcessGroupGloo)


def sharing(original: type) -> type:
    """What stands in for the class of groups where torch makes them and asks whether a group is one of them."""

    class _Sharing(type):
        def __call__(cls, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
            options = original._Options()
            options._timeout = timeout
            options._devices = _devices(original)
            options._threads = _THREADS * len(options._devices)
            return original(store, rank, size, options)

        def __instancecheck__(cls, group: Any) -> bool:
            return isinstance(group, original)

        def __getattr__(cls, name: str) -> Any:
            return getattr(original, name)

    return _Sharing("ProcessGroupGloo", (), {})


@cache
def _devices(original: type) -> list[Any]:
    names = os.environ.get(INTERFACES)
    if not names:
        return [original.create_default_device()]
    return [original.create_device(interface=name) for name in names.split(",")]
