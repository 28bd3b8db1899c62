"""Joins the branches of a response whose agent went back into one row. It has one outcome, and each sampled token
occurs once.

Example: the model answers the prompt 7 8 with 1 2, and then 5 with 3. The agent goes back to the end of 1 2, and the
model answers 6 with 4.

                 prompt   response      turns
    one          7 8      1 2 5 3       1 2 (5) | 3
    other        7 8      1 2 6 4       1 2 (6) | 4        its first turn is shared
    as one row   7 8      1 2 5 3   7 8 1 2 6 4            1 2 (5) | 3 (7 8 1 2 6) | 4

A branch is a complete sequence and is computed separately, as the engine did. Tokens that it shares with an earlier
branch, including the prompt, are context. So no token is trained on twice. The row's stop reason is that of the
last branch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mrl.data.samples import Samples, with_branches, with_images, with_turns
from mrl.errors import DataError
from mrl.schedule.segments import merged_spans

_OF_IMAGES = ("image_names", "image_tokens", "image_grids")
_OF_TURNS = ("turn_stops", "turn_calls", "turn_seconds", "turn_rewards")


@dataclass(frozen=True)
class Branch:
    """One line of a conversation, from its prompt on."""

    row: Samples  # one row
    shared: int = 0  # number of its first turns that an earlier branch has too


def as_one_row(branches: Sequence[Branch]) -> Samples:
    """Returns one row with all branches in order. A single branch is returned unchanged, with columns of turns.

    Raises DataError if the first branch shares a turn, or a branch shares all its turns.
    """
    first, *later = branches
    if first.shared:
        raise DataError(f"the first branch of sample {first.row.sample_id[0]} shares turns with one that is not there")
    made = with_turns(first.row)
    if later:
        made = with_branches(made)
    for branch in later:
        made = _with_another(made, branch)
    return made


def _with_another(made: Samples, branch: Branch) -> Samples:
    own = with_turns(branch.row)
    if branch.shared >= own.turn_counts[0]:
        raise DataError(f"a branch of sample {own.sample_id[0]} says nothing that another does not say")
    prompt = int(own.prompt_lengths[0])
    start = int(made.response_lengths[0])
    is_new = own.sampled.copy()
    is_new[: own.turn_starts[branch.shared]] = False
    log_probs = np.where(is_new, own.rollout_log_probs, np.zeros((), own.rollout_log_probs.dtype))
    columns: dict[str, Any] = {
        "rollout_log_probs": _joined(made.rollout_log_probs, _behind(prompt, log_probs)),
        "sampled": _joined(made.sampled, _behind(prompt, is_new)),
        "token_ids": _joined(made.token_ids, own.token_ids),
        "turn_starts": _joined(made.turn_starts, own.turn_starts[branch.shared :] + (start + prompt)),
        "branch_starts": _joined(made.branch_starts, np.array([start])),
        "branch_prompts": _joined(made.branch_prompts, np.array([prompt])),
        **{name: _joined(getattr(made, name), getattr(own, name)[branch.shared :]) for name in _OF_TURNS},
        **_spans(made, own),
    }
    if made.routes is not None:
        columns["routes"] = _joined(made.routes, own.routes)
    if made.image_counts is not None or own.image_counts is not None:
        columns |= _images(made, own)
    return replace(
        made,
        **columns,
        response_lengths=made.response_lengths + own.lengths,
        sampled_counts=made.sampled_counts + int(is_new.sum()),
        turn_counts=made.turn_counts + (own.turn_counts - branch.shared),
        branch_counts=made.branch_counts + 1,
        stop_reason=own.stop_reason,
        finite=made.finite & own.finite,
        routed=made.routed | own.routed,
    )


def _images(made: Samples, own: Samples) -> dict[str, np.ndarray]:
    """Returns the images of both. One that the branches share stands in each."""
    first = with_images(made)
    second = with_images(own)
    starts = second.image_starts + int(made.lengths[0])
    return {
        "image_counts": first.image_counts + second.image_counts,
        "image_starts": _joined(first.image_starts, starts),
        **{name: _joined(getattr(first, name), getattr(second, name)) for name in _OF_IMAGES},
    }


def _spans(made: Samples, own: Samples) -> dict[str, np.ndarray]:
    """Returns the spans of both. Shared tokens of the later branch belong to its first span."""
    start = int(made.response_lengths[0])
    starts = own.span_starts + (start + int(own.prompt_lengths[0]))
    starts[0] = start
    both = np.concatenate([made.span_starts, starts])
    versions = np.concatenate([made.span_versions, own.span_versions])
    starts, versions = merged_spans(both, versions, start + int(own.lengths[0]))
    counts = np.array([len(starts)], made.span_counts.dtype)
    return {"span_starts": starts.astype(made.span_starts.dtype), "span_versions": versions, "span_counts": counts}


def _behind(prompt: int, values: np.ndarray) -> np.ndarray:
    """Returns a column of response tokens after `prompt` empty values."""
    return np.concatenate([np.zeros(prompt, values.dtype), values])


def _joined(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.concatenate([first, second.astype(first.dtype)])
