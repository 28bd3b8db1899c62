"""The layered math verifier against verdicts written by hand (verifier_pairs.py)."""

import pytest
from verifier_pairs import (
    ADVERSARIAL,
    BARS,
    BINOMIALS,
    COMPLEX,
    ERRORS,
    EXPRESSIONS,
    FORMS,
    LISTS,
    MATRICES,
    NEAR,
    PLAIN,
    PRODUCTS,
    REPORTED,
    RESPONSES,
    UNITS,
    WORDS,
    WORKED_OUT,
)

from mrl.reward.latex import clean
from mrl.reward.math_verifier import MATCH, NO_ANSWER, SEVERAL, TOO_COMPLEX, WRONG, canonical, math

pytest.importorskip("math_verify")
GROUPS = (
    *(PLAIN, UNITS, LISTS, NEAR, FORMS, EXPRESSIONS, WORDS, PRODUCTS, BINOMIALS, BARS, WORKED_OUT, ADVERSARIAL),
    *(REPORTED, COMPLEX, MATRICES, ERRORS),
)
TABLE = [
    (truth, answer, right)
    for group in GROUPS
    for truth, good, bad in group
    for right, answers in ((True, good), (False, bad))
    for answer in answers
]


def boxed_verdict(truth, answer) -> str:
    return math("math", rf"Therefore \boxed{{{answer}}}", truth)["verdict"]


def test_the_table_is_as_large_as_it_should_be():
    assert len({(truth, answer) for truth, answer, _ in TABLE}) + len(RESPONSES) >= 300


@pytest.mark.parametrize(("truth", "answer", "right"), TABLE, ids=lambda value: repr(value)[:40])
def test_verdicts(truth, answer, right):
    verdict = boxed_verdict(truth, answer)
    assert verdict in (MATCH, WRONG, NO_ANSWER, SEVERAL, TOO_COMPLEX)
    assert (verdict == MATCH) == right


@pytest.mark.parametrize(("truth", "response", "verdict"), RESPONSES)
def test_which_part_of_a_response_is_the_answer(truth, response, verdict):
    result = math("math", response, truth)
    assert (result["verdict"], result["score"], result["acc"]) == (verdict, verdict == MATCH, verdict == MATCH)


def test_no_answer_of_the_adversarial_table_is_handed_to_a_computation_that_takes_long():
    import time

    begin = time.monotonic()
    for truth, _, wrong in ADVERSARIAL:
        for answer in wrong:
            boxed_verdict(truth, answer)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("spelling", ["0.5", r"\frac12", "1/2", "½", "x=0.5", r"\frac{2}{4}"])
def test_spellings_of_a_number_vote_together(spelling):
    assert canonical(clean(spelling)) == "1/2"


def test_a_truth_without_content_is_an_error_not_a_wrong_answer():
    with pytest.raises(ValueError, match="no content"):
        math("math", r"\boxed{5}", " ")


def test_the_answer_that_was_compared_is_kept():
    assert math("math", r"\boxed{x = \dfrac12}", "0.5")["pred"] == "1/2"
    assert math("math", "nothing", "0.5")["pred"] == ""


def test_loading_math_verify_is_not_on_the_first_samples_clock():
    import time

    from mrl.reward.items import RewardItem, RewardSpec
    from mrl.reward.pool import RewardPool

    begin = time.monotonic()
    with RewardPool(
        RewardSpec("auto", data_sources=("HuggingFaceH4/MATH-500",)), num_workers=1, timeout_s=20.0
    ) as pool:
        ready = time.monotonic()
        assert pool.score([RewardItem(0, "HuggingFaceH4/MATH-500", r"\boxed{\sqrt{12}}", r"2\sqrt{3}")])[0].score == 1
        answered = time.monotonic()
    # an import within the sample would take as long as the start with it
    assert answered - ready < 0.7 * (ready - begin)


def _spellings(value):
    """Ways to write one fraction, all of them exact."""
    n, d = value.numerator, value.denominator
    sign, size = ("-" if n < 0 else ""), abs(n)
    yield from (
        f"{n}/{d}",
        rf"{sign}\frac{{{size}}}{{{d}}}",
        rf"\dfrac{{{3 * n}}}{{{3 * d}}}",
        rf"$\frac{{{-n}}}{{{-d}}}$",
    )
    if d == 1:
        yield from (f"{n:,}", f"{n}.00", rf"{sign}{size:,}".replace(",", "{,}"), rf"\text{{{n}}}")
    if 1000 % d == 0:
        yield from (f"{float(value):.3f}", rf"{float(value) * 100:.1f}\%")
    if d > 1 and size > d:
        yield rf"{sign}{size // d}\frac{{{size % d}}}{{{d}}}"


def test_numbers_are_equal_exactly_when_their_fractions_are():
    """Python's fractions are the oracle: 200 pairs of values that are often near each other,
    in every spelling of both.
    """
    import random
    from fractions import Fraction

    rng = random.Random(0)
    for _ in range(200):
        truth = Fraction(rng.randint(-2000, 2000), rng.choice((1, 1, 2, 3, 4, 5, 7, 8)))
        answer = rng.choice(
            (truth, -truth, 1 / truth if truth else truth, truth + Fraction(1, 8), truth / 10, truth * 1000)
        )
        for spelled in _spellings(answer):
            got = boxed_verdict(next(_spellings(truth)), spelled) == MATCH
            percent_number = spelled.endswith(r"\%") and answer * 100 == truth and abs(truth) >= 1
            assert got == (truth == answer or percent_number), (str(truth), spelled)
