"""mean@n, best@k, maj@k: hand-computed, against brute force over all draws, and under verl's names."""

import itertools
from collections import Counter

import numpy as np
import pytest

from mrl.record.spec import metric_spec
from mrl.record.validation_metrics import (
    Answers,
    bootstrap95,
    evenly_spread,
    extreme_of,
    majority_of,
    prompt_metrics,
    subset_sizes,
    validation_metrics,
    wilson95,
)


@pytest.mark.parametrize(("n", "sizes"), [(1, []), (2, [2]), (3, [2, 3]), (8, [2, 4, 8]), (12, [2, 4, 8, 12])])
def test_subsets_are_powers_of_two_and_n(n, sizes):
    assert subset_sizes(n) == sizes


def test_best_of_two_of_a_coin_is_three_quarters():
    assert extreme_of(np.array([0.0, 1.0]), 2) == (0.75, pytest.approx(np.sqrt(0.75 * 0.25)))
    assert extreme_of(np.array([0.0, 1.0]), 2, best=False)[0] == 0.25


@pytest.mark.parametrize("k", [1, 2, 3])
def test_best_and_worst_are_the_mean_over_all_draws(k):
    values = [0.3, -1.0, 0.3, 2.0]
    draws = list(itertools.product(values, repeat=k))  # all 4^k draws with replacement, each as likely
    for best, pick in ((True, max), (False, min)):
        outcomes = [pick(d) for d in draws]
        assert extreme_of(np.array(values), k, best) == (
            pytest.approx(np.mean(outcomes)),
            pytest.approx(np.std(outcomes)),
        )


def test_a_prompts_best_and_worst_have_their_own_numbers():
    """One of four is right: of k draws one is with chance 1 - (3/4)^k, and all are with chance (1/4)^k."""
    found = prompt_metrics(Answers("a", {"reward": [0.0, 1.0, 0.0, 0.0]}))["reward"]
    for k in (2, 4):
        for name, chance in ((f"best@{k}", 1 - 0.75**k), (f"worst@{k}", 0.25**k)):
            assert found[f"{name}/mean"] == pytest.approx(chance)
            assert found[f"{name}/std"] == pytest.approx(np.sqrt(chance * (1 - chance)))


def test_a_majority_is_near_the_mean_over_all_draws():
    values, preds, k = [1.0, 1.0, 0.0, 0.0, 0.0], ["a", "a", "b", "c", "c"], 3

    def outcome(draw):
        counts = Counter(preds[i] for i in draw)  # insertion order: the first drawn of the most frequent wins
        winner = max(counts, key=counts.get)
        return next(values[i] for i in draw if preds[i] == winner)

    exact = np.mean([outcome(d) for d in itertools.product(range(5), repeat=k)])
    spread = np.sqrt(exact * (1 - exact) / 1000)
    assert abs(majority_of(np.array(values), preds, k)[0] - exact) < 4 * spread


def test_a_clear_majority_wins_however_few_are_right():
    assert majority_of(np.array([1.0] * 6 + [0.0] * 2), ["5"] * 6 + ["6", "7"], 8)[0] > 0.97
    # of 8 draws with chance 1/4: five and more 0.0273, four, which ties and comes first half of the time, 0.0865
    assert (
        abs(majority_of(np.array([0.0] * 6 + [1.0] * 2), ["6"] * 6 + ["5"] * 2, 8)[0] - (0.0273 + 0.0865 / 2))
        < 4 * 0.0081
    )
    assert majority_of(np.array([1.0, 1.0]), ["a", "b"], 2) == (1.0, 0.0)


def test_names_are_verls():
    metrics = validation_metrics(
        [Answers("gsm8k", {"reward": [1, 0, 0, 0], "acc": [1, 0, 0, 0]}, ["3", "4", "4", "5"])]
    )
    core = {name for name in metrics if name.startswith("val-core/")}
    assert core == {
        f"val-core/gsm8k/acc/{m}" for m in ("mean@4", "best@4/mean", "best@4/std", "maj@4/mean", "maj@4/std")
    }
    assert {"val-aux/gsm8k/reward/mean@4", "val-aux/gsm8k/acc/best@2/mean", "val-aux/gsm8k/acc/worst@4/mean"} <= set(
        metrics
    )
    assert all(metric_spec(name) for name in metrics)


def test_without_acc_the_reward_is_the_core():
    assert validation_metrics([Answers("toy", {"reward": [1.0]})]) == {"val-core/toy/reward/mean@1": 1.0}


def test_sets_do_not_mix_and_prompts_weigh_alike():
    metrics = validation_metrics(
        [Answers("a", {"reward": [1, 1]}), Answers("a", {"reward": [0, 1]}), Answers("b", {"reward": [0, 0]})]
    )
    assert (metrics["val-core/a/reward/mean@2"], metrics["val-core/b/reward/mean@2"]) == (0.75, 0.0)
    assert metrics["val-core/a/reward/best@2/mean"] == (1 + 0.75) / 2


def interval(metrics, name):
    return tuple(metrics[f"val-aux/a/{name}/ci95_{end}"] for end in ("low", "high"))


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [(8, 10, 0.4901625, 0.9433178), (10, 10, 0.7224672, 1.0), (0, 10, 0.0, 0.2775328), (50, 100, 0.4038315, 0.5961685)],
)
def test_one_answer_a_prompt_has_wilsons_interval(right, of, low, high):
    """Figures of published tables: 8/10 is (0.490, 0.943), 10/10 is (1/(1 + z^2/10), 1)."""
    metrics = validation_metrics([Answers("a", {"reward": [float(i < right)]}) for i in range(of)])
    assert interval(metrics, "reward/mean@1") == (pytest.approx(low, abs=2e-6), pytest.approx(high, abs=2e-6))


def test_the_interval_is_over_prompts():
    """Four prompts, each all right or all wrong: sixteen answers say no more than four."""
    metrics = validation_metrics([Answers("a", {"reward": [x] * 4}) for x in (0, 0, 1, 1)])
    assert interval(metrics, "reward/mean@4") == pytest.approx(wilson95(np.array([0.0, 0, 1, 1]), 1))
    assert not [name for name in validation_metrics([Answers("a", {"reward": [0, 1]})]) if "ci95" in name]


def test_prompts_that_differ_no_more_than_answers_do_count_by_answers():
    assert wilson95(np.array([0.5] * 10), 4) == pytest.approx(wilson95(np.array([0.0, 1.0] * 20), 1))


def test_other_rewards_have_the_bootstraps_interval():
    """Prompt means 0 and 10, fifty each: the mean of 100 draws is 5, standard deviation 0.5."""
    low, high = interval(validation_metrics([Answers("a", {"reward": [x]}) for x in [0.0, 10.0] * 50]), "reward/mean@1")
    assert (low, high) == (pytest.approx(5 - 1.96 * 0.5, abs=0.15), pytest.approx(5 + 1.96 * 0.5, abs=0.15))


@pytest.mark.parametrize(("prompts", "scale"), [(60, 1.0), (10, 1.0), (60, 3.0)])
def test_the_interval_covers_the_truth_about_as_often_as_it_says(prompts, scale):
    """300 sets of prompts of chance 0.3 to 0.9, 4 responses each: 95 % of 300 is 285, standard deviation 3.8."""
    generator, covered = np.random.default_rng(0), 0
    for _ in range(300):
        chances = generator.uniform(0.3, 0.9, prompts)
        values = np.stack([(generator.random(4) < p).astype(float) * scale for p in chances]).mean(1)
        low, high = wilson95(values, 4) if scale == 1 else bootstrap95(values)
        covered += low <= 0.6 * scale <= high
    assert 285 - 5 * 3.8 <= covered <= 300


@pytest.mark.parametrize("right", [1.0, 0.95])
def test_few_prompts_near_the_end_are_covered_too(right):
    """Where 1.96 standard errors fail: of 20 prompts that are nearly always right,
    most sets have all right and no width.
    """
    generator, covered = np.random.default_rng(1), 0
    for _ in range(200):
        low, high = wilson95((generator.random(20) < right).astype(float), 1)
        covered += low <= right <= high
    assert covered >= 180


def test_a_part_that_some_responses_lack_is_left_out():
    metrics = validation_metrics([Answers("a", {"reward": [1.0], "bonus": [1.0]}), Answers("a", {"reward": [0.0]})])
    assert not [name for name in metrics if "bonus" in name]


def test_a_majority_is_told_whichever_prompt_has_one():
    voted, silent = Answers("a", {"reward": [1.0, 1.0]}, ["y", "y"]), Answers("a", {"reward": [0.0, 0.0]})
    assert validation_metrics([silent, voted]).keys() == validation_metrics([voted, silent]).keys()
    assert validation_metrics([silent, voted])["val-core/a/reward/maj@2/mean"] == 1.0


def test_what_is_shown_is_the_same_choice_every_time():
    assert evenly_spread(100, 5) == evenly_spread(100, 5)
    assert len(evenly_spread(100, 5)) == 5 and evenly_spread(3, 5) == [0, 1, 2]


def test_a_large_set_is_computed_in_seconds():
    import time

    answers = [
        Answers("a", {"reward": [float(i % 3 == 0) for i in range(16)]}, [str(i % 5) for i in range(16)])
        for _ in range(100)
    ]
    begin = time.monotonic()
    for a in answers:
        prompt_metrics(a)
    assert time.monotonic() - begin < 10
