"""What switches of the actor leave in the metrics: counted from what ran, and nothing where they are off."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mrl.megatron import recompute
from mrl.megatron.batching import MiniBatchLoad, Splitter
from mrl.megatron.packing import Shape
from mrl.megatron.recompute import RecomputeCount
from mrl.train.update import load_metrics


class Layer(torch.nn.Module):
    """Stands where Megatron's layer does, with one of the parts that selective recompute names."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, recomputes_mlp: bool = False) -> torch.Tensor:
        return checkpoint(self.mlp, x, use_reentrant=True) if recomputes_mlp else self.mlp(x)


@pytest.fixture
def layers(monkeypatch) -> torch.nn.ModuleList:
    monkeypatch.setattr(recompute, "TransformerLayer", Layer)
    return torch.nn.ModuleList([Layer(), Layer(), Layer()])


def backward(layers, run) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    for layer in layers:
        x = run(layer, x)
    x.sum().backward()


def test_layers_that_run_once_are_not_counted(layers):
    count = RecomputeCount([layers])
    backward(layers, lambda layer, x: layer(x))
    assert count.count == 0


def test_each_recomputed_layer_counts_once_a_micro_batch(layers):
    count = RecomputeCount([layers])
    for _ in range(2):
        backward(layers, lambda layer, x: checkpoint(layer, x, use_reentrant=True))
    assert count.count == 6


def test_of_selective_recompute_the_parts_count(layers):
    count = RecomputeCount([layers])
    backward(layers, lambda layer, x: layer(x, recomputes_mlp=True))
    assert count.count == 3


def test_an_update_counts_from_its_own_beginning(layers):
    count = RecomputeCount([layers])
    backward(layers, lambda layer, x: checkpoint(layer, x, use_reentrant=True))
    count.begin()
    assert count.count == 0


LENGTHS = np.array([10, 20, 30, 40])


def load_of(packed: bool, max_tokens: int | None) -> MiniBatchLoad:
    """Four sequences on one rank: two a micro-batch, or as a budget has it."""
    splitter = Splitter(Shape(packed, 1, 1), data_parallel=1, micro_batch_size=2, max_tokens=max_tokens)
    return splitter.load(LENGTHS, splitter.shares(LENGTHS))


def test_packed_rows_tell_how_many_sequences_they_hold():
    assert load_of(packed=True, max_tokens=None).packed_sequences == 2
    assert load_of(packed=False, max_tokens=None).packed_sequences is None


def test_the_share_of_a_budget_is_that_of_the_fullest_micro_batch():
    """100 tokens in two micro-batches of 50 under a budget of 80."""
    load = load_of(packed=True, max_tokens=80)
    assert load.budget_share == pytest.approx(50 / 80)
    assert load_of(packed=True, max_tokens=None).budget_share is None


def test_the_metrics_of_a_step_are_the_mean_of_packing_and_the_largest_of_budgets():
    loads = [MiniBatchLoad(0.0, 0.0, (50,), 2.0, 0.5), MiniBatchLoad(0.0, 0.0, (50,), 4.0, 0.75)]
    metrics = load_metrics(LENGTHS, loads)
    assert (metrics["actor/packed_sequences"], metrics["actor/token_budget_share"]) == (3.0, 0.75)
    plain = load_metrics(LENGTHS, [MiniBatchLoad(0.0, 0.0, (100,))])
    assert not {"actor/packed_sequences", "actor/token_budget_share"} & plain.keys()
