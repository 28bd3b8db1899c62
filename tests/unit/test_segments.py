"""Responses of several requests put together: what was returned with a token stays its own."""

import math
from dataclasses import replace

import numpy as np
import pytest
from segment_checks import check_routes, token_versions

from mrl.data.routes import MISSING
from mrl.data.samples import Sample, Samples, packed
from mrl.errors import DataError
from mrl.schedule.segments import continuation, continuation_seed, joined

ROUTE = (2, 2)  # layers, experts of each token


def routes(tokens: int, version: int) -> np.ndarray:
    """Of all computed tokens, distinct by version and place; the last token was not computed."""
    computed = np.arange(tokens - 1)[:, None, None] + 40 * version + np.zeros((1, *ROUTE))
    return np.concatenate([computed, np.full((1, *ROUTE), MISSING)]).astype(np.int16)


def sample(prompt: list[int], response: list[int], version: int, stop: str = "length", **other) -> Sample:
    """Whose log-probs tell the version and the token."""
    log_probs = [-(version + token / 100) for token in response]
    made = routes(len(prompt) + len(response), version)
    given = {"seed": 11, "routes": made, "sample_id": 3, **other}
    return Sample(7, 1, given.pop("sample_id"), given.pop("seed"), prompt, response, log_probs, stop, version, **given)


def goes_on(kept: Samples, response: list[int], version: int, stop: str) -> Samples:
    """The answer to the continuation of the only row."""
    return packed([sample(continuation(kept, 0, 9).prompt_ids.tolist(), response, version, stop)])


def test_the_example_of_the_module():
    kept = packed([sample([7, 8], [1, 2], 4)])
    both = joined(kept, goes_on(kept, [3, 9], 5, "stop"))
    assert (
        both.token_ids.tolist() == [7, 8, 1, 2, 3, 9]
        and both.prompt_lengths.tolist() == [2]
        and both.response_lengths.tolist() == [4]
    )
    np.testing.assert_allclose(both.rollout_log_probs, [-4.01, -4.02, -5.03, -5.09], rtol=1e-6)
    assert (both.span_starts.tolist(), both.span_versions.tolist(), both.span_counts.tolist()) == ([0, 2], [4, 5], [2])
    assert both.routes[:, 0, 0].tolist() == [160, 161, 162, 203, 204, MISSING]
    assert (both.seed.tolist(), both.stop_reason.tolist(), both.weight_version.tolist()) == ([11], [0], [4])
    assert token_versions(both).tolist() == [4, 4, 5, 5]
    check_routes(both)


def test_a_response_of_many_segments_is_that_of_one_request_when_the_version_stays():
    """Cut anywhere: the same columns as the uncut response, but for the routes of nothing."""
    whole = packed([sample([7, 8], [1, 2, 3, 4, 5], 4, "stop")])
    for cuts in ([1], [1, 2], [2, 4], [1, 2, 3, 4]):
        parts = [[1, 2, 3, 4, 5][a:b] for a, b in zip([0, *cuts], [*cuts, 5], strict=True)]
        made = packed([sample([7, 8], parts[0], 4)])
        for part in parts[1:]:
            made = joined(made, goes_on(made, part, 4, "stop" if part is parts[-1] else "length"))
        for name, column in whole.arrays.items():
            np.testing.assert_array_equal(made.arrays[name], column, err_msg=name)
            assert made.arrays[name].dtype == column.dtype, name


def test_rows_are_joined_each_with_its_own_and_survive_columns_of_their_own():
    kept = packed([sample([7, 8], [1, 2], 4), sample([7], [5], 2, later_versions=(), sample_id=4)])
    more = packed(
        [sample([7, 8, 1, 2], [3], 6), sample([7, 5], [6, 6, 6], 2, "stop", later_versions=((1, 3),), sample_id=4)]
    )
    both = joined(kept, more)
    assert [ids.tolist() for ids in both.responses()] == [[1, 2, 3], [5, 6, 6, 6]]
    assert token_versions(both).tolist() == [4, 4, 6, 2, 2, 3, 3] and both.span_counts.tolist() == [2, 2]
    assert both.stop_reason.tolist() == [1, 0]
    check_routes(both)
    for row in (0, 1):
        alone = joined(kept.rows(slice(row, row + 1)), more.rows(slice(row, row + 1)))
        for name, column in alone.arrays.items():
            np.testing.assert_array_equal(both.rows(slice(row, row + 1)).arrays[name], column, err_msg=name)


def test_a_part_that_is_not_finite_spoils_its_response_and_any_known_route_is_one():
    kept = packed([sample([7, 8], [1], 4), sample([7, 8], [1], 4, sample_id=4, routes=None)])
    spoilt = replace(sample([7, 8, 1], [2], 4), rollout_log_probs=(math.nan,))
    bad = packed([spoilt, sample([7, 8, 1], [2], 4, sample_id=4, routes=None)])
    both = joined(kept, bad)
    assert (kept.finite.tolist(), both.finite.tolist(), both.routed.tolist()) == (
        [True, True],
        [False, True],
        [True, False],
    )


def test_what_was_not_finite_before_a_response_went_on_is_not_after_it():
    kept = packed([replace(sample([7, 8], [1], 4), rollout_log_probs=(math.inf,)), sample([7, 8], [1], 4, sample_id=4)])
    more = packed([sample([7, 8, 1], [2], 5), sample([7, 8, 1], [2], 5, sample_id=4)])
    assert joined(kept, more).finite.tolist() == [False, True]


def test_nothing_kept_and_nothing_added_are_no_spans():
    empty = packed([sample([7, 8], [], 4)])
    after = joined(empty, packed([sample([7, 8], [1], 5)]))
    assert (after.span_starts.tolist(), after.span_versions.tolist()) == ([0], [5])
    same = joined(after, packed([sample([7, 8, 1], [], 6)]))
    assert (same.span_starts.tolist(), same.span_versions.tolist()) == (
        [0],
        [5],
    ) and same.response_lengths.tolist() == [1]
    check_routes(same)
    assert joined(empty, packed([sample([7, 8], [], 6)])).span_counts.tolist() == [1]


def test_versions_of_no_routes_are_joined_too():
    kept = packed([sample([7, 8], [1, 2], 4, routes=None)])
    both = joined(kept, packed([sample([7, 8, 1, 2], [3], 5, routes=None)]))
    assert both.routes is None and token_versions(both).tolist() == [4, 4, 5]


KEPT = packed([sample([7, 8], [1, 2], 4)])
WRONG = {
    "other tokens": (KEPT, packed([sample([7, 8, 1, 3], [3], 5)])),
    "fewer tokens": (KEPT, packed([sample([7, 8, 1], [3], 5)])),
    "another sample": (KEPT, packed([sample([7, 8, 1, 2], [3], 5, sample_id=4)])),
    "a response that has ended": (packed([sample([7, 8], [1, 2], 4, "stop")]), packed([sample([7, 8, 1, 2], [3], 5)])),
    "routes of one part alone": (KEPT, packed([sample([7, 8, 1, 2], [3], 5, routes=None)])),
}


@pytest.mark.parametrize(("kept", "more"), WRONG.values(), ids=WRONG)
def test_what_does_not_go_on_is_refused(kept, more):
    with pytest.raises(DataError):
        joined(kept, more)


def test_a_continuation_begins_other_random_numbers_and_the_first_request_its_own():
    assert continuation_seed(11, 0) == 11
    seeds = {continuation_seed(seed, kept) for seed in range(50) for kept in range(1, 50)}
    assert len(seeds) == 50 * 49 and all(0 <= seed < 1 << 48 for seed in seeds)
    assert continuation(KEPT, 0, 3).seed == continuation_seed(11, 2) == continuation_seed(11, 2)
    with pytest.raises(DataError, match="ended"):
        continuation(WRONG["a response that has ended"][0], 0, 3)


@pytest.mark.parametrize("change", ["missing", "too many"])
def test_routes_that_are_not_those_of_the_computed_tokens_are_found(change):
    rows = packed([sample([7], [1], 4), sample([7, 8], [1, 2], 4, sample_id=9)])
    check_routes(rows)
    routes = rows.routes.copy()
    routes[{"missing": 3, "too many": 5}[change]] = {"missing": MISSING, "too many": 1}[change]
    with pytest.raises(DataError, match="sample 9"):
        check_routes(replace(rows, routes=routes))
