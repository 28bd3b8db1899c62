"""mean@n, best@k, maj@k: hand-computed, against brute force over all draws, and under verl's names."""

import itertools
from collections import Counter

import numpy as np
import pytest

from mrl.record.spec import metric_spec
from mrl.record.validation_metrics import Answers, evenly_spread, extreme_of, majority_of, prompt_metrics, subset_sizes, validation_metrics


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
        assert extreme_of(np.array(values), k, best) == (pytest.approx(np.mean(outcomes)), pytest.approx(np.std(outcomes)))


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
    assert abs(majority_of(np.array([0.0] * 6 + [1.0] * 2), ["6"] * 6 + ["5"] * 2, 8)[0] - (0.0273 + 0.0865 / 2)) < 4 * 0.0081
    assert majority_of(np.array([1.0, 1.0]), ["a", "b"], 2) == (1.0, 0.0)


def test_names_are_verls():
    metrics = validation_metrics([Answers("gsm8k", {"reward": [1, 0, 0, 0], "acc": [1, 0, 0, 0]}, ["3", "4", "4", "5"])])
    core = {name for name in metrics if name.startswith("val-core/")}
    assert core == {f"val-core/gsm8k/acc/{m}" for m in ("mean@4", "best@4/mean", "best@4/std", "maj@4/mean", "maj@4/std")}
    assert {"val-aux/gsm8k/reward/mean@4", "val-aux/gsm8k/acc/best@2/mean", "val-aux/gsm8k/acc/worst@4/mean"} <= set(metrics)
    assert all(metric_spec(name) for name in metrics)


def test_without_acc_the_reward_is_the_core():
    assert validation_metrics([Answers("toy", {"reward": [1.0]})]) == {"val-core/toy/reward/mean@1": 1.0}


def test_sets_do_not_mix_and_prompts_weigh_alike():
    metrics = validation_metrics([Answers("a", {"reward": [1, 1]}), Answers("a", {"reward": [0, 1]}), Answers("b", {"reward": [0, 0]})])
    assert (metrics["val-core/a/reward/mean@2"], metrics["val-core/b/reward/mean@2"]) == (0.75, 0.0)
    assert metrics["val-core/a/reward/best@2/mean"] == (1 + 0.75) / 2


def test_the_interval_is_over_prompts():
    # prompt means 0, 0, 1, 1: standard deviation sqrt(1/3), standard error sqrt(1/12)
    metrics = validation_metrics([Answers("a", {"reward": [x, x]}) for x in (0, 0, 1, 1)])
    assert metrics["val-aux/a/reward/mean@2/ci95"] == pytest.approx(1.96 * np.sqrt(1 / 12))
    assert not [name for name in validation_metrics([Answers("a", {"reward": [0, 1]})]) if name.endswith("ci95")]


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """300 sets of 60 prompts of chance 0.3 to 0.9, 4 responses each: 95 % of 300 is 285, standard deviation 3.8."""
    generator, covered = np.random.default_rng(0), 0
    for _ in range(300):
        chances = generator.uniform(0.3, 0.9, 60)
        answers = [Answers("a", {"reward": (generator.random(4) < p).astype(float)}) for p in chances]
        metrics = validation_metrics(answers)
        covered += abs(metrics["val-core/a/reward/mean@4"] - 0.6) <= metrics["val-aux/a/reward/mean@4/ci95"]
    assert 285 - 5 * 3.8 <= covered <= 300


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

    answers = [Answers("a", {"reward": [float(i % 3 == 0) for i in range(16)]}, [str(i % 5) for i in range(16)]) for _ in range(100)]
    begin = time.monotonic()
    for a in answers:
        prompt_metrics(a)
    assert time.monotonic() - begin < 10
