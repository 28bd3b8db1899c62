"""What a forward and a backward pass ask the device for, each time a wait for all that it was asked before."""

import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from checks import Figures, Machine, check, expect
from host_reads import HostReads, site_of
from layer_slices import of_presets
from layers import DTYPE, one_rank, some_batch, tiny_moe

# In layers of experts tokens go where the router says, and the host lays their rows out. All of it is Megatron's:
OF_EXPERTS = {
    "moe/moe_utils.py:maybe_move_tensor_to_cpu": "how many tokens each expert and each rank gets, once a layer",
    "moe/experts.py:forward": "the same as the list that the grouped product takes",
    "moe/moe_utils.py:permute": "unfused (moe_permute_fusion: false), how many rows were chosen",
    "moe/moe_utils.py:sort_chunks_by_idxs": "unfused, the sizes and the order of the chunks that ranks sent",
    "moe/router.py:gating": "the CPU alone: a router's weight that lies there is moved",
    "platforms/cpu_patches.py:_plain": "the CPU alone: gloo takes sizes of an exchange as a list",
    "tensor_parallel/mappings.py:forward": "the CPU alone: sizes of an exchange, which lie on the host elsewhere",
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES = {"plain": {}, "recomputed": FULL}
_SAID = "called a synchronizing"  # c10/cuda/CUDAFunctions.cpp


@check()
def waits(machine: Machine) -> Figures:
    """What the host reads from the device in a forward and a backward pass: nothing outside of layers of experts, and
    there what OF_EXPERTS names. On NVIDIA devices torch's own debug mode looks on too, which sees no wait for an event.
    """
    expect(_is_seen(machine), "torch's debug mode does not see a read: what it does not find proves nothing")
    with tempfile.TemporaryDirectory() as folder:
        tiny_moe(Path(folder))
        found = {name: _asked_with(machine, Path(folder), overrides) for name, overrides in CASES.items()}
    unknown = sorted({site for sites in found.values() for site in sites if not _is_known(site)})
    expect(not unknown, f"passes wait for the device at {', '.join(unknown)}: that is slow, not wrong; report it")
    return found


def _is_seen(machine: Machine) -> bool:
    """Whether torch's debug mode, where it is used, finds the read of a number."""
    import torch

    sites: Counter[str] = Counter()
    with waited(machine.device, sites):
        torch.ones(1, device=machine.torch_device).item()
    return machine.device != "cuda" or bool(sites)


def _asked_with(machine: Machine, folder: Path, overrides: dict[str, Any]) -> dict[str, int]:
    actor = one_rank(machine, folder, DTYPE[machine.small], of_presets(machine.device) | overrides)
    batch = some_batch()
    actor.gradients(batch)  # what is made once is made
    sites = asked(actor, batch, machine.device)
    actor.close()
    return dict(sites)


def asked(actor: Any, batch: Any, device: str = "cpu") -> Counter[str]:
    """Reads from the device in the passes of log-probs and of an update, by who asked; not what comes after them."""
    from mrl.rank import actor as module

    reads, seen = HostReads(device), Counter()
    with ExitStack() as stack:
        for name in ("log_prob_pass", "loss_pass"):
            stack.enter_context(mock.patch.object(module, name, _within(reads, seen, getattr(module, name))))
        actor.log_probs(batch)
        actor.gradients(batch)
    return reads.sites + seen


def _within(reads: HostReads, seen: Counter[str], function: Callable) -> Callable:
    def counted(*args: Any, **kwargs: Any) -> Any:
        with reads, waited(reads.device, seen, reads):
            return function(*args, **kwargs)

    return counted


@contextmanager
def waited(device: str, sites: Counter[str], reads: HostReads | None = None) -> Iterator[None]:
    """Adds where torch saw the host wait for a CUDA device, "folder/file.py:line"; it does not see all of it.

    Methods of tensors call from the file of `reads`. What that has counted is not added again; what is left are copies
    to the device for which the host waits.
    """
    if device != "cuda":
        yield
        return
    import torch

    counted = reads.by_method if reads else 0
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = Counter(site_of(each.filename, str(each.lineno)) for each in seen if _SAID in str(each.message))
    by_method = sum(places.pop(place) for place in list(places) if place.startswith("hardware/host_reads.py"))
    if reads and by_method > reads.by_method - counted:
        places["a method of a tensor, as a copy to the device"] = by_method - (reads.by_method - counted)
    sites.update(places)


def _is_known(site: str) -> bool:
    """Of the debug mode a line of Megatron's layers of experts is all that can be known beforehand."""
    return site in OF_EXPERTS or (site.startswith("moe/") and site.rpartition(":")[2].isdigit())
