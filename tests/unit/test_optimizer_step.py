"""One update of the optimizer: clipped as torch clips, nothing at all where the norm is not finite,
and experts in the norm of every tensor rank.

Megatron's optimizers on one rank, with torch's Adam or SGD inside.
"""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer

from mrl.config.schema import OptimConfig
from mrl.platforms.cpu_patches import PATCHES
from mrl.rank import optimizer as ours
from mrl.rank.optimizer import StepResult, build_optimizer, build_scheduler, current_lr, step

ASKED_FOR_CUDA = {  # of what Megatron's optimizers call
    "torch.Tensor.type": torch.Tensor.type,
    "torch.tensor": torch.tensor,
    "torch.zeros": torch.zeros,
}
WARM_UP = {"lr": 0.5, "lr_warmup_steps": 5, "weight_decay": 0.1}  # the first update has a rate of 0.1


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('store') / 'rendezvous'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """What ranks on a CPU have in place for good."""
    for row in PATCHES:
        if row.target in ASKED_FOR_CUDA:
            monkeypatch.setattr(row.target, row.make(ASKED_FOR_CUDA[row.target]))


def weights(*values: float, is_column: bool = False) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.tensor(values))
    parameter.tensor_model_parallel = is_column
    return parameter


def built(monkeypatch, parts: list[tuple[torch.optim.Optimizer, SimpleNamespace]], **optim) -> ChainedOptimizer:
    """What build_optimizer makes of Megatron's optimizers over `parts`, (inner optimizer, its tensor group) each."""

    def megatrons(upstream, chunks, groups, **switches) -> ChainedOptimizer:
        made = [FP32Optimizer(inner, upstream, None) for inner, _ in parts]
        for part, (_, group) in zip(made, parts, strict=True):
            part.tp_group = group
            part.grad_stats_parallel_group = dist.group.WORLD
        return ChainedOptimizer(made)

    monkeypatch.setattr(ours, "get_megatron_optimizer", megatrons)
    chunk = SimpleNamespace(ddp_config=SimpleNamespace(use_distributed_optimizer=False))
    return build_optimizer(OptimConfig(**optim), [chunk], torch.float32)


def rank_of(number: int) -> SimpleNamespace:
    """The tensor group of a rank that has this number in it."""
    return SimpleNamespace(rank=lambda: number, size=lambda: 2)


def one_part(monkeypatch, inner: torch.optim.Optimizer, **optim):
    """An optimizer and its schedule."""
    inner.param_groups[0]["default_config"] = True
    optimizer = built(monkeypatch, [(inner, rank_of(0))], **optim)
    return optimizer, build_scheduler(OptimConfig(**optim), optimizer, None)


@pytest.mark.parametrize("limit", [1.0, 2.5, 4.99, 5.01, 100.0])
def test_a_gradient_is_clipped_as_torch_clips_it(monkeypatch, limit):
    """Of norm 5."""
    parameters = [weights(1.0, -2.0), weights(0.5)]
    twins = copy.deepcopy(parameters)
    for one in (parameters, twins):
        one[0].grad = torch.tensor([3.0, 0.0])
        one[1].grad = torch.tensor([-4.0])
    inner = torch.optim.SGD(parameters, lr=0.0)
    optimizer, scheduler = one_part(monkeypatch, inner, lr=0.5, weight_decay=0.0, clip_grad=limit)
    assert step(optimizer, scheduler) == StepResult(True, pytest.approx(5.0), 0.5)
    torch.nn.utils.clip_grad_norm_(twins, limit)
    torch.optim.SGD(twins, lr=0.5).step()
    for found, expected in zip(parameters, twins, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_a_limit_of_zero_clips_nothing(monkeypatch):
    parameter = weights(1.0, 1.0)
    parameter.grad = torch.tensor([30.0, 40.0])
    inner = torch.optim.SGD([parameter], lr=0.0)
    optimizer, scheduler = one_part(monkeypatch, inner, lr=0.5, weight_decay=0.0, clip_grad=0.0)
    assert step(optimizer, scheduler).grad_norm == pytest.approx(50.0)
    assert parameter.tolist() == [1 - 0.5 * 30, 1 - 0.5 * 40]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_leaves_weights_moments_and_schedule_and_the_next_update_is_the_first(
    monkeypatch, bad
):
    parameter = weights(1.0, -2.0)
    inner = torch.optim.AdamW([parameter], lr=0.0)
    optimizer, scheduler = one_part(monkeypatch, inner, **WARM_UP)
    parameter.grad = torch.tensor([bad, 1.0])
    result = step(optimizer, scheduler)
    assert not result.applied and not math.isfinite(result.grad_norm) and result.lr == pytest.approx(0.1)
    assert parameter.tolist() == [1.0, -2.0] and not inner.state and current_lr(optimizer) == pytest.approx(0.1)
    parameter.grad = torch.tensor([0.1, -0.1])
    assert step(optimizer, scheduler).lr == pytest.approx(0.1) and current_lr(optimizer) == pytest.approx(0.2)
    # Adam's first update is of the rate itself, against the gradient; before it decay takes rate x 0.1
    assert parameter.tolist() == pytest.approx([0.99 - 0.1, -2 * 0.99 + 0.1], abs=1e-5)


def test_experts_are_in_the_norm_of_every_tensor_rank_and_copies_in_that_of_the_first(monkeypatch):
    """Gradients 3 of a column, 12 of a norm that both ranks have, 4 of experts that this rank alone has: of rank 1."""
    column = weights(0.0, is_column=True)
    norm = weights(0.0)
    expert = weights(0.0)
    for parameter, value in ((column, 3.0), (norm, 12.0), (expert, 4.0)):
        parameter.grad = torch.tensor([value])
    dense = torch.optim.SGD([column, norm], lr=0.0)
    experts = torch.optim.SGD([expert], lr=0.0)
    dense.param_groups[0]["is_expert_parallel"] = False
    experts.param_groups[0]["is_expert_parallel"] = True
    monkeypatch.setattr(ours.mpu, "get_expert_tensor_parallel_group", lambda: rank_of(0))
    optimizer = built(monkeypatch, [(dense, rank_of(1)), (experts, rank_of(1))])
    assert optimizer.get_grad_norm() == pytest.approx(math.hypot(3, 4))
    optimizer = built(monkeypatch, [(dense, rank_of(0)), (experts, rank_of(0))])
    assert optimizer.get_grad_norm() == pytest.approx(13.0)
