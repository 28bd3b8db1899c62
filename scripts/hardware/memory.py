"""Bytes: to the host and back, packed and unpacked, digested; the allocator under sizes that change."""

import os
import subprocess
import sys

from checks import Figures, Machine, Skip, check, expect

from mrl.units import MIB

SLOW_LINK = 8e9  # bytes per second; PCIe 4 gives 25, and host memory that is not pinned a few


@check(fast=True)
def host_copies(machine: Machine) -> Figures:
    """What an offload does: into the host memory that mrl keeps for it, and back."""
    import torch

    size = machine.size(1024 * MIB, 32 * MIB)
    place = machine.platform.host_memory(size)
    data = torch.randint(256, (size,), dtype=torch.uint8).to(machine.torch_device)
    kept = data.clone()
    off = size / machine.seconds(lambda: place.copy_(data, non_blocking=True))
    on = size / machine.seconds(lambda: data.copy_(place, non_blocking=True))
    expect(
        torch.equal(data, kept), "what came back from the host is not what went there: look at the device's ECC errors"
    )
    slow = f"{min(off, on) / 1e9:.1f} GB/s to or from the host: is memory pinned (ulimit -l unlimited), the link whole?"
    expect(machine.small or min(off, on) > SLOW_LINK, slow)
    return {"to_host_gb_per_s": off / 1e9, "from_host_gb_per_s": on / 1e9, "bytes": size}


@check(fast=True)
def pack(machine: Machine) -> Figures:
    """Slices of experts into one message and out of it, as a weight sync packs them."""
    import torch

    from mrl.reshard.copies import copy_all

    experts, rows, columns = machine.size(128, 16), 768, machine.size(2048, 256)
    weights = [torch.randn(rows, columns, device=machine.torch_device).to(torch.bfloat16) for _ in range(experts)]
    halves = [weight[: rows // 2] for weight in weights]
    buffer = torch.empty(experts * rows // 2 * columns, dtype=torch.bfloat16, device=machine.torch_device)
    views = list(buffer.view(experts, rows // 2, columns))
    packed = buffer.nbytes / machine.seconds(lambda: copy_all(views, halves))
    others = [torch.zeros_like(weight) for weight in weights]
    targets = [other[rows // 2 :] for other in others]
    unpacked = buffer.nbytes / machine.seconds(lambda: copy_all(targets, views))
    right = all(torch.equal(other[rows // 2 :], half) for other, half in zip(others, halves, strict=True))
    expect(
        right, "packed and unpacked slices are not what they were: do not sync weights on this machine, and report it"
    )
    return {"pack_gb_per_s": packed / 1e9, "unpack_gb_per_s": unpacked / 1e9, "bytes": buffer.nbytes}


@check(fast=True)
def launches(machine: Machine) -> Figures:
    """What the host takes for as many small copies with strides as a sync of 30B has on a worker, and for one wait
    behind a kernel that has just been sent."""
    import torch

    from mrl.reshard.copies import copy_all

    count = machine.size(18432, 512)
    held = torch.zeros(count, 16, 32, device=machine.torch_device, dtype=torch.bfloat16)
    sources = [held[number, :, :16] for number in range(count)]
    targets = [held[number, :, 16:] for number in range(count)]
    copies = machine.seconds(lambda: copy_all(targets, sources))
    one = held[0, 0]
    sent = machine.seconds(lambda: [one.add_(1) for _ in range(100)])
    waits = machine.seconds(lambda: [(one.add_(1), machine.platform.synchronize()) for _ in range(100)]) - sent
    return {"copy_us": copies / count * 1e6, "wait_us": waits / 100 * 1e6, "copies": count}


@check(fast=True)
def digest(machine: Machine) -> Figures:
    """The proof of a weight sync: quick, the same number as on the host, and another for one bit."""
    import torch

    from mrl.reshard.digest import partial_digest

    shape = (machine.size(18992, 1024), machine.size(4096, 512))
    block = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    there = block.to(machine.torch_device)
    peak = machine.peak_of(lambda: partial_digest(there, "a.weight", (0, 0)))
    seconds = machine.seconds(lambda: partial_digest(there, "a.weight", (0, 0)))
    found = partial_digest(there, "a.weight", (0, 0))
    expect(
        found == partial_digest(block, "a.weight", (0, 0)),
        "the device's digest is not the host's: syncs would be refused",
    )
    there.view(torch.int16)[7, 9] ^= 1
    expect(partial_digest(there, "a.weight", (0, 0)) != found, "one flipped bit does not show in the digest")
    return {"gb_per_s": block.nbytes / seconds / 1e9, "bytes": block.nbytes, "peak_gib": peak}


@check(fast=True)
def words(machine: Machine) -> Figures:
    """Words and scales of engines in FP8, and how quickly they are made.

    Words have the bits that the host makes of the same scales. CUDA multiplies by the inverse of 448 where the host
    divides, so a scale may be the next float.
    """
    import torch

    from mrl.reshard.quantise import as_fp8, block_scales

    shape = (machine.size(6144, 256), machine.size(4096, 384))
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    there = weight.to(machine.torch_device)
    made = as_fp8(there, block_scales(there, 128), 128)
    seconds = machine.seconds(lambda: as_fp8(there, block_scales(there, 128), 128))
    scales, on_host = block_scales(there, 128).cpu(), block_scales(weight, 128)
    apart = (scales.view(torch.int32) - on_host.view(torch.int32)).abs().max().item()
    expect(apart <= int(not machine.small), f"the device's scales are {apart} floats from the host's")
    here = as_fp8(weight, scales, 128)
    expect(torch.equal(made.cpu().view(torch.uint8), here.view(torch.uint8)), "the device's words are not the host's")
    return {"gb_per_s": weight.nbytes / seconds / 1e9, "bytes": weight.nbytes, "scales_apart": apart}


@check()
def words_of_vllm(machine: Machine) -> Figures:
    """The same words and scales as vLLM's own function makes of the weight on this device, bit for bit."""
    import torch

    try:
        from vllm.utils.deep_gemm import per_block_cast_to_fp8
    except ImportError:
        raise Skip("vLLM is not installed") from None

    from mrl.reshard.quantise import as_fp8, block_scales

    weight = torch.randn((512, 384), generator=torch.Generator().manual_seed(0)).to(
        machine.torch_device, torch.bfloat16
    )
    words, scales = per_block_cast_to_fp8(weight, [128, 128], use_ue8m0=False)
    own = block_scales(weight, 128)
    expect(torch.equal(own, scales), "scales are not those of vLLM")
    made = as_fp8(weight, own, 128)
    expect(torch.equal(made.view(torch.uint8), words.view(torch.uint8)), "words are not those of vLLM")
    return {"blocks": own.numel()}


_SIZES_THAT_CHANGE = """
import torch, sys
device = sys.argv[1]
torch_device = getattr(torch, device)
generator, alive = torch.Generator().manual_seed(0), []
for step in range(400):
    size = int(torch.randint(1 << 20, 256 << 20, (1,), generator=generator))
    alive.append(torch.empty(size, dtype=torch.uint8, device=device))
    del alive[:-8]
print(torch_device.max_memory_reserved() / torch_device.max_memory_allocated())
"""


@check(fast=True)
def allocator(machine: Machine) -> Figures:
    """Memory that the allocator holds over what is used, with sizes that change as those of packed batches: with and
    without expandable segments, which ranks have and engines must not."""
    machine.needs_accelerator("allocator of its own")
    variable = {"cuda": "PYTORCH_CUDA_ALLOC_CONF", "npu": "PYTORCH_NPU_ALLOC_CONF"}[machine.device]
    return {
        name: float(
            subprocess.run([sys.executable, "-c", _SIZES_THAT_CHANGE, machine.device], check=True,
                           capture_output=True, text=True,
                           env=os.environ | {variable: f"expandable_segments:{value}"}).stdout
        )
        for name, value in (("held_over_used_expandable", True), ("held_over_used_fixed", False))
    }  # fmt: skip
