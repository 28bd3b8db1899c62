"""Responses of a step that are shown to people, with the trainer's log-probs beside those of generation.

`shown_rows.json` in the run directory holds the newest step alone: `step`, and `log_probs` by `sample_id`. They come
from the trainer, with the weights that generated the tokens; at most LONGEST are kept. Log-probs of engines are in
`samples/`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mrl.data.samples import UNJUDGED
from mrl.plain_files import read_json
from mrl.record.run_dir import SHOWN_ROWS, json_line, write_text

EACH = 3  # responses of each kind
LONGEST = 1500  # tokens of a response


@dataclass(frozen=True)
class ShownRows:
    """The trainer's log-probs of a step's samples, by `sample_id`."""

    step: int
    log_probs: dict[int, list[float | None]]


def extreme_rows(
    scores: Sequence[float],
    prompts: Sequence[int],
    reasons: Sequence[str | None],
    gaps: Sequence[float] | None = None,
) -> dict[str, list[int]]:
    """Returns rows by kind, at most EACH, none in two kinds: `best` and `worst` scores, and the largest `gaps`
    (`changed`).

    They have different prompts as far as possible. Rows whose environment failed have no score and are left out.
    """
    judged = [row for row, reason in enumerate(reasons) if reason not in UNJUDGED]
    order = sorted(judged, key=lambda row: scores[row])
    shown = {"best": _of_different(order[::-1], prompts)}
    shown["worst"] = _of_different([row for row in order if row not in shown["best"]], prompts)
    if gaps is not None:
        chosen = {*shown["best"], *shown["worst"]}
        furthest = sorted(set(judged) - chosen, key=lambda row: (-gaps[row], row))
        shown["changed"] = _of_different(furthest, prompts)
    return shown


def _of_different(order: Sequence[int], prompts: Sequence[int]) -> list[int]:
    """Returns the first EACH rows. Rows of a prompt that is already included come after all others."""
    seen: set[int] = set()
    first = [row for row in order if not (prompts[row] in seen or seen.add(prompts[row]))]
    return [*first, *(row for row in order if row not in first[:EACH])][:EACH]


def write_shown_rows(folder: Path, step: int, log_probs: Mapping[int, np.ndarray]) -> None:
    """Writes the file, which replaces that of the step before."""
    values = {}
    for row, of_tokens in log_probs.items():
        values[str(row)] = [round(float(value), 7) for value in of_tokens[:LONGEST]]
    write_text(folder / SHOWN_ROWS, json_line({"step": step, "log_probs": values}))


def read_shown_rows(folder: Path) -> ShownRows | None:
    """Reads the file; None if it cannot be read, as in a run that takes its log-probs from the update."""
    try:
        row = read_json(folder / SHOWN_ROWS)
        return ShownRows(int(row["step"]), {int(number): list(values) for number, values in row["log_probs"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
