"""Metrics as plain numbers: reduces parts, computes them from a step's batch, times its phases. Uses numpy only."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from mrl.crash_points import crash_point
from mrl.data.samples import CALL_REASONS, STOP_REASONS, SampleRows
from mrl.record.spec import DEVIATIONS, metric_spec

WHOLE = "step"  # the phase that contains all others, which do not overlap
GENERATING = "gen"  # its time is divided by sampled tokens, that of other phases by all tokens
_FELL = CALL_REASONS.index("fell")
# what an agent asked for, which is not a call, and its metrics
_ASKED = {CALL_REASONS.index("overridden"): "overridden", CALL_REASONS.index("retry"): "retries",
    CALL_REASONS.index("branch"): "branches", CALL_REASONS.index("untrained"): "untrained_branches",
    CALL_REASONS.index("lost_reward"): "lost_rewards"}  # fmt: skip
_RIGHT = (*map(CALL_REASONS.index, ("ok", "refused", "not_called")), _FELL)  # the tool is not at fault
PER_TOKEN_PHASES = (GENERATING, "ref", "teacher", "old_log_prob", "values", "adv", "update_critic", "update_actor")


def reduce_parts(parts: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Reduces each metric to one number by its declared kind, over updates and ranks in the given order.

    Micro-batches were added up before (`merge` in mrl/algo/aggregate.py), so a loss gives means and sums alone.

    A part of a mean is (sum of value x weight, sum of weight), of other kinds (value, 1). A mean without weight is left
    out. Second moments become standard deviations. Raises KeyError for a metric that is not declared.
    """
    gathered: dict[str, list[tuple[float, float]]] = {}
    for named in parts:
        for name, part in named.items():
            gathered.setdefault(name, []).append(part)
    reduced = {name: _reduce(metric_spec(name).kind, pairs) for name, pairs in gathered.items()}
    return _with_deviations({name: value for name, value in reduced.items() if value is not None})


def _reduce(kind: str, pairs: Sequence[tuple[float, float]]) -> float | None:
    values = [value for value, _ in pairs]
    match kind:
        case "mean":
            weight = math.fsum(w for _, w in pairs)
            if weight:
                return math.fsum(values) / weight
            return None
        case "sum":
            return math.fsum(values)
        case "max" | "min":
            # numpy's functions keep a NaN, so that it is seen
            return float((np.max if kind == "max" else np.min)(values))
        case _:
            return values[-1]


def _with_deviations(values: dict[str, float]) -> dict[str, float]:
    for name, (mean, square) in DEVIATIONS.items():
        if mean in values and square in values:
            values[name] = math.sqrt(max(values.pop(square) - values[mean] ** 2, 0.0))
    return values


def distribution(prefix: str, values: np.ndarray | Sequence[float]) -> dict[str, float]:
    """Returns `prefix/mean`, `prefix/max` and `prefix/min` of the values; nothing if there are none."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        return {}
    return {
        f"{prefix}/mean": float(array.mean()),
        f"{prefix}/max": float(array.max()),
        f"{prefix}/min": float(array.min()),
    }


def reward_metrics(scores: np.ndarray, rewards: np.ndarray) -> dict[str, float]:
    """Returns `critic/score/*` (from the reward function) and `critic/rewards/*` (after penalties). Both inputs:
    [batch].
    """
    return distribution("critic/score", scores) | distribution("critic/rewards", rewards)


def length_metrics(rows: SampleRows, max_prompt_length: int, max_response_length: int) -> dict[str, float]:
    """Returns `prompt_length/*` and `response_length/*` of sampled tokens. The length limit also counts context."""
    metrics = distribution("prompt_length", rows.prompt_lengths)
    metrics |= _clip_ratio("prompt_length", rows.prompt_lengths, max_prompt_length)
    metrics |= distribution("response_length", rows.sampled_lengths)
    return metrics | _clip_ratio("response_length", rows.longest_responses, max_response_length)


def turn_metrics(rows: SampleRows) -> dict[str, float]:
    """Returns `turns/*`; nothing where all responses have one turn and no context."""
    if rows.turn_counts is None:
        return {}
    ended = {reason: rows.stop_reason == STOP_REASONS.index(reason) for reason in STOP_REASONS}
    return {
        "turns/mean": float(rows.turn_counts.mean()),
        "turns/max": float(rows.turn_counts.max()),
        "turns/context_tokens": float(rows.context_lengths.mean()),
        **{f"turns/ended/{reason}": float(of_rows.mean()) for reason, of_rows in ended.items()},
        **_call_metrics(rows),
    }


def _call_metrics(rows: SampleRows) -> dict[str, float]:
    """Returns calls, failures and seconds of each tool, calls of unknown tools, and what an agent asked for."""
    calls = ~np.isin(rows.call_reasons, list(_ASKED))
    names = [name.decode() for name in rows.call_names[calls].tolist()]
    reasons = rows.call_reasons[calls]
    seconds = rows.call_seconds[calls]
    metrics = {"turns/calls": len(names) / len(rows), "turns/unread_calls": float(names.count(""))}
    metrics["turns/fell"] = float((reasons == _FELL).sum())
    failed = ~np.isin(reasons, _RIGHT)
    for name in sorted(set(names) - {""}):
        own = np.array([each == name for each in names])
        metrics[f"tools/{name}/calls"] = float(own.sum())
        metrics[f"tools/{name}/failed"] = float(failed[own].sum())
        metrics[f"tools/{name}/seconds"] = float(seconds[own].sum(dtype=np.float64))
    found = Counter(rows.call_reasons.tolist())
    return metrics | {f"endpoint/{name}": float(found[reason]) for reason, name in _ASKED.items() if found[reason]}


def advantage_metrics(of_rows: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns advantages over the step's trained tokens; nothing without tokens.

    They are written as `critic/advantages/*` and as `critic/returns/*`: where responses of a group are compared the two
    are equal, and other estimators' returns replace them.
    """
    return token_metrics("critic/advantages", of_rows) | token_metrics("critic/returns", of_rows)


def token_metrics(prefix: str, of_rows: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns mean and extremes over the step's trained tokens; nothing without tokens.

    `of_rows` has for each row of the step how many tokens are trained (`count`, 0 for a row left out), and the `sum`,
    `low` and `high` of their values.
    """
    count = int(of_rows["count"].sum())
    if not count:
        return {}
    return {
        f"{prefix}/mean": math.fsum(of_rows["sum"].tolist()) / count,
        f"{prefix}/max": float(of_rows["high"].max()),
        f"{prefix}/min": float(of_rows["low"].min()),
    }


def _clip_ratio(prefix: str, lengths: np.ndarray, longest: int) -> dict[str, float]:
    return {f"{prefix}/clip_ratio": float((lengths >= longest).mean())}


def seqlen_metrics(lengths: np.ndarray, trained_tokens: Sequence[int]) -> dict[str, float]:
    """Returns `global_seqlen/*`: tokens of each data-parallel rank, for an equal cut of the batch in order and as
    trained.

    `lengths` are tokens of each sequence, [batch]. `trained_tokens` are those of each data-parallel rank. As in verl,
    `minmax_diff` belongs to the cut in order.
    """
    plain = np.array([share.sum() for share in np.array_split(lengths, len(trained_tokens))])
    return {
        "global_seqlen/min": float(plain.min()),
        "global_seqlen/max": float(plain.max()),
        "global_seqlen/minmax_diff": float(plain.max() - plain.min()),
        "global_seqlen/balanced_min": float(min(trained_tokens)),
        "global_seqlen/balanced_max": float(max(trained_tokens)),
        "global_seqlen/mean": float(plain.mean()),
    }


def speed_metrics(rows: SampleRows, seconds: Mapping[str, float], devices: int) -> dict[str, float]:
    """Returns `perf/*` and `timing_per_token_ms/*` from the seconds of phases (without the `timing_s/` prefix).

    `devices` counts all devices of the run, of trainer and engines. Throughput is prompt and response tokens, divided
    by step time and devices.
    """
    sampled = int(rows.sampled_lengths.sum())
    total = int(rows.lengths.sum())
    shares = {name: sampled if name == GENERATING else total for name in PER_TOKEN_PHASES}
    metrics = {
        f"timing_per_token_ms/{name}": 1e3 * seconds[name] / tokens
        for name, tokens in shares.items()
        if name in seconds and tokens
    }
    metrics["perf/total_num_tokens"] = float(total)
    if seconds.get("step"):
        metrics |= {"perf/time_per_step": seconds["step"], "perf/throughput": total / seconds["step"] / devices}
    return metrics


class GeneratingTime:
    """Time during which engines beside training had requests, and the tokens that they returned."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0
        self._since = None

    def note(self, generates: bool, tokens: int, now: float) -> None:
        """Records at second `now` whether engines have requests. `tokens` came back since the last call."""
        if self._since is not None:
            self._seconds += now - self._since
        self._tokens += tokens
        self._since = now if generates else None

    def metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call; nothing if no token came back."""
        metrics = {}
        if self._tokens:
            metrics = {f"timing_per_token_ms/{GENERATING}": 1e3 * self._seconds / self._tokens}
        self._seconds = 0.0
        self._tokens = 0
        return metrics


class PhaseTimer:
    """Measures seconds by phase: `with timer("gen"): ...`.

    Times of repeated phases add up. Phases may nest, and each counts its whole time.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Times the block, also when it raises."""
        crash_point("phase", phase)
        start = self._clock()
        try:
            yield
        finally:
            self.add(phase, self._clock() - start)

    def add(self, phase: str, seconds: float) -> None:
        """Adds seconds of a phase that another process has timed."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of the ended phases, in the order in which they first ended. A live, read-only view."""
        return MappingProxyType(self._seconds)

    def metrics(self) -> dict[str, float]:
        """Returns `timing_s/PHASE` of every ended phase.

        `outside` is the time of an ended WHOLE that no phase counts.
        """
        seconds = dict(self._seconds)
        if WHOLE in seconds:
            seconds["outside"] = 2 * seconds[WHOLE] - math.fsum(seconds.values())
        return {f"timing_s/{phase}": value for phase, value in seconds.items()}


@dataclass
class StepLine:
    """Collects the metrics of one step."""

    phase: PhaseTimer = field(default_factory=PhaseTimer)
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics. A later value replaces an earlier one."""
        self.metrics |= metrics
