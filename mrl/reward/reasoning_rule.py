"""The rule `reasoning_gym`: the score of the package reasoning-gym for an answer to one of its rows (`pip install
'mrl[games]'`).

A row of scripts/make_rows.py tells how it was made, and is made again here. So an answer is judged by all that its
generator knows, not by a single solution.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any

from mrl.reward.answers import behind_reasoning

REASONING = "reasoning_gym"
SOURCE = f"{REASONING}/"  # data_source of its rows, followed by the name of the data set


def reasoning_gym(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the data set's score for the text in the last <answer> tags after the reasoning; 0 without them.

    Part `acc` is 1 only for the highest score. Raises ValueError for a row that cannot be reproduced.
    """
    begun = behind_reasoning(solution_str).rpartition("</answer>")[0]  # up to the end of the last answer
    if "<answer>" not in begun:
        return {"score": 0.0, "acc": 0.0}
    answer = begun.rpartition("<answer>")[2].strip()
    made = extra_info or {}
    keys = ("dataset", "seed", "size", "item")
    missing = [key for key in keys if key not in made]
    if missing:
        raise ValueError(f"extra_info has no {missing[0]!r}: the row was not made by scripts/make_rows.py")
    rows = rows_of(made["dataset"], made["seed"], made["size"], made.get("config", "{}"))
    entry = rows[made["item"]]
    if str(entry["answer"]) != str(ground_truth):
        raise ValueError(
            f"row {made['item']} of {made['dataset']} differs from the one that was made: make the rows again"
        )
    score = float(rows.score_answer(answer, entry))
    return {"score": score, "acc": float(score >= 1.0)}


@functools.lru_cache(maxsize=64)
def rows_of(dataset: str, seed: int, size: int, config: str = "{}") -> Any:
    """Returns the data set. `config` has further options as JSON. Raises ValueError for an unknown one."""
    return load_reasoning_gym().create_dataset(dataset, seed=seed, size=size, **json.loads(config))


def load_reasoning_gym() -> Any:
    """Returns the package, whose import takes a second. Raises ImportError with the cure."""
    try:
        import reasoning_gym as package
    except ImportError as error:
        raise ImportError(
            f"the rule `{REASONING}` needs the package reasoning-gym ({error}); pip install 'mrl[games]'"
        ) from error
    return package
