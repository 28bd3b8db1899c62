"""Gaps of vLLM 0.32's CPU platform, filled for MoE engines with data-parallel ranks or spread experts.

CpuWorker installs this in vLLM's worker processes of engines that need it, and nowhere else:

* `CpuCommunicator.all_gatherv`, `reduce_scatterv`: with data parallelism an MoE layer gathers the tokens of all ranks
  and scatters the sums of their experts' outputs. The base class raises NotImplementedError for both.
* `CPUUnquantizedExperts.apply`: the kernel takes no expert map. vLLM numbers experts of other workers -1, for which the
  kernel reads outside its weights (a segmentation fault).

Sums are taken in the order of the ranks. So the result of a token does not depend on other requests.
"""

import dis
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.errors import EnvironmentFault

_APPLY_ARGUMENTS = (
    "self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "global_num_experts",
    "expert_map",
    "a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta", "apply_router_weight_on_input",
)  # fmt: skip
_COLLECTIVES = ("all_gatherv", "reduce_scatterv")


def install() -> None:
    """Fills the gaps in this process. A second call changes nothing.

    Raises EnvironmentFault where vLLM's own functions are not those of 0.32, which are known to have these gaps.
    """
    try:
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError as error:
        raise _unknown(str(error)) from error
    if CpuCommunicator.__dict__.get("all_gatherv") is all_gatherv:
        return
    if faults := [*collective_faults(CpuCommunicator), *apply_faults(CPUUnquantizedExperts)]:
        raise _unknown("; ".join(faults))
    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
    CPUUnquantizedExperts.apply = with_expert_map(CPUUnquantizedExperts.apply)


def _unknown(why: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"engines with data-parallel ranks or spread experts need vLLM 0.32 on cpu, and this one differs: {why}; "
        "install it, or set rollout.data_parallel_size and expert_parallel_size to 1"
    )


def collective_faults(communicator: type) -> list[str]:
    """Returns why the collectives cannot be put on this class: it has them already. Empty where they can."""
    return [
        f"{communicator.__name__} has a {name} of its own" for name in _COLLECTIVES if name in communicator.__dict__
    ]


def apply_faults(experts: type) -> list[str]:
    """Returns why `with_expert_map` cannot wrap this class's `apply`. Empty where it can."""
    if tuple(inspect.signature(experts.apply).parameters) != _APPLY_ARGUMENTS:
        return [f"{experts.__name__}.apply has other arguments"]
    if any(instruction.argval == "expert_map" for instruction in dis.get_instructions(experts.apply)):
        return [f"{experts.__name__}.apply reads the expert map itself"]
    return [f"{kind.__name__} has an apply of its own" for kind in experts.__subclasses__() if "apply" in kind.__dict__]


def all_gatherv(
    self: Any, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
) -> Tensor | list[Tensor]:
    """Gathers the rows of all ranks, [sum(sizes), ...], in the order of the ranks. Replaces a method of
    CpuCommunicator.

    `sizes`: rows of each rank; None: as many as here. Tensors of a list are gathered one by one.
    """
    if isinstance(input_, list):
        return [all_gatherv(self, tensor, dim, sizes) for tensor in input_]
    sizes = _sizes(self, dim, sizes, input_.shape[0])
    padded = input_.new_zeros(max(sizes), *input_.shape[1:])  # gloo gathers equal shapes only
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(self: Any, input_: Tensor, dim: int = -1, sizes: list[int] | None = None) -> Tensor:
    """Returns this rank's rows of the sum over all ranks, [sizes[rank], ...]. Replaces a method of CpuCommunicator.

    `input_` is [sum(sizes), ...]. The sum is taken in the order of the ranks.
    """
    sizes = _sizes(self, dim, sizes, input_.shape[0] // self.world_size)
    own = sizes[self.rank_in_group]
    received = input_.new_empty(own * len(sizes), *input_.shape[1:])
    dist.all_to_all_single(received, input_.contiguous(), [own] * len(sizes), sizes, group=self.device_group)
    return in_order(received.view(len(sizes), own, *input_.shape[1:]))


def in_order(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """Sums over the first dimension, one part after the other."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _sizes(communicator: Any, dim: int, sizes: list[int] | None, rows: int) -> list[int]:
    if dim != 0:
        raise NotImplementedError(f"rows are exchanged along the first dimension only, not along {dim}")
    return sizes or [rows] * communicator.world_size


def with_expert_map(apply: Callable[..., None]) -> Callable[..., None]:
    """Wraps `apply` of vLLM's experts for a worker that has only some of them: other experts contribute nothing.

    The kernel knows only local experts. So the first of them stands in for the others, with weight 0.
    """

    def apply_local(
        self: Any, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor,
        topk_ids: Tensor, activation: Any,
        global_num_experts: int, expert_map: Tensor | None, a1q_scale: Any, a2_scale: Any, workspace13: Any,
        workspace2: Any,
        expert_tokens_meta: Any, apply_router_weight_on_input: bool,
    ) -> None:  # fmt: skip
        if expert_map is not None:
            if apply_router_weight_on_input:
                raise NotImplementedError("experts that weigh their input cannot be spread over workers on cpu")
            topk_weights, topk_ids = local_choice(topk_weights, topk_ids, expert_map)
        apply(
            self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map,
            a1q_scale, a2_scale,
            workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input,
        )  # fmt: skip

    return apply_local


def local_choice(topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor) -> tuple[Tensor, Tensor]:
    """Returns weights and local numbers [tokens, top k] of the chosen experts.

    `expert_map`: local number of each expert, or -1.
    """
    local = expert_map[topk_ids.long()]
    return topk_weights.masked_fill(local < 0, 0), local.clamp(min=0).to(topk_ids.dtype)
