"""Measures a device's best rate of computation: that of a large matrix product."""

import time

import torch

from mrl.platforms import Platform

SIZE = {"cpu": 1024}  # rows and columns; small enough for a core, large enough that memory does not matter
_ACCELERATOR_SIZE = 4096  # three matrices of 32 MiB in bfloat16
_AT_ONCE = {"cpu": 1}
_ACCELERATOR_AT_ONCE = 16  # waiting for the device costs as much as a product


def product_rate(platform: Platform, dtype: torch.dtype, threads: int | None = None, seconds: float = 0.2) -> float:
    """Returns the FLOP/s of the fastest square product within `seconds`, of at least three.

    `threads` is the number of host threads, for the CPU alone, and is restored afterwards. The device's generator is
    not used.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        return _fastest(platform, dtype, seconds)
    finally:
        torch.set_num_threads(before)


def _fastest(platform: Platform, dtype: torch.dtype, seconds: float) -> float:
    size = SIZE.get(platform.name, _ACCELERATOR_SIZE)
    at_once = _AT_ONCE.get(platform.name, _ACCELERATOR_AT_ONCE)
    generator = torch.Generator().manual_seed(0)  # zeros are multiplied faster than weights
    left, right = (torch.randn(size, size, generator=generator).to(platform.device, dtype) for _ in range(2))
    out = torch.empty_like(left)
    best = float("inf")
    end = time.perf_counter() + seconds
    for number in range(1000):
        platform.synchronize()
        began = time.perf_counter()
        for _ in range(at_once):
            torch.mm(left, right, out=out)
        platform.synchronize()
        best = min(best, time.perf_counter() - began)
        if number >= 3 and time.perf_counter() > end:
            break
    return 2.0 * size**3 * at_once / best
