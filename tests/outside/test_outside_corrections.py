"""What import-verl writes for verl's rollout correction keeps verl's tokens and gives verl's weights."""

from functools import cache

import numpy as np
import pytest
from golden import differences, golden

from mrl.algo.correction import Correction, CorrectionParameters, correct
from mrl.tools.import_verl.translate import import_overrides

OURS = "algorithm.rollout_correction."
KINDS = sorted({tuple(sorted(case["options"].items(), key=str)) for case in golden("corrections")}, key=str)


@cache
def imported(options: tuple[tuple[str, object], ...]) -> CorrectionParameters:
    words = [f"{OURS}{name}={value!r}" for name, value in options]
    out = import_overrides(["actor_rollout_ref.model.path=Qwen/Qwen3-8B", "model_engine=megatron", *words])
    assert not [entry for entry in out.of("unsupported") if entry.key.startswith(OURS)]
    defaults = {"mode": "truncate", "low": None, "high": 2.0, "weigh": None}
    defaults |= {"reject": None, "reject_low": None, "reject_high": 2.0}
    values = {name: out.values.get(OURS + name, default) for name, default in defaults.items()}
    return CorrectionParameters(out.values[OURS + "level"], **values)


def corrected(case: dict, options: tuple) -> Correction:
    old, rollout, mask = (np.array(case[name]).ravel() for name in ("old", "rollout", "mask"))
    rows = np.array(case["mask"]).shape
    return correct(imported(options), old, rollout, mask.astype(bool), np.full(rows[0], rows[1]))


@pytest.mark.parametrize("options", KINDS, ids=lambda options: "-".join(str(value) for _, value in options))
def test_an_imported_correction_is_verls(options):
    cases = [case for case in golden("corrections") if case["options"] == dict(options) and not case["far"]]
    assert len(cases) == 40
    differs = 0
    for case in cases:
        found = corrected(case, options)
        kept = np.array(case["gave"]["kept"], bool).ravel()
        assert (found.keep == kept).all(), case
        expected = np.array(case["gave"].get("weights", np.ones(kept.sum())), np.float32)
        # both round the same number to float32, from exponentials of double precision that may differ in the last bit
        np.testing.assert_allclose(found.weights[kept], expected, rtol=1.2e-7, atol=0, err_msg=str(case))
        differs += int(not kept.all() or (expected != 1).any())
    assert differs > 10  # the draws are not all inside the band


def test_far_ratios_differ_where_verl_bounds_a_token_before_it_adds_up_a_response():
    differing = []
    for case in golden("corrections"):
        if not case["far"]:
            continue
        found = corrected(case, tuple(sorted(case["options"].items(), key=str)))
        kept = np.array(case["gave"]["kept"], bool).ravel()
        expected = np.array(case["gave"].get("weights", np.ones(kept.sum())), np.float32)
        if (found.keep != kept).any() or not np.allclose(found.weights[kept], expected, rtol=1.2e-7, atol=0):
            differing.append(case)
    for case in differing:
        gap = np.abs(np.array(case["old"]) - np.array(case["rollout"]))[np.array(case["mask"], bool)]
        assert case["options"]["rollout_rs"].startswith("seq_") and gap.max() > 20
    assert len(differing) == differences("corrections")["bound_of_a_token"]["cases"]


def test_asymmetric_bands_and_both_sides_of_them_are_among_the_cases():
    """Taken as it stands, verl's band would keep other tokens."""
    turned = 0
    for case in golden("corrections"):
        threshold = str(case["options"].get("rollout_rs_threshold", ""))
        if "_" not in threshold or "k1" not in case["options"]["rollout_rs"]:
            continue
        given = imported(tuple(sorted(case["options"].items(), key=str)))
        low, high = map(float, threshold.split("_"))
        if given.reject or (given.low, given.high) == pytest.approx((low, high)):
            continue
        old, rollout, mask = (np.array(case[name]).ravel() for name in ("old", "rollout", "mask"))
        as_it_stands = CorrectionParameters(given.level, "mask", low, high)
        found = correct(as_it_stands, old, rollout, mask.astype(bool), np.full(4, 6))
        turned += int((found.keep != np.array(case["gave"]["kept"], bool).ravel()).any())
    assert turned > 100
