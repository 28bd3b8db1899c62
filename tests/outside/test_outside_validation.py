"""Validation scores have verl's names and values; verl's draws of 1,000 are estimates of the exact expectation here."""

import math
from collections import defaultdict

from golden import golden

from mrl.record.validation_metrics import Answers, validation_metrics


def answers_of(case: dict) -> list[Answers]:
    rows = defaultdict(list)
    for number, key in enumerate(zip(case["sources"], case["uids"], strict=True)):
        rows[key].append(number)
    infos = case["infos"]
    return [
        Answers(
            source,
            {name: [values[i] for i in numbers] for name, values in infos.items() if name != "pred"},
            [infos["pred"][i] for i in numbers] if "pred" in infos else None,
        )
        for (source, _), numbers in rows.items()
    ]


def ours_of(case: dict) -> dict[str, float]:
    """Names without val-core/ and val-aux/."""
    return {name.partition("/")[2]: value for name, value in validation_metrics(answers_of(case)).items()}


def theirs_of(case: dict) -> dict[str, float]:
    return {
        f"{source}/{quantity}/{metric}": value
        for source, quantities in case["gave"].items()
        for quantity, metrics in quantities.items()
        for metric, value in metrics.items()
    }


def test_names_are_verls():
    for case in golden("validation"):
        ours = {name for name in ours_of(case) if "/ci95_" not in name}
        assert ours == theirs_of(case).keys()


def test_values_are_verls_up_to_the_noise_of_its_draws():
    compared = 0
    for case in golden("validation"):
        ours = ours_of(case)
        prompts = len(set(case["uids"]))
        for name, theirs in theirs_of(case).items():
            drawn = "best@" in name or "worst@" in name or "maj@" in name
            # 1,000 draws of values within 0 and 1: five standard errors of a mean; a spread's is less
            noise = 5 * 0.5 / math.sqrt(1000) / math.sqrt(max(1, prompts // 2)) if drawn else 1e-12
            assert abs(ours[name] - theirs) <= noise, name
            compared += 1
    assert compared > 200
