"""Launches of copies in a weight sync of a worker of 235B, counted as a device would launch them. No device is needed.

python scripts/bench/copy_launches.py [--json]

cut      a worker of TP8, which has a part of every expert
spread   a worker of TP4, DP4, EP16, which has 8 whole experts a layer

Layers are as large as in the model; one and three of them are planned, and what one more takes is taken for the others.
`groups_of_20_mib`: launches if modules were written together up to that size, and so in load layout together.
"""

import argparse
import json
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mrl.model import planning_model_spec
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.vllm_parameters import target_parameters
from mrl.reshard import execute
from mrl.reshard.execute import Receiver
from mrl.reshard.messages import Message
from mrl.reshard.plan import plan_reshard
from mrl.units import MIB

OF_MODEL = 94  # layers
TRAIN = {"world_size": 8, "tensor_model_parallel_size": 4, "expert_model_parallel_size": 8}
ENGINES = {"cut": {"tensor": 8}, "spread": {"tensor": 4, "data": 4, "expert": 16}}
# torch's kernel for lists takes so many pairs of tensors, and so many chunks of elements, in one launch
# (ATen/native/cuda/MultiTensorApply.cuh, depth 2)
TENSORS, CHUNKS, CHUNK = 64, 320, 65536


class Launches(TorchDispatchMode):
    """Counts launches of copies. A list is launched together only where every pair lies alike
    (ATen/native/ForeachUtils.h, can_use_fast_route).
    """

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "copy_":
            self.number += 1
        elif name == "_foreach_copy_":
            self.number += _of_list(*args[:2])
        else:
            assert "copy" not in name or name == "_to_copy", name
        return func(*args, **(kwargs or {}))


def _of_list(targets: list[Tensor], sources: list[Tensor]) -> int:
    pairs = list(zip(targets, sources, strict=True))
    if not all(t.stride() == s.stride() and t.shape == s.shape and t.dtype is s.dtype and t.is_contiguous()
               and t.dtype is targets[0].dtype for t, s in pairs):  # fmt: skip
        return len(pairs)
    chunks = sum(-(-t.numel() // CHUNK) for t in targets)
    return max(-(-len(pairs) // TENSORS), -(-chunks // CHUNKS))


class End:
    """Of a worker; what comes has no values."""

    staging_bytes = 0

    def begin(self, update: int) -> None:
        pass

    def is_remote(self, message: Message) -> bool:
        return False

    def ask(self, messages: list[Message]) -> None:
        pass

    def take(self, messages: list[Message]) -> list[Tensor]:
        return [torch.empty(message.nbytes, dtype=torch.uint8, device="meta") for message in messages]

    def lasting(self, message: Message) -> bool:
        return False

    def release(self, messages: list[Message]) -> None:
        pass

    def abandon(self) -> None:
        raise AssertionError("it was given up")


class Parameters:
    """Of an engine's worker."""

    def __init__(self, model, rollout):
        found = target_parameters(model, rollout, 0, "cuda", "bfloat16")
        self.tensors = {p.name: torch.empty(p.local_shape, dtype=torch.bfloat16, device="meta") for p in found}

    def tensor(self, parameter: str) -> Tensor:
        return self.tensors[parameter]

    def complete(self, module: str) -> None:
        pass


def counted(layers: int, engine: dict[str, int]) -> tuple[int, int]:
    """Copies and launches of a worker of an engine with so many layers of 235B."""
    whole = planning_model_spec("Qwen/Qwen3-235B-A22B")[0]
    model = replace(whole, num_layers=layers, moe_layers=tuple(range(layers)))
    train = TrainLayout.build(TRAIN, model)
    rollout = RolloutLayout(**({"num_engines": 1, "tensor": 1, "data": 1, "expert": 1} | engine))
    plan = plan_reshard(model, train, rollout, dialect="cuda", dtype="bfloat16", budget_bytes=256 * MIB)
    receiver = Receiver(plan, 0, End(), torch.bfloat16)
    with Launches() as seen:
        receiver.receive(Parameters(model, rollout), 1)
    return sum(len(message.copies) for message in plan.receives(0)), seen.number


def of_model(engine: dict[str, int]) -> tuple[float, float]:
    """Copies and launches of a worker with all layers."""
    few, more = (counted(layers, engine) for layers in (1, 3))
    copies, launches = (least + (most - least) / 2 * (OF_MODEL - 1) for least, most in zip(few, more, strict=True))
    return copies, launches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {}
    for name, engine in ENGINES.items():
        copies, launches = of_model(engine)
        with patch.object(execute, "LITTLE_BYTES", 20 * MIB):
            larger = of_model(engine)[1]
        found[name] = {"copies": copies, "launches": launches, "groups_of_20_mib": larger}
    if options.json:
        print(json.dumps(found))
        return
    for name, row in found.items():
        print(f"experts {name}: {row['launches']:.0f} launches of {row['copies']:.0f} copies")


if __name__ == "__main__":
    main()
