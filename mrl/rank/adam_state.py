"""Finds where an Adam keeps a parameter's float32 weights, moments and step count.

torch's Adam counts steps by parameter, the fused ones of Transformer Engine and Apex by group. Megatron's
HybridDeviceOptimizer (0.16.1, optimizer_cpu_offload) contains Adams of its own. They work on float32 copies that it
makes when it is built. A share of the parameters has its copies in host memory. The others have copies on the device
unless they are float32. Weights that are set later must be set in those copies too.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class _Updated:
    """The tensor that an Adam updates in place of a parameter, with that Adam and the tensor's group."""

    tensor: Tensor
    adam: Optimizer
    group: dict


class AdamState:
    """Adam's states, keyed by the tensors in the `param_groups` of Megatron's distributed optimizer, which are called
    main here.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._hybrid = isinstance(optimizer, HybridDeviceOptimizer)
        inner = [optimizer]
        if self._hybrid:
            inner = optimizer.sub_optimizers
        updated = [
            _Updated(tensor, adam, group) for adam in inner for group in adam.param_groups for tensor in group["params"]
        ]
        by_tensor = {id(entry.tensor): entry for entry in updated}
        mains = [main for group in optimizer.param_groups for main in group["params"]]
        self._updated = {
            id(main): by_tensor[id(optimizer.param_to_inner_param[main] if self._hybrid else main)] for main in mains
        }
        self._mains = mains

    def master(self, main: Tensor) -> Tensor:
        """Returns the float32 weights that Adam updates."""
        return self._updated[id(main)].tensor

    def moments(self, main: Tensor) -> dict[str, Tensor]:
        """Returns exp_avg and exp_avg_sq; empty before the first update."""
        updated = self._updated[id(main)]
        return dict(updated.adam.state.get(updated.tensor, {}))

    def set_moments(self, main: Tensor, step: float, moments: dict[str, Tensor]) -> None:
        """Sets a parameter's moments and step count."""
        updated = self._updated[id(main)]
        moments = {name: value.to(updated.tensor.device) for name, value in moments.items()}
        if isinstance(updated.adam, torch.optim.Adam):
            device = "cpu"
            if updated.group.get("fused") or updated.group.get("capturable"):
                device = updated.tensor.device
            updated.adam.state[updated.tensor] = {"step": torch.tensor(float(step)).to(device), **moments}
            return
        updated.adam.state[updated.tensor] = moments
        updated.group["step"] = int(step)

    def steps(self) -> set[float]:
        """Returns the step counts of the parameters that have moments.

        Raises RuntimeError if there are moments without a step count.
        """
        steps = set()
        for updated in self._updated.values():
            if state := updated.adam.state.get(updated.tensor):
                step = state.get("step", updated.group.get("step"))
                if step is None:
                    name = type(updated.adam).__name__
                    raise RuntimeError(
                        f"{name} has moments and no step count; a checkpoint of it could not be continued"
                    )
                steps.add(float(step))
        return steps

    def on_device(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) of masters and moments, without those that always stay on the host.

        Names stay the same over a run.
        """
        for number, main in enumerate(self._mains):
            updated = self._updated[id(main)]
            yield f"{number}/main", main
            if self._hybrid and updated.adam is not self._optimizer.gpu_optimizer:
                continue
            yield f"{number}/master", updated.tensor
            for name, value in self.moments(main).items():
                # a step count is a single number, and may have to stay on the host
                if torch.is_tensor(value) and value.dim():
                    yield f"{number}/{name}", value
