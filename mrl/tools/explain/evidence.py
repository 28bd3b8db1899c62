"""What the stored samples of a step say by themselves: versions, groups, rewards, and where log-probs differ."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

import numpy as np

from mrl.config.schema import RunConfig
from mrl.data.samples import NO_ENGINE
from mrl.record.sample_files import StepFile, read_samples, readable

_STANDS_OUT = 6.0  # robust deviations of a row among the rows of its step
_FEW = 0.1  # share of the rows that counts as few of them
_STEEP = 3.0  # last quarter of a response against the first: differences grow along it
_OF_LENGTH = 0.8  # correlation of score and length at which a reward is said to pay it
_BY_CHANCE = 0.01  # of rows that are all of one engine
_REPLICA = re.compile(r"actor/replica_grad_norm/(\d+)")
_LEAST_GAP = 1e-4  # nats: below it differences are rounding


@dataclass(frozen=True)
class StepSamples:
    """Numbers of a step's rows. `gaps`: mean absolute difference of log-probs of each, nats; NaN where unknown."""

    sample_id: np.ndarray
    prompt_id: np.ndarray
    group_id: np.ndarray
    scores: np.ndarray
    lengths: np.ndarray
    cut_off: np.ndarray  # bool: ended by a limit of tokens
    versions: np.ndarray
    engines: np.ndarray  # NO_ENGINE where it is not known
    gaps: np.ndarray
    along: np.ndarray  # mean absolute difference in each quarter of the responses
    slope: float  # of the trainer's log-probs on the engine's; 1 where both have one temperature; NaN: unknown
    mean_slope_error: float

    @classmethod
    def read(cls, folder: Path, step: int) -> "StepSamples":
        """Reads a step. Raises FileNotFoundError without one, and DataError for a damaged one."""
        with readable(folder, step):
            rows = read_samples(folder, step)
            gaps = StepFile(folder, step).differences([row["sample_id"] for row in rows])
        numbers = {name: np.array([row[name] for row in rows]) for name in ("sample_id", "prompt_id", "group_id")}
        slope, error = _slope(rows, gaps)
        return cls(
            **numbers,
            scores=np.array([float(row["reward"]["score"]) for row in rows]),
            lengths=np.array([len(row["response_ids"]) for row in rows]),
            cut_off=np.array([row["stop_reason"] == "length" for row in rows]),
            versions=np.array([row["weight_version"] for row in rows]),
            engines=np.array([NO_ENGINE if row.get("engine") is None else row["engine"] for row in rows]),
            gaps=np.array([np.abs(gap).mean() if gap else np.nan for gap in gaps]),
            along=_along(gaps),
            slope=slope,
            mean_slope_error=error,
        )


def _along(gaps: Sequence[Sequence[float] | None]) -> np.ndarray:
    parts = [[], [], [], []]
    for gap in gaps:
        if gap and len(gap) >= 8:
            for part, values in zip(parts, np.array_split(np.abs(gap), 4), strict=True):
                part.append(values.mean())
    return np.array([np.mean(part) if part else np.nan for part in parts])


def _slope(rows: Sequence[Mapping[str, Any]], gaps: Sequence[Sequence[float] | None]) -> tuple[float, float]:
    """Returns the slope of the trainer's log-probs on the engine's through 0, and its deviation."""
    pairs = [(row["rollout_log_probs"], gap) for row, gap in zip(rows, gaps, strict=True) if gap]
    if not pairs:
        return np.nan, np.nan
    engine = np.concatenate([np.array(values) for values, _ in pairs])
    trainer = engine + np.concatenate([np.array(gap) for _, gap in pairs])
    square = float((engine**2).sum())
    if len(engine) < 16 or square <= 0:
        return np.nan, np.nan
    slope = float((engine * trainer).sum() / square)
    left = trainer - slope * engine
    return slope, float(((left**2).sum() / (len(engine) - 1) / square) ** 0.5)


def stands_out(values: np.ndarray) -> np.ndarray:
    """Tells which values are far from the others, bool, by median and median deviation."""
    known = values[np.isfinite(values)]
    if not len(known):
        return np.zeros(len(values), bool)
    center = np.median(known)
    spread = 1.4826 * np.median(np.abs(known - center)) or np.abs(known - center).mean() or 1.0
    return np.nan_to_num(np.abs(values - center) / spread) > _STANDS_OUT


def of_versions(config: RunConfig, step: int, samples: StepSamples) -> str:
    """Says that responses are of other weights than the step's, in the synchronous order; empty if they are not."""
    if config.trainer.schedule != "sync":
        return ""
    old = Counter(samples.versions[samples.versions != step - 1].tolist())
    if not old:
        return ""
    shown = ", ".join(f"version {version} in {count}" for version, count in sorted(old.items()))
    whose = of_one_engine(samples, samples.versions != step - 1)
    return f"{sum(old.values())} of {len(samples.versions)} responses are not of version {step - 1}: {shown}{whose}"


def of_replicas(row: Mapping[str, Any], usual: Mapping[str, Any], below: float) -> tuple[int, str] | None:
    """Names the one replica of which a step lacks gradients: what it added is smaller than `below` times its usual, and
    what the others added is not. Returns its number and the evidence.
    """
    pairs = {
        int(found[1]): (row[name], usual[name])
        for name in row
        if (found := _REPLICA.fullmatch(name)) and row[name] is not None and usual.get(name)
    }
    lost = [number for number, (was, expected) in pairs.items() if was < below * expected]
    if len(lost) != 1 or len(pairs) < 2:
        return None
    was, expected = pairs[lost[0]]
    others = ", ".join(f"{norm:.3g} of {usually:.3g}" for number, (norm, usually) in pairs.items() if number != lost[0])
    return lost[0], (
        f"replica {lost[0]} added a gradient of norm {was:.3g} where {expected:.3g} is right; others: {others}"
    )


def of_cut_off(config: RunConfig, samples: StepSamples) -> str:
    """Says that responses are cut off below data.max_response_length; empty if none is, as in runs of several turns."""
    longest = config.data.max_response_length
    early = samples.cut_off & (samples.lengths < longest)
    if config.rollout.turns is not None or early.sum() <= _FEW * len(early):
        return ""
    lengths = samples.lengths[early]
    return (
        f"{early.sum()} of {len(early)} responses are cut off at {lengths.min()} to {lengths.max()} tokens, and "
        f"data.max_response_length is {longest}{of_one_engine(samples, early)}"
    )


def of_groups(samples: StepSamples) -> str:
    """Says that groups have a single response; empty if none has."""
    sizes = Counter(samples.group_id.tolist())
    alone = sum(size == 1 for size in sizes.values())
    if alone and len(sizes) > 1:
        return f"{alone} of {len(sizes)} groups have one response, which nothing can be compared with"
    return ""


def of_length(now: StepSamples, before: Sequence[StepSamples]) -> str:
    """Says that the score follows the length, which it did not before; empty otherwise."""

    def correlation(samples: StepSamples) -> float:
        if samples.scores.std() == 0 or samples.lengths.std() == 0:
            return 0.0
        return float(np.corrcoef(samples.scores, samples.lengths)[0, 1])

    found = correlation(now)
    usual = float(np.median([correlation(each) for each in before])) if before else 0.0
    if found > _OF_LENGTH and usual < _OF_LENGTH / 2:
        return f"scores follow the lengths of responses (correlation {found:.2f}, before {usual:.2f})"
    return ""


EVERYWHERE = "it is the same in all responses and places: weights or arithmetic of a whole engine"
NOT_KEPT = "where, the samples do not say"


def of_one_engine(samples: StepSamples, rows: np.ndarray) -> str:
    """Says that the rows marked in `rows`, bool [rows], are all of one engine of several, in words that follow; empty
    where they are not, or where so few rows drawn at random would be of one engine in more than a hundredth of draws.
    """
    engines = samples.engines[samples.engines != NO_ENGINE]
    own = np.unique(samples.engines[rows])
    sizes = np.unique(engines, return_counts=True)[1].tolist()
    if len(sizes) < 2 or len(own) != 1 or own[0] == NO_ENGINE:
        return ""
    drawn = int(rows.sum())  # hypergeometric: all of them of the same engine, whichever it is
    if sum(comb(size, drawn) for size in sizes) > _BY_CHANCE * comb(len(engines), drawn):
        return ""
    versions = ", ".join(map(str, np.unique(samples.versions[rows])))
    return f"; all of them are engine {own[0]}'s, with weights of version {versions}"


def of_far_rows(samples: StepSamples) -> str:
    """Says that responses in which generation and training differ are of one engine, as `of_one_engine` does. Those
    differ by more than a tenth of what the quarter with the largest differences has on average.
    """
    gaps = np.nan_to_num(samples.gaps)
    if not len(gaps):
        return ""
    most = np.sort(gaps)[-max(1, len(gaps) // 4) :].mean()
    return of_one_engine(samples, gaps > max(most / 10, _LEAST_GAP)) if most > _LEAST_GAP else ""


def of_mismatch(samples: StepSamples) -> list[str]:
    """Says where generation and training differ, the most telling first; empty where they agree."""
    known = samples.gaps[np.isfinite(samples.gaps)]
    if not len(known):
        return [NOT_KEPT]
    if known.mean() < _LEAST_GAP:
        return []
    found = []
    rows = np.flatnonzero(stands_out(samples.gaps) & (samples.gaps > known.mean()))
    if 0 < len(rows) <= _FEW * len(samples.gaps):
        ids = ", ".join(str(each) for each in samples.sample_id[rows][:8])
        found.append(
            f"{len(rows)} of {len(known)} responses have most of it (ids {ids}): a fault of single requests or engines"
        )
    if np.isfinite(samples.slope) and abs(samples.slope - 1) > max(6 * samples.mean_slope_error, 0.02):
        found.append(
            f"the trainer's log-probs are {samples.slope:.3f} times the engine's in all responses: unlike "
            "temperatures, or a scale of the logits"
        )
    if np.isfinite(samples.along).all() and samples.along[3] > _STEEP * samples.along[0]:
        found.append(
            f"it grows along responses, from {samples.along[0]:.2g} to {samples.along[3]:.2g} nats: positions (rotary "
            "factors, yarn) or a cache"
        )
    if whose := of_far_rows(samples):
        return [each + whose for each in found] or [f"it is in a part of the responses{whose}"]
    return found or [EVERYWHERE]
