"""The rule `reasoning_gym`: what the package reasoning-gym says of an answer to a row that it made
(`pip install 'mrl[games]'`).

A row of scripts/make_rows.py says how it was made, and is made again here: an answer is judged by all that its maker
knows of it, and not by one solution of many.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any

from mrl.reward.answers import behind_reasoning

REASONING = "reasoning_gym"
SOURCE = f"{REASONING}/"  # data_source of its rows, before the name of the data set


def reasoning_gym(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What the row's data set gives for the text in the last <answer> tags behind the reasoning; 0 without them.

    Part `acc` is 1 for the highest score alone. Raises ValueError for a row that is not made again as it was.
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
        raise ValueError(f"row {made['item']} of {made['dataset']} is another one than it was: make the rows anew")
    score = float(rows.score_answer(answer, entry))
    return {"score": score, "acc": float(score >= 1.0)}


@functools.lru_cache(maxsize=64)
def rows_of(dataset: str, seed: int, size: int, config: str = "{}") -> Any:
    """The data set; `config`: its further options, as JSON. Raises ValueError for one that there is not."""
    return load_reasoning_gym().create_dataset(dataset, seed=seed, size=size, **json.loads(config))


def load_reasoning_gym() -> Any:
    """The package; the import takes a second. Raises ImportError with the cure."""
    try:
        import reasoning_gym as package
    except ImportError as error:
        raise ImportError(
            f"the rule `{REASONING}` asks the package reasoning-gym ({error}); pip install 'mrl[games]'"
        ) from error
    return package
