"""Wakes a worker of vllm-ascend 0.23 without the further things that its own `wake_up` does.

Its `wake_up` replaces each layer's `w13_weight` and `w2_weight` by a transposed view. It assumes that a reload of whole
tensors follows; pull request 13012 of vllm-project/vllm-ascend later removed this. The kernel would then read experts
transposed, and an in-place update would be written transposed. So the allocator is called directly here, and buffers
are put back as the worker's own code does. Written against release v0.23.0, and never run on hardware. A worker with
other source code is refused before it sleeps.
"""

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from mrl.engine.engine_state import WEIGHTS

# SHA-256 of the sources of NPUWorker.sleep and .wake_up (vllm_ascend/worker/worker.py) and CaMemAllocator.wake_up
# (vllm_ascend/device_allocator/camem.py), one after the other; the same from v0.23.0rc1 to the end of that release
KNOWN_SOURCE = "91aa42257a7cc97ae099ff9264116ca150cfdd4c4eda40fab0475115c0f45ff2"
CLEANUP = "enable_sleep_mode_extra_cleanup"  # a key of vllm-ascend's additional_config


def is_ascend(worker: Any) -> bool:
    """Returns whether a worker is vllm-ascend's."""
    return any(kind.__module__.startswith("vllm_ascend.") for kind in type(worker).__mro__)


def pool() -> Any:
    """Returns the allocator of the memory that can sleep."""
    from vllm_ascend.device_allocator.camem import CaMemAllocator

    return CaMemAllocator.get_instance()


def check_worker(worker: Any) -> None:
    """Raises RuntimeError for a worker that must not sleep, because `wake` would not undo its sleep."""
    digest = source_digest(type(worker).sleep, type(worker).wake_up, type(pool()).wake_up)
    if digest != KNOWN_SOURCE:
        raise RuntimeError(
            f"this vllm-ascend sleeps or wakes differently from release v0.23.0 (sources {digest[:12]}, known "
            f"{KNOWN_SOURCE[:12]}); install that release, or use cluster.placement: separate"
        )
    if (worker.vllm_config.additional_config or {}).get(CLEANUP):
        raise RuntimeError(
            f"{CLEANUP} takes communicators and graphs apart, which only vllm-ascend's own wake "
            "puts together; leave it off"
        )


def wake(worker: Any, part: str) -> None:
    """Maps the memory of `part` again, at its old addresses. With weights it restores the buffers that the sleep
    saved.
    """
    pool().wake_up(tags=[part])
    if part == WEIGHTS:
        _restore_buffers(worker)


def source_digest(*functions: Callable) -> str:
    """Returns the SHA-256 of the functions' source code."""
    return hashlib.sha256("".join(map(inspect.getsource, functions)).encode()).hexdigest()


@torch.no_grad()
def _restore_buffers(worker: Any) -> None:
    saved = worker._sleep_saved_buffers
    for name, buffer in worker.model_runner.model.named_buffers():
        if name in saved:
            buffer.copy_(saved[name])
    worker._sleep_saved_buffers = {}
