"""Lets gloo groups of a process share their devices.

torch makes a device for each group, and gloo starts a thread for each device. It wakes a hundred times a second, even
without messages. Megatron makes a hundred groups, so a waiting rank was woken ten thousand times a second.
"""

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

INTERFACES = "GLOO_SOCKET_IFNAME"  # comma-separated names, which torch reads for each group
_THREADS = 2  # for each device, as in torch


def share() -> None:
    """Makes all later groups of this process share their devices. A second call changes nothing."""
    if distributed_c10d.ProcessGroupGloo is dist.ProcessGroupGloo:
        distributed_c10d.ProcessGroupGloo = sharing(distributed_c10d.ProcessGroupGloo)


def sharing(original: type) -> type:
    """Returns a stand-in for the class of groups. torch uses it to make groups and to check their type."""

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
