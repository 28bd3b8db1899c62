"""What generation reads beside the weights of the plan: rotary caches, scales of the KV cache, a router's bias, maps of
experts.

No sync brings them, and sleep level 2 keeps only those of them that are registered as buffers (vLLM issue 29341,
vllm-ascend pull requests 17217 and 13012, NeMo-RL issue 2631). So a worker notes them before anything has slept,
restores after a sleep what vLLM does not, and compares all of them after a sync.
"""

import hashlib
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

# plain attributes of modules; others are made from weights (MLA's absorbed projections), or belong to one step
# (vllm-ascend 0.23 has a layer's map of its experts as one: ops/fused_moe/fused_moe_0_23_0.py)
_CONSTANT = re.compile(r"cos|sin|inv_freq|slopes|_scale$|expert_map$")
_OF_A_STEP = re.compile(r"buffer|workspace|scratch|load|indices")  # buffers that a step writes
_BIAS = re.compile(r"bias$")
# vllm-ascend 0.23 keeps these in modules, made in the memory that sleeps: tensors, and by the way in which experts
# exchange tokens, an object whose dispatcher has the local number of each expert
_OF_MODULES = {"vllm_ascend.ops.rotary_embedding": ("_cos_cache", "_sin_cache", "_cos_sin_cache")}
_EXCHANGES = ("vllm_ascend.ops.fused_moe.moe_comm_method", "_MoECommMethods")
_LOCAL_NUMBERS = "expert_ids_per_ep_rank"


def sha256_of(tensor: Tensor) -> str:
    """Returns the SHA-256 of a tensor's shape, dtype and bytes."""
    data = tensor.detach().cpu().contiguous()
    return hashlib.sha256(
        f"{tuple(data.shape)} {data.dtype} ".encode() + data.reshape(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def loose_constants(model: nn.Module) -> dict[str, Tensor]:
    """Returns tensors that are neither parameters nor buffers, which vLLM's sleep does not know, by name."""
    found = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if _is_plain(value) and _CONSTANT.search(name):
                found[f"{path}.{name}"] = value
    for module_name, names in _OF_MODULES.items():
        for name in names:
            value = getattr(sys.modules.get(module_name), name, None)
            if _is_plain(value):
                found[f"{module_name}.{name}"] = value
    module_name, name = _EXCHANGES
    for way, exchange in getattr(sys.modules.get(module_name), name, {}).items():
        value = getattr(exchange.token_dispatcher, _LOCAL_NUMBERS, None)
        if _is_plain(value):
            found[f"{module_name}.{name}[{way}].{_LOCAL_NUMBERS}"] = value
    return found


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_meta


def _constants(model: nn.Module) -> dict[str, Tensor]:
    buffers = {name: buffer for name, buffer in model.named_buffers() if not _OF_A_STEP.search(name)}
    return buffers | loose_constants(model)


def _held_biases(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields biases that plain objects of a module hold, as a router of experts does."""
    for path, module in model.named_modules():
        for name, holder in vars(module).items():
            if isinstance(holder, Tensor | nn.Module) or not type(holder).__module__.startswith("vllm"):
                continue
            for attribute, value in getattr(holder, "__dict__", {}).items():
                if isinstance(value, Tensor) and value.numel() and _BIAS.search(attribute):
                    yield f"{path}.{name}.{attribute}", value


@dataclass(frozen=True)
class Constants:
    """What was noted of a model before anything had slept."""

    digests: dict[str, str]
    biases: dict[str, str]  # a bias that a plain object holds -> the parameter that it is

    @classmethod
    def of(cls, model: nn.Module) -> "Constants":
        """Returns what was noted, and notes it the first time."""
        if model not in _noted:
            parameters = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
            held = {name: parameters.get(value.data_ptr()) for name, value in _held_biases(model)}
            _noted[model] = cls(
                {name: sha256_of(tensor) for name, tensor in _constants(model).items()},
                {name: parameter for name, parameter in held.items() if parameter is not None},
            )
        return _noted[model]

    def check(self, model: nn.Module, brought: Collection[str]) -> None:
        """Raises RuntimeError naming what generation reads and is not as it was. `brought`: names that syncs write."""
        now = _constants(model)
        changed = [
            name
            for name, digest in self.digests.items()
            if name not in brought and (name not in now or sha256_of(now[name]) != digest)
        ]
        parameters = dict(model.named_parameters())
        held = dict(_held_biases(model))
        changed += [
            f"{name}, which is no longer {parameter}"
            for name, parameter in self.biases.items()
            if name in held and parameter in parameters and held[name].data_ptr() != parameters[parameter].data_ptr()
        ]
        if changed:
            raise RuntimeError(
                f"generation reads what is not as it was when the engine started: {', '.join(changed[:4])}"
                f"{' and more' * (len(changed) > 4)}; no sync brings it, so start the engine again"
            )


_noted: WeakKeyDictionary[nn.Module, Constants] = WeakKeyDictionary()
