"""A worker's memory while its engine sleeps: the part that all devices share, called through the worker extension.

A worker of vLLM gives memory back by `sleep(level=2)`, which keeps no weights, and takes it again by `wake_up(tags)`.
On the CPU, mrl.engine.cpu_worker adds this. The weights come back as NaN. So a generation from them shows in its first
log-prob, and never looks like an answer. The KV cache comes back as zeros. A vision tower that no sync brings waits in
host memory; the CPU's stays where it is. A model that drafts (drafter.py) sleeps and comes back beside the model.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from mrl.engine.constants import Constants, loose_constants
from mrl.engine.drafter import ModelThatDrafts
from mrl.engine.engine_state import CACHE, WEIGHTS
from mrl.engine.tower import synced_part, syncs_tower, tower_of
from mrl.platforms.process_memory import process_memory

# methods that would read or write missing memory; vLLM itself refuses none of them
NEEDS_WEIGHTS = (
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "init_weight_transfer_engine",
    "weight_fingerprints",
    "weight_digests",
)

NAN = float("nan")
Layout = dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]  # parameter -> shape, stride, dtype


class SleepingExtension:
    """The part of a worker extension that sleeps. Its names must not be those of vLLM's workers."""

    parts_asleep: frozenset[str] = frozenset()
    layout_awake: Layout
    constants_awake: dict[str, Tensor]
    tower_awake: dict[str, Tensor]
    drafted: ModelThatDrafts | None = None  # where layers of the model draft

    def give_memory(self) -> None:
        """Gives the memory of weights and KV cache back. Nothing may be running: the caller has paused vLLM.

        vLLM 0.23 does not promise an idle device after a pause, so this waits for the device. Raises RuntimeError for
        an accelerator's worker whose memory does not come from the pool that sleeps.
        """
        if self.device.type != "cpu" and not self.model_config.enable_sleep_mode:
            raise RuntimeError(
                "this engine was started without enable_sleep_mode, so nothing of its memory can be given back"
            )
        self.abandon_update()  # an unfinished update holds memory of its own, and parameters without data
        self.wait_for_device()
        model = self.computing_model()
        self.layout_awake = layout_of(model)
        Constants.of(model)  # noted before the first sleep
        self.constants_awake = {name: tensor.cpu().clone() for name, tensor in loose_constants(model).items()}
        self.tower_awake = {name: p.detach().to("cpu", copy=True) for name, p in self.tower_parameters().items()}
        self.sleep(level=2)
        self.parts_asleep = frozenset((WEIGHTS, CACHE))
        self.release_freed()

    def take_memory(self, part: str) -> None:
        """Takes the memory of `part` again, WEIGHTS or CACHE. Does nothing if it is awake.

        Raises RuntimeError when parameters are not as they were before the sleep.
        """
        if part not in self.parts_asleep:
            return
        self.restore_part(part)
        if part == WEIGHTS:
            check_layout(self.layout_awake, layout_of(self.computing_model()))
            self.restore_constants()
        if self.device.type != "cpu":
            self.overwrite(part)
        if part == WEIGHTS:
            for name, parameter in self.tower_parameters().items():
                parameter.data.copy_(self.tower_awake.pop(name))
        self.wait_for_device()
        self.parts_asleep -= {part}

    def computing_model(self) -> nn.Module:
        """Returns the worker's model, together with the one that drafts where there is one."""
        if self.drafted is not None:
            return self.drafted
        return self.model_runner.get_model()

    def overwrite(self, part: str) -> None:
        """Writes NaN into the weights, or zeros into the cache, because an accelerator's memory holds old data."""
        if part == WEIGHTS:
            poison(synced_part(self.computing_model(), self.model_config).parameters())
        else:
            clear(self.model_runner.kv_caches)

    def tower_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters of a vision tower that sleep, and that no sync brings back."""
        tower = tower_of(self.model_runner.get_model())
        if tower is None or self.device.type == "cpu" or syncs_tower(self.model_config):
            return {}
        return dict(tower.named_parameters())

    @torch.no_grad()
    def restore_constants(self) -> None:
        """Restores what generation reads and vLLM's own sleep does not save: tensors that are no buffers."""
        now = loose_constants(self.computing_model())
        for name, saved in self.constants_awake.items():
            if name in now:
                now[name].copy_(saved)

    def restore_part(self, part: str) -> None:
        """Takes memory in the way of this generation and device."""
        self.wake_up(tags=[part])

    def refuse_asleep(self, method: str) -> None:
        """Raises RuntimeError for methods that would touch missing weights."""
        if method in NEEDS_WEIGHTS and WEIGHTS in self.parts_asleep:
            raise RuntimeError(f"{method}: this worker's weights are asleep; first wake_weights")

    def held_memory(self) -> dict[str, int | None]:
        """Returns the fields of a ProcessMemory."""
        return asdict(
            process_memory(
                self.device.type,
                roots=self.known_tensors(),
                unseen_bytes=self.packed_bytes(),
                absent_bytes=self.absent_bytes(),
            )
        )

    def known_tensors(self) -> Iterator[Tensor]:
        """Yields weights, buffers and KV cache. vLLM hides old objects from the garbage collector."""
        model = self.computing_model()
        yield from (*model.parameters(), *model.buffers(), *_tensors(self.model_runner.kv_caches))

    def packed_bytes(self) -> int:
        """Returns the bytes of weights that kernels hold out of Python's sight."""
        if WEIGHTS in self.parts_asleep:
            return 0
        return self.adapter.packed_bytes(self.computing_model())

    def absent_bytes(self) -> int:
        """Returns the bytes of vLLM's sleeping pool that are not mapped, but that torch still counts."""
        if self.parts_asleep and self.device.type != "cpu":
            return self.adapter.bytes_asleep(self.parts_asleep)
        return 0

    def wait_for_device(self) -> None:
        """Waits until the device has done all its work."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def release_freed(self) -> None:
        """Gives the allocator's cached memory back to the device. Without this vllm-ascend 0.23 grows with every
        sleep.
        """
        if self.device.type != "cpu":
            getattr(torch, self.device.type).empty_cache()


def layout_of(model: nn.Module) -> Layout:
    """Returns shape, stride and dtype of every parameter."""
    return {name: (tuple(p.shape), p.stride(), p.dtype) for name, p in model.named_parameters()}


def check_layout(before: Layout, now: Layout) -> None:
    """Raises RuntimeError naming a parameter whose shape, stride or dtype a sleep has changed."""
    for name in before.keys() | now.keys():
        if before.get(name) != now.get(name):
            raise RuntimeError(
                f"{name} is {now.get(name)} after the wake, {before.get(name)} before the sleep (shape, stride, dtype)"
            )


def poison(parameters: Iterator[nn.Parameter]) -> None:
    """Fills all floating-point parameters with NaN. The next whole update writes all of them."""
    for parameter in parameters:
        if parameter.is_floating_point():
            parameter.data.fill_(NAN)


@torch.no_grad()
def clear(caches: Any) -> None:
    """Fills a KV cache with zeros, like a fresh one.

    A NaN in a block would survive every reset, since a masked position is multiplied by 0.
    """
    for cache in _tensors(caches):
        cache.zero_()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of a KV cache, which has one or several for each layer."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
