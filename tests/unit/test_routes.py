"""Routes at the border: what an engine returns is checked before anything is trained on it,
and keeps to its sample through every cut.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mrl.data.batch import TrainBatch
from mrl.data.routes import MISSING, RouteShape, is_missing, recoded
from mrl.data.samples import Sample, Samples, packed
from mrl.driver.step_batch import check_routed
from mrl.errors import DataError, EnvironmentFault
from mrl.rank.packing import Shape, micro_batch
from mrl.rank.routing import _Chooser

SHAPE = RouteShape(num_layers=3, moe_layers=(1, 2), topk=2, num_experts=4)  # the first layer is dense
WHOSE = "engine 1, sample 7"


def routes_of(tokens: int, seed: int = 0) -> np.ndarray:
    """As an engine returns them: of every token but the last, zeros where a layer has no experts."""
    given = np.random.default_rng(seed).random((tokens - 1, 3, 4)).argsort(-1)[..., :2].astype(np.uint8)
    given[:, 0] = 0
    return given


def test_an_engines_routes_lose_the_dense_layers_and_gain_the_last_token():
    given = routes_of(6)
    found = SHAPE.from_engine(given, 6, WHOSE)
    assert found.dtype == np.int8 and np.array_equal(found[:-1], given[:, 1:]) and (found[-1] == MISSING).all()
    assert SHAPE.from_engine(None, 6, WHOSE) is None


def test_ids_beyond_a_byte_keep_their_value():
    wide = replace(SHAPE, num_experts=384)
    found = wide.from_engine(np.full((1, 3, 2), [0, 383], np.uint16), 2, WHOSE)
    assert found.dtype == np.int16 and found[0].tolist() == [[0, 383]] * 2


@pytest.mark.parametrize(
    ("experts", "topk", "dtype"),
    [
        (128, 1, np.int8), (129, 1, np.uint8), (160, 8, np.uint8), (255, 1, np.uint8), (256, 2, np.uint8),
        (256, 8, np.uint8), (256, 1, np.int16), (257, 2, np.int16), (512, 8, np.int16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("told_as", [np.uint16, np.int16])
def test_every_route_of_any_number_of_experts_and_what_is_missing_come_back_from_the_narrowest_integers(
    experts, topk, dtype, told_as
):
    shape, rng = RouteShape(3, (1, 2), topk, experts), np.random.default_rng(experts)
    given = rng.random((60, 3, experts)).argsort(-1)[..., :topk]
    given[:2, :, 0] = experts - 1  # the last expert is named
    given[:2, :, 1:] = np.arange(topk - 1)
    unknown = rng.random((60, 3)) < (0.3 if np.dtype(told_as).kind == "i" else 0.0)
    given[unknown] = MISSING
    found = shape.from_engine(given.astype(told_as), 61, WHOSE)
    assert found.dtype == dtype and found.nbytes == 61 * shape.token_bytes
    for routes in (found, torch.from_numpy(found), recoded(found, np.dtype(np.int16)), recoded(found, found.dtype)):
        missing = np.asarray(is_missing(routes))
        assert np.array_equal(missing[:-1], unknown[:, 1:]) and missing[-1].all()
        assert np.array_equal(np.asarray(routes)[~missing], given[:, 1:][~unknown[:, 1:]])
    assert np.array_equal(recoded(recoded(found, np.dtype(np.int16)), found.dtype), found)


def test_a_router_follows_routes_in_a_byte_and_chooses_itself_where_they_are_missing():
    wanted = torch.tensor([[255, 3], [255, 255], [0, 255]], dtype=torch.uint8)
    scores = torch.rand((3, 256), generator=torch.Generator().manual_seed(0))
    own = scores.topk(2).indices
    values, chosen = _Chooser(wanted=wanted, has_gaps=True).get_replay_topk(
        scores, 2, None, None, lambda *_: (scores.topk(2).values, own)
    )
    assert chosen.tolist() == [[255, 3], own[1].tolist(), [0, 255]]
    assert torch.equal(values, scores.gather(1, chosen))


def test_routes_that_were_kept_when_they_were_wider_go_on_with_narrow_ones():
    shape = RouteShape(2, (0, 1), 2, 200)
    narrow = shape.from_engine(np.random.default_rng(0).random((3, 2, 200)).argsort(-1)[..., :2], 4, WHOSE)
    made = [Sample(0, 0, i, 0, (1, 2), (3, 4), (0.0,) * 2, "stop", 0, narrow) for i in range(2)]
    wide = replace(packed(made), routes=recoded(packed(made).routes, np.dtype(np.int16)))
    for parts in ([wide, packed(made)], [packed(made), wide], [wide, replace(packed(made), routes=None)]):
        joined = Samples.joined(parts)
        assert joined.routes.dtype == parts[0].routes.dtype and is_missing(joined.routes)[3::4].all()
        assert np.array_equal(recoded(joined.routes[:8], narrow.dtype), packed(made).routes)
        assert is_missing(joined.routes).sum() == (2 * 4 if parts[1].routes is not None else 2 * 2 + 2 * 8)


def test_a_prompt_of_one_token_and_no_response_has_no_route():
    assert SHAPE.from_engine(np.zeros((0, 3, 2), np.uint8), 1, WHOSE).tolist() == [[[MISSING] * 2] * 2]


def spoilt(where: tuple, value) -> np.ndarray:
    given = routes_of(6).astype(np.int64)
    given[where] = value
    return given


@pytest.mark.parametrize(
    "given, said",
    [
        (routes_of(6)[:, 1:], "[5, 2, 2], expected [5, 3, 2]"),
        (routes_of(6)[:, :, :1], "[5, 2, 1], expected [5, 2, 2]"),
        (routes_of(6)[0], "[3, 2], expected [5, 3, 2]"),
        (routes_of(7), "of 6 tokens, expected 5"),
        (routes_of(5), "of 4 tokens, expected 5"),
        (routes_of(6).astype(np.float32), "float32, expected integers"),
        (spoilt((3, 2, 1), 4), "4 at token 3, layer 2 is no expert of 0 to 3"),
        (spoilt((3, 2, 1), 260), "260 at token 3, layer 2"),  # would be 4 in a byte
        (spoilt((2, 1, 0), -2), "-2 at token 2, layer 1"),
        (spoilt((4, 1), 3), "[3, 3] at token 4, layer 1 names an expert twice"),
        (spoilt((0, 2), [2, -1]), "[2, -1] at token 0, layer 2 is missing in part"),
    ],
)
def test_bad_routes_are_refused_by_sample_and_place(given, said):
    with pytest.raises(DataError) as error:
        SHAPE.from_engine(given, 6, WHOSE)
    assert WHOSE in str(error.value) and said in str(error.value)


def sample(i: int, prompt: int, response: int, routes: bool = True) -> Sample:
    """Token ids are unique over all samples, and so are routes: ids of the token,
    so that what belongs together is seen.
    """
    ids = tuple(range(100 * i + 1, 100 * i + 1 + prompt + response))
    own = np.array(ids, np.int16)[:, None, None] + np.zeros((1, 2, 2), np.int16)
    own[-1] = MISSING
    return Sample(i, i, i, 0, ids[:prompt], ids[prompt:], (0.0,) * response, "stop", 0, own if routes else None)


@pytest.fixture
def batch():
    return TrainBatch.of(
        packed([sample(0, 3, 4), sample(1, 2, 9), sample(2, 5, 1, routes=False), sample(3, 6, 2)]), 1.0
    )


def replaying(most, how="R3"):
    return SimpleNamespace(router_replay=how, max_unrouted_share=most)


@pytest.mark.parametrize("unknown", [None, np.full((7, 2, 2), MISSING, np.int8)])
def test_a_step_of_r3_without_any_route_is_a_fault_and_one_with_some_is_not(unknown):
    without = replace(sample(0, 3, 4), routes=unknown)
    for most in (0.5, 1.0):
        with pytest.raises(EnvironmentFault, match=r"no route for any of 2 samples.*engine-N\.log.*R2 or disabled"):
            check_routed(replaying(most), packed([without, without]).numbers)
        check_routed(replaying(most), packed([without, sample(1, 2, 9)]).numbers)


@pytest.mark.parametrize(("unrouted", "most"), [(0, 0.0), (1, 0.0), (2, 0.5), (3, 0.5), (3, 0.75), (4, 1.0)])
def test_the_share_of_responses_without_a_route_is_bounded(unrouted, most):
    """Of four; all of them are one too many whatever is allowed."""
    rows = packed([sample(i, 3, 4, routes=i >= unrouted) for i in range(4)]).numbers
    actor = replaying(most)
    if unrouted < 4 and unrouted / 4 <= most:
        check_routed(actor, rows)
        return
    with pytest.raises(EnvironmentFault, match=f"no route for {unrouted if unrouted < 4 else 'any'} of 4 samples"):
        check_routed(actor, rows)


@pytest.mark.parametrize("replay", ["R2", "disabled"])
def test_only_r3_asks_for_routes(replay):
    check_routed(replaying(0.5, replay), packed([sample(0, 3, 4, routes=False)]).numbers)


def test_a_batch_of_samples_without_routes_has_none():
    assert packed([sample(0, 3, 4, routes=False)]).routes is None


@pytest.mark.parametrize(
    "index", [slice(1, 3), slice(0, 4), slice(2, 2), slice(0, 4, 2), np.array([3, 0, 0]), np.array([], np.int64)]
)
def test_rows_take_their_routes_along(batch, index):
    picked = batch.rows(index)
    ids = picked.token_ids
    assert len(picked.routes) == picked.lengths.sum() == len(ids)
    known = picked.routes[:, 0, 0] != MISSING
    assert np.array_equal(picked.routes[known, 1, 1], ids[known])
    assert np.array_equal(ids[~known], [i for i in ids if i in (7, 111, 308) or 200 < i < 300])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("context", [1, 2, 4])
def test_routes_stand_where_their_tokens_stand(batch, packed, context):
    rows = np.array([3, 1, 2])
    for rank in range(context):
        arrays = micro_batch(batch, rows, Shape(packed, context), rank)
        assert arrays.routes.shape == (*arrays.input_ids.shape, 2, 2)
        ids = arrays.input_ids
        unknown = (ids == 0) | (ids == 111) | (ids == 308) | ((ids > 200) & (ids < 300))
        assert np.array_equal(arrays.routes[..., 1, 0], np.where(unknown, MISSING, ids))
        last = (ids == 111) | (ids == 308) | (ids == 206)
        assert np.array_equal(arrays.real, ids > 0) and np.array_equal(arrays.predicting, (ids > 0) & ~last)


def test_a_fillers_tokens_are_in_no_statistic(batch):
    arrays = micro_batch(batch, np.array([0]), Shape(True), is_filler=True)
    assert not arrays.real.any() and not arrays.predicting.any()
