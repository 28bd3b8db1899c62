"""Metrics of the groups that a step trains on, of those between two steps, and of the weights that made them."""

import numpy as np

from mrl.data.samples import SampleRows
from mrl.generate.rollouts import group_metrics
from mrl.record.metrics import (
    distribution,
)
from mrl.reward.items import RewardResult
from mrl.schedule.buffer import GroupBuffer
from mrl.schedule.staleness import Schedule


def batch_metrics(
    schedule: Schedule, draw: int, made: list[RewardResult], filtered: int, uniform: int
) -> dict[str, float]:
    """Returns metrics of the groups that a step trains on, and of those filtered for it.

    `draw`: prompts of a draw. `made`: rewards of all these groups. `filtered`: number of filtered groups. `uniform`:
    number of the other groups whose responses all have the same value.
    """
    generated = len(made) // schedule.responses
    draws = -(-generated // schedule.unit) * schedule.unit / draw
    return group_metrics(draws, (filtered + uniform) / generated, generated - filtered, made)


def buffer_metrics(buffer: GroupBuffer) -> dict[str, float]:
    """Returns metrics of the groups between two steps.

    At other moments the counts would depend on the engines' speed.
    """
    counts = buffer.counts
    lengths = {
        f"async/dropped_response_length/{cause}": tally.mean_length for cause, tally in sorted(counts.dropped.items())
    }
    return lengths | {
        "async/groups_ahead": float(len(buffer.groups)),
        "async/dropped_groups": float(sum(tally.groups for tally in counts.dropped.values())),
        "async/requeued_groups": float(counts.requeued.groups),
        "async/kept_response_length": counts.kept.mean_length,
    }


def version_metrics(step: int, rows: SampleRows) -> dict[str, float]:
    """Returns metrics of the weights that generated `rows`, relative to those before the update of `step`."""
    firsts = np.cumsum(rows.span_counts) - rows.span_counts
    ages = step - np.minimum.reduceat(rows.span_versions, firsts)
    return {
        **distribution("training/off_policy/trajectory_staleness", ages.tolist()),
        "async/versions_per_sample": float(np.mean(rows.span_counts)),
        "async/recomputed_tokens": float(recomputed_tokens(rows)),
    }


def recomputed_tokens(rows: SampleRows) -> int:
    """Counts tokens that engines computed again because a response continued with new weights."""
    firsts = np.cumsum(rows.span_counts) - rows.span_counts
    prompts = int((rows.prompt_lengths * (rows.span_counts - 1)).sum())
    return prompts + int(rows.span_starts.sum() - rows.span_starts[firsts].sum())
