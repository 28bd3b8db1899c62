"""Copies of a weight sync are grouped: the same bytes in few launches, counted as a device would launch them."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mrl.model import planning_model_spec
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.vllm_parameters import target_parameters
from mrl.reshard.copies import copy_all
from mrl.reshard.execute import Receiver
from mrl.reshard.messages import Message
from mrl.reshard.plan import plan_reshard
from mrl.units import MIB

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


def blocks(memory: Tensor, pieces: Iterable[tuple[int, tuple[int, ...]]]) -> list[Tensor]:
    """Contiguous ones in `memory`, by first element and shape."""
    found = []
    for first, shape in pieces:
        number = torch.Size(shape).numel()
        found.append(memory[first : first + number].view(shape))
    return found


CASES = {
    "adjacent on both sides": ([(0, (2, 3)), (6, (4,)), (10, (2,))], [(3, (2, 3)), (9, (4,)), (13, (2,))], 1),
    "adjacent on one side": ([(0, (2,)), (2, (2,))], [(0, (2,)), (4, (2,))], 1),
    "backwards": ([(4, (2,)), (2, (2,))], [(4, (2,)), (2, (2,))], 1),
    "two runs": ([(0, (2,)), (2, (2,)), (8, (1,)), (9, (1,))], [(4, (2,)), (6, (2,)), (1, (1,)), (2, (1,))], 1),
}


@pytest.mark.parametrize(("there", "here", "launches"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_is_copied_once_and_nothing_beside_them(there, here, launches, dtype):
    target, source = torch.full((20,), -1.0, dtype=dtype), torch.arange(20, dtype=dtype)
    expected = target.clone()
    for into, out in zip(blocks(expected, there), blocks(source, here), strict=True):
        into.copy_(out)
    with Launches() as seen:
        copy_all(blocks(target, there), blocks(source, here))
    assert torch.equal(target, expected) and seen.number == launches


@pytest.mark.parametrize("converted", [False, True])
def test_what_is_strided_or_converted_arrives_beside_what_is_not(converted):
    kind = torch.bfloat16 if converted else torch.float32
    target, expected = torch.zeros(8, 6, dtype=kind), torch.zeros(8, 6, dtype=kind)
    source = torch.arange(48.0).view(8, 6)
    rows = [(slice(0, 2), slice(None)), (slice(2, 4), slice(None))]
    cuts = [*rows, (slice(4, 8), slice(0, 3)), (slice(4, 8), slice(3, 6))]
    for cut in cuts:
        expected[cut] = source[cut].to(kind)
    copy_all([target[cut] for cut in cuts], [source[cut] for cut in cuts])
    assert torch.equal(target, expected)
    turned = torch.zeros(6, 8)
    copy_all([turned.t()[cut] for cut in cuts], [source[cut] for cut in cuts])
    assert torch.equal(turned, source.t())


def test_formats_and_memories_are_not_joined():
    """Neighbours by number alone: in other memory, or with elements of another size."""
    one, two = torch.zeros(4), torch.zeros(4)
    wide = torch.arange(8.0)
    copy_all([one[:4], two[:4]], [wide[:4], wide[4:]])
    assert one.tolist() == [0, 1, 2, 3] and two.tolist() == [4, 5, 6, 7]
    memory = torch.zeros(16, dtype=torch.uint8)
    halves, singles = memory[:4].view(torch.bfloat16), memory[8:16].view(torch.float32)
    copy_all([halves, singles], [torch.ones(2, dtype=torch.bfloat16), torch.full((2,), 2.0)])
    assert halves.tolist() == [1, 1] and singles.tolist() == [2, 2]


OF_MODEL = 94  # layers
TRAIN = {"world_size": 8, "tensor_model_parallel_size": 4, "expert_model_parallel_size": 8}


class End:
    """Of a worker; what comes has no values."""

    staging_bytes = 0

    def begin(self, update: int, rounds) -> None:
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


@pytest.mark.parametrize(
    ("engine", "limit"),
    [({"tensor": 8}, 2000), ({"tensor": 4, "data": 4, "expert": 16}, 750)],
    ids=["experts cut", "experts spread"],
)
def test_a_worker_of_235b_launches_few_copies_in_a_sync(engine, limit):
    """Layers are as large as in the model; few of them are planned, and what one more takes is taken for the others."""
    few, more = (counted(layers, engine) for layers in (1, 3))
    copies, launches = (least + (most - least) / 2 * (OF_MODEL - 1) for least, most in zip(few, more, strict=True))
    assert launches <= limit and copies > 9000, (copies, launches)
