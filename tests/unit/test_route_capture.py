"""Routes that are collected inside vLLM go to the request and the position that they were computed for;
a stand-in for its model runner.
"""

from types import SimpleNamespace as Record

import numpy as np
import pytest
import torch

from mrl.data.routes import ASKED, MISSING
from mrl.engine.route_capture import RouteCapture
from mrl.errors import EnvironmentFault

LAYERS, DENSE, TOPK = 3, 1, 2


class Runner:
    """Computes scheduled tokens in the order of its batch; what a token's routers choose is its number in the run,
    layer by layer.
    """

    def __init__(self):
        self.model_config = Record(get_total_num_hidden_layers=lambda: LAYERS)
        self.input_batch = Record(req_ids=[])
        self.computed = 0
        self.asked: list = []

    def get_model(self):
        return self

    def execute_model(self, scheduled):
        tokens = sum(scheduled.num_scheduled_tokens.values())
        if tokens:
            numbers = torch.arange(self.computed, self.computed + tokens)
            self.computed += tokens
            for layer in (0, 2):
                self.capture(layer, torch.stack([numbers, numbers + 100 * layer], 1))
        return "output"


@pytest.fixture
def runner():
    return Runner()


def bind(model, capturer):
    model.capture = capturer.capture


@pytest.fixture
def capture(runner):
    return RouteCapture(runner, bind)


def step(runner, new=(), cached=()):
    """`new`: (request, tokens of its prompt that were cached, tokens computed, whether it asks); `cached`: (request,
    computed, tokens).
    """
    entries = [
        Record(req_id=r, num_computed_tokens=c, sampling_params=Record(extra_args={ASKED: True} if asks else None))
        for r, c, _, asks in new
    ]
    counts = {r: n for r, _, n in cached} | {r: n for r, _, n, _ in new}
    runner.input_batch.req_ids = list(counts)
    scheduled = Record(
        scheduled_new_reqs=entries, num_scheduled_tokens=counts,
        scheduled_cached_reqs=Record(req_ids=[r for r, _, _ in cached], num_computed_tokens=[c for _, c, _ in cached]),
    )  # fmt: skip
    assert runner.execute_model(scheduled) == "output"


def numbers(routes: np.ndarray) -> list[int]:
    """Of the tokens as they were computed; every row says so in every layer that has experts."""
    known = routes[:, 0, 0] != MISSING
    assert (routes[known, DENSE] == 0).all() and (routes[~known] == MISSING).all()
    assert np.array_equal(routes[known, 2], routes[known, 0][:, :1] + np.array([[0, 200]]))
    return routes[:, 0, 0].tolist()


def test_each_step_is_cut_by_request(runner, capture):
    step(runner, new=[("a-x1", 0, 3, True), ("b-x2", 0, 2, True)])  # 0 1 2 | 3 4
    step(runner, cached=[("b-x2", 2, 1), ("a-x1", 3, 1)])  # 5 | 6
    step(runner)  # nothing scheduled
    step(runner, new=[("c-x3", 0, 2, True)], cached=[("a-x1", 4, 1)])  # 7 | 8 9
    assert numbers(capture.take("a", 5)) == [0, 1, 2, 6, 7]
    assert numbers(capture.take("b", 3)) == [3, 4, 5]


def test_what_the_prefix_cache_had_is_missing(runner, capture):
    step(runner, new=[("a-x", 2, 2, True)])
    assert numbers(capture.take("a", 4)) == [MISSING, MISSING, 0, 1]


def test_what_was_scheduled_ahead_of_the_end_is_left_out(runner, capture):
    step(runner, new=[("a-x", 0, 2, True)])
    step(runner, cached=[("a-x", 2, 1)])
    assert numbers(capture.take("a", 2)) == [0, 1]
    step(runner, cached=[("a-x", 3, 1)])  # nobody keeps it any more


def test_a_request_that_was_preempted_has_the_routes_of_its_second_pass(runner, capture):
    step(runner, new=[("a-x", 0, 2, True)])
    step(runner, cached=[("a-x", 0, 3)])
    assert numbers(capture.take("a", 3)) == [2, 3, 4]


def test_rejected_drafts_leave_no_route(runner, capture):
    step(runner, new=[("a-x", 0, 2, True)])  # 0 1
    step(runner, cached=[("a-x", 2, 4)])  # 2, and three drafts, of which one is accepted
    step(runner, cached=[("a-x", 4, 1)])  # nothing is drafted
    step(runner, cached=[("a-x", 5, 3)])  # both drafts are accepted, and the last token ends the response
    assert numbers(capture.take("a", 8)) == [0, 1, 2, 3, 6, 7, 8, 9]


def test_routes_are_kept_only_for_who_asks_and_only_once(runner, capture):
    step(runner, new=[("a-x", 0, 2, False), ("b-x", 0, 1, True)])
    assert numbers(capture.take("b", 1)) == [2]
    for name in ("a", "b"):
        with pytest.raises(KeyError):
            capture.take(name, 1)


def test_names_that_vllm_leaves_as_they_are_are_refused_at_the_start(runner, monkeypatch):
    for value in ("0", ""):
        monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", value)
        RouteCapture(runner, bind)
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    with pytest.raises(EnvironmentFault, match="VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set"):
        RouteCapture(runner, bind)


@pytest.mark.parametrize("cut", [slice(0, 2), slice(-1, 5)])
def test_a_layer_that_chose_for_other_tokens_than_were_scheduled_is_named_when_routes_are_taken(runner, capture, cut):
    whole = runner.capture
    runner.capture = lambda layer, topk_ids: whole(layer, topk_ids[cut] if layer == 2 else topk_ids)
    step(runner, new=[("a-x", 0, 3, True)])  # the step itself goes on
    with pytest.raises(RuntimeError, match=f"the 3 of a step: {{2: {len(range(3)[cut])}}}"):
        capture.take("a", 3)


def test_what_nobody_took_is_forgotten_when_told_to(runner, capture):
    step(runner, new=[("a-x", 0, 2, True)])
    capture.forget()
    step(runner, cached=[("a-x", 2, 1)])
    with pytest.raises(KeyError):
        capture.take("a", 2)
