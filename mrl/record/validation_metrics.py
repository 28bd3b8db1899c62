"""Scores of a validation under verl's names: mean@n, best@k, worst@k, maj@k of each quantity, by data source. numpy
only.

A prompt has n responses, and best@k is the value of the best of k of them. verl estimates it with 1000 bootstrap draws
of k with replacement. Here it is the exact expectation of that draw (Efron's ideal bootstrap), without sampling noise.
A majority has no such formula and is drawn 1000 times with seed 42, as in verl.

`/ci95_low` and `/ci95_high` are the 95 % interval over prompts, because responses to a prompt are not independent. They
are left out for a single prompt. Quantities of only 0 and 1 get Wilson's interval. It stays within 0 and 1 and has a
width even if all are right. Other quantities get the percentile bootstrap's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 1000
SEED = 42
REWARD = "reward"
ACC = "acc"
PRED = "pred"
Z95 = 1.959964  # 95 % of a normal distribution are within so many standard deviations


@dataclass(frozen=True)
class Answers:
    """All responses to one prompt: quantities by name, [n] each, and each response's answer for majorities, where
    known.
    """

    data_source: str
    values: Mapping[str, Sequence[float]]
    preds: Sequence[str] | None = None


def subset_sizes(n: int) -> list[int]:
    """Returns the k of best@k: 2, 4, 8, ... below n, and n. Empty for a single response."""
    sizes = [2**i for i in range(1, n.bit_length()) if 2**i < n]
    if n > 1:
        return [*sizes, n]
    return []


def extreme_of(values: np.ndarray, k: int, best: bool = True) -> tuple[float, float]:
    """Returns (mean, standard deviation) of the largest or smallest of k draws with replacement from `values`, [n].

    The largest is at most the i-th smallest value with probability (i/n)^k (order statistics).
    """
    ordered = np.sort(np.asarray(values, np.float64)) if best else -np.sort(-np.asarray(values, np.float64))
    chance = np.diff((np.arange(len(ordered) + 1) / len(ordered)) ** k)
    mean = float(chance @ ordered)
    return mean, float(np.sqrt(max(chance @ (ordered - mean) ** 2, 0.0)))


def majority_of(values: np.ndarray, preds: Sequence[str], k: int) -> tuple[float, float]:
    """Returns (mean, standard deviation) of the value of the most frequent answer among k draws with replacement.

    Among equally frequent answers the first drawn wins, and its first drawn value counts, as in verl.
    """
    _, codes = np.unique(np.asarray(preds, dtype=object).astype(str), return_inverse=True)
    draws = np.random.PCG64(np.random.SeedSequence(SEED)).random_raw(DRAWS * k)
    drawn = (draws % np.uint64(len(codes))).astype(np.int64).reshape(DRAWS, k)
    chosen = codes[drawn]
    same = chosen[:, :, None] == chosen[:, None, :]  # [draws, k, k]
    first = np.argmax(same.sum(2), axis=1)  # the first position with a most frequent answer
    winner_values = np.asarray(values, np.float64)[drawn[np.arange(DRAWS), first]]
    return float(winner_values.mean()), float(winner_values.std())


def prompt_metrics(answers: Answers) -> dict[str, dict[str, float]]:
    """Returns {quantity: {"mean@n": ..., "best@k/mean": ...}} of one prompt."""
    by_quantity: dict[str, dict[str, float]] = {}
    for name, given in answers.values.items():
        values = np.asarray(given, np.float64)
        n = len(values)
        metrics = {f"mean@{n}": float(values.mean())}
        if n > 1:
            metrics[f"std@{n}"] = float(values.std())
        for k in subset_sizes(n):
            metrics[f"best@{k}/mean"], metrics[f"best@{k}/std"] = extreme_of(values, k)
            metrics[f"worst@{k}/mean"], metrics[f"worst@{k}/std"] = extreme_of(values, k, best=False)
            if answers.preds is not None:
                metrics[f"maj@{k}/mean"], metrics[f"maj@{k}/std"] = majority_of(values, answers.preds, k)
        by_quantity[name] = metrics
    return by_quantity


def validation_metrics(answers: Sequence[Answers]) -> dict[str, float]:
    """Returns `val-core/SOURCE/QUANTITY/METRIC` and `val-aux/...` over all prompts.

    Core metrics are, as in verl, mean, maj and best at the full n. They use `acc` if the reward gives it, else
    `reward`. All others are auxiliary. A quantity that only some responses have is left out.
    """
    metrics: dict[str, float] = {}
    for source in sorted({a.data_source for a in answers}):
        source_answers = [a for a in answers if a.data_source == source]
        shared = set.intersection(*(set(a.values) for a in source_answers))
        n = max(len(a.values[REWARD]) for a in source_answers)
        by_prompt = [prompt_metrics(a) for a in source_answers]
        for quantity in sorted(shared, key=lambda name: (name != REWARD, name)):
            core = quantity == (ACC if ACC in shared else REWARD)
            binary = all(value in (0, 1) for a in source_answers for value in a.values[quantity])
            metrics |= _over_prompts(source, quantity, [p[quantity] for p in by_prompt], n, core, binary)
    return metrics


def wilson95(values: np.ndarray, responses: int) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of `values`, [prompts], each the mean of `responses` zeros and ones.

    With one response to a prompt it is Wilson's (1927, eq. 5). With several, it uses the number of independent answers
    that would vary equally (Korn and Graubard 1998): at least one for a prompt, at most all responses. If all values
    are equal, that number is unknown, and one for a prompt is used.
    """
    count = len(values)
    mean = float(values.mean())
    variance = float(values.var(ddof=1)) / count
    alike = mean * (1 - mean) / variance if variance else count if mean in (0.0, 1.0) else count * responses
    answers = min(max(alike, count), count * responses)
    middle = (mean + Z95**2 / (2 * answers)) / (1 + Z95**2 / answers)
    half = Z95 * np.sqrt(mean * (1 - mean) / answers + (Z95 / (2 * answers)) ** 2) / (1 + Z95**2 / answers)
    return float(max(middle - half, 0.0)), float(min(middle + half, 1.0))


def bootstrap95(values: np.ndarray) -> tuple[float, float]:
    """Returns the 2.5 % and 97.5 % quantiles of the mean of `values`, [prompts], over draws of prompts with
    replacement.
    """
    draws = np.random.PCG64(np.random.SeedSequence(SEED)).random_raw(DRAWS * len(values))
    drawn = (draws % np.uint64(len(values))).astype(np.int64).reshape(DRAWS, len(values))
    low, high = np.quantile(values[drawn].mean(1), (0.025, 0.975))
    return float(low), float(high)


def _over_prompts(
    source: str, quantity: str, rows: list[dict[str, float]], n: int, core: bool, binary: bool
) -> dict[str, float]:
    metrics = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = np.array([row[name] for row in rows if name in row])
        section = "val-aux"
        if core and name.startswith(("mean@", "maj@", "best@")) and _at(name) == n:
            section = "val-core"
        metrics[f"{section}/{source}/{quantity}/{name}"] = float(values.mean())
        if len(values) > 1 and not name.startswith("std@") and not name.endswith("/std"):
            low, high = wilson95(values, n) if binary else bootstrap95(values)
            metrics |= {
                f"val-aux/{source}/{quantity}/{name}/ci95_{end}": value for end, value in (("low", low), ("high", high))
            }
    return metrics


def _at(name: str) -> int:
    return int(name.split("@")[1].split("/")[0])


def evenly_spread(count: int, limit: int) -> list[int]:
    """Returns at most `limit` of `count` indices, the same at every validation, for the responses shown to people."""
    limit = min(count, limit)
    return [i * count // limit for i in range(limit)]
