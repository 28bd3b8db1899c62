"""Numbers of a validation under verl's names: mean@n, best@k, worst@k, maj@k of each quantity, by data source. numpy.

A prompt has n responses; best@k is what the best of k of them is worth. verl estimates it with 1000 bootstrap draws of
k with replacement; here it is the exact expectation of that draw (Efron's ideal bootstrap), so it has no noise of its
own. A majority has no such form and is drawn, 1000 times, seed 42, as in verl. `/ci95` is half the width of the 95 %
interval over prompts, 1.96 standard errors of the prompts' own values: responses of one prompt are not independent. It
is left out for a single prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

DRAWS, SEED = 1000, 42
REWARD, ACC, PRED = "reward", "acc", "pred"


@dataclass(frozen=True)
class Answers:
    """All responses to one prompt: quantities by name, [n] each, and what each response answered, for majorities, where it is known."""

    data_source: str
    values: Mapping[str, Sequence[float]]
    preds: Sequence[str] | None = None


def subset_sizes(n: int) -> list[int]:
    """2, 4, 8, ... below n, and n: the k of best@k. None for a single response."""
    sizes = [2**i for i in range(1, n.bit_length()) if 2**i < n]
    return [*sizes, n] if n > 1 else []


def extreme_of(values: np.ndarray, k: int, best: bool = True) -> tuple[float, float]:
    """(mean, standard deviation) of the largest, or smallest, of k draws with replacement from `values`, [n].

    The largest is at most the i-th smallest value with chance (i/n)^k (order statistics of the empirical distribution).
    """
    ordered = np.sort(np.asarray(values, np.float64)) if best else -np.sort(-np.asarray(values, np.float64))
    chance = np.diff((np.arange(len(ordered) + 1) / len(ordered)) ** k)
    mean = float(chance @ ordered)
    return mean, float(np.sqrt(max(chance @ (ordered - mean) ** 2, 0.0)))


def majority_of(values: np.ndarray, preds: Sequence[str], k: int) -> tuple[float, float]:
    """(mean, standard deviation) of the value of the most frequent answer among k draws with replacement.

    Among equally frequent answers the one drawn first wins, and its first drawn value counts, as in verl.
    """
    _, codes = np.unique(np.asarray(preds, dtype=object).astype(str), return_inverse=True)
    words = np.random.PCG64(np.random.SeedSequence(SEED)).random_raw(DRAWS * k)
    drawn = (words % np.uint64(len(codes))).astype(np.int64).reshape(DRAWS, k)
    chosen = codes[drawn]
    same = chosen[:, :, None] == chosen[:, None, :]  # [draws, k, k]
    first = np.argmax(same.sum(2), axis=1)  # the first position whose answer is as frequent as any
    winner_values = np.asarray(values, np.float64)[drawn[np.arange(DRAWS), first]]
    return float(winner_values.mean()), float(winner_values.std())


def prompt_metrics(answers: Answers) -> dict[str, dict[str, float]]:
    """{quantity: {"mean@n": ..., "best@k/mean": ...}} of one prompt."""
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
    """`val-core/SOURCE/QUANTITY/METRIC` and `val-aux/...` over all prompts.

    Core, as in verl: mean, maj and best at the full n, of `acc` where the reward gives one, else of `reward`;
    everything else is auxiliary. A quantity that only some responses have is left out.
    """
    metrics: dict[str, float] = {}
    for source in sorted({a.data_source for a in answers}):
        source_answers = [a for a in answers if a.data_source == source]
        shared = set.intersection(*(set(a.values) for a in source_answers))
        n = max(len(a.values[REWARD]) for a in source_answers)
        by_prompt = [prompt_metrics(a) for a in source_answers]
        for quantity in sorted(shared, key=lambda name: (name != REWARD, name)):
            core = quantity == (ACC if ACC in shared else REWARD)
            metrics |= _over_prompts(source, quantity, [p[quantity] for p in by_prompt], n, core)
    return metrics


def _over_prompts(source: str, quantity: str, rows: list[dict[str, float]], n: int, core: bool) -> dict[str, float]:
    metrics = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = np.array([row[name] for row in rows if name in row])
        section = "val-core" if core and name.startswith(("mean@", "maj@", "best@")) and _at(name) == n else "val-aux"
        metrics[f"{section}/{source}/{quantity}/{name}"] = float(values.mean())
        if len(values) > 1 and not name.startswith("std@") and not name.endswith("/std"):
            half = 1.96 * float(values.std(ddof=1)) / float(np.sqrt(len(values)))
            metrics[f"val-aux/{source}/{quantity}/{name}/ci95"] = half
    return metrics


def _at(name: str) -> int:
    return int(name.split("@")[1].split("/")[0])


def evenly_spread(count: int, limit: int) -> list[int]:
    """Indices of at most `limit` of `count` responses, the same at every validation: those that people are shown."""
    limit = min(count, limit)
    return [i * count // limit for i in range(limit)]
