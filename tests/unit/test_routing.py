"""Routes are kept for the micro-batch that they belong to, and nothing of a pass that broke off reaches a later one.

No ranks needed.
"""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from mrl.rank import routing as module
from mrl.rank.routing import Routing, _choosing
from mrl.record.metrics import reduce_parts

REAL = torch.tensor([True, True, False])  # the last one is padding


class Router(TopKRouter):
    """One without Megatron's configuration."""

    def __init__(self, layer_number: int = 1):
        torch.nn.Module.__init__(self)
        self.weight, self.layer_number = torch.nn.Parameter(torch.zeros(4, 2)), layer_number


@pytest.fixture
def routing():
    return Routing([torch.nn.Sequential(Router())], SimpleNamespace(num_experts=4, moe_layers=(0,)), "R2")


@pytest.fixture
def chooser(routing):
    return next(routing._all()).router_replay


@pytest.fixture
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def routes(*experts) -> list[torch.Tensor]:
    return [torch.tensor(experts, dtype=torch.int16)]


def test_micro_batches_of_one_content_that_chose_otherwise_are_refused(routing, deterministic):
    routing._record((0, b"a"), routes([0, 1], [1, 2], [0, 1]), REAL)
    routing._record((0, b"a"), routes([1, 0], [2, 1], [2, 3]), REAL)  # the same sets, but of padding
    routing._record((0, b"b"), routes([2, 3], [1, 2], [0, 1]), REAL)
    with pytest.raises(RuntimeError, match="chose other experts"):
        routing._record((0, b"a"), routes([0, 1], [1, 3], [0, 1]), REAL)


def test_a_step_forgets_what_the_one_before_recorded(routing, deterministic):
    routing._record((0, b"a"), routes([0, 1], [1, 2], [0, 1]), REAL)
    routing.begin_step()
    routing._record((0, b"a"), routes([2, 3], [1, 2], [0, 1]), REAL)


def test_where_sums_may_differ_by_rounding_equal_micro_batches_may_choose_otherwise(routing):
    routing._record((0, b"a"), routes([0, 1], [1, 2], [0, 1]), REAL)
    routing._record((0, b"a"), routes([2, 3], [1, 2], [0, 1]), REAL)


def test_a_pass_that_raises_leaves_no_router_choosing_for_it(chooser):
    with pytest.raises(ValueError), _choosing([chooser], routes([0, 1]), has_gaps=False, training=True):
        raise ValueError
    assert chooser.wanted is None and not chooser.training


def test_choices_that_no_backward_took_are_an_error_and_do_not_reach_the_next_step(routing, chooser):
    routing.check_recomputed()
    chooser.pending.append(torch.zeros(3, 2))
    with pytest.raises(RuntimeError, match="1 choices of experts"):
        routing.check_recomputed()
    routing.begin_step()
    routing.check_recomputed()


@pytest.mark.parametrize(("experts", "bytes_each"), [(4, 1), (256, 1), (257, 2)])
def test_routes_are_kept_in_the_narrowest_numbers_that_hold_every_expert(experts, bytes_each):
    model = torch.nn.Sequential(Router())
    model.config = SimpleNamespace(sequence_parallel=False)
    routing = Routing([model], SimpleNamespace(num_experts=experts, moe_layers=(0,)), "R2")
    inputs = SimpleNamespace(content=b"a", real=REAL[None], predicting=REAL[None])
    scores = torch.arange(3.0 * experts).view(3, experts)  # the last expert is the highest everywhere
    for around in (routing.recording, routing.comparing):
        with around(model, inputs):
            _, chosen = next(routing._all()).router_replay.get_replay_topk(
                scores, 2, None, None, lambda s, k, *_: s.topk(k)
            )
        assert chosen.tolist() == [[experts - 1, experts - 2]] * 3
    ((kept,),) = routing._recorded.values()
    assert kept.element_size() == bytes_each


@pytest.mark.parametrize("stages", [[(1, 2)], [(1,), (2,)]], ids=["one stage", "two stages"])
def test_loads_are_means_over_layers_however_a_pipeline_cuts_them(monkeypatch, stages):
    monkeypatch.setattr(module.mpu, "get_tensor_and_data_parallel_group", lambda **_: None)
    monkeypatch.setattr(module.dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(module.dist, "get_rank", lambda _: 0)
    loads = {1: [4, 0, 0, 0], 2: [1, 1, 1, 1]}  # of one expert alone, and of all alike
    parts = []
    for layers in stages:
        model = SimpleNamespace(num_experts=4, moe_layers=(0, 1))
        stage = Routing([torch.nn.Sequential(*map(Router, layers))], model, "disabled")
        stage._load += torch.tensor([loads[layer] for layer in layers])
        parts.append(stage.metrics())
    assert reduce_parts(parts) == {"router/load/max": 2.5, "router/load/min": 0.5, "router/max_violation": 1.5}
