"""Makes rows of data without end, as JSON lines: problems of `reasoning-gym`, or games of `textarena`.

    python scripts/make_rows.py reasoning-gym countdown --count 1000 --seed 0 --out countdown.jsonl
    python scripts/make_rows.py textarena GuessTheNumber-v0-raw --count 1000 --seed 0 --out games.jsonl

Both packages come with `pip install 'mrl[games]'`. Problems are judged by the rule reasoning_gym, which `auto` finds by
the rows' data_source; games are played in the environment textarena and rewarded by reward.function: environment.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrl.acting.text_arena import TEXTARENA, TextArena
from mrl.errors import ConfigError
from mrl.reward.reasoning_rule import SOURCE, rows_of
from mrl.whole_file import appears_whole

ASKED = "\nGive the final answer in <answer></answer>."
TOLD = "\n\nMake each move by calling act with it."


def problems(dataset: str, count: int, seed: int, config: str) -> Iterator[dict[str, Any]]:
    """Rows of a data set of reasoning-gym."""
    made = {"dataset": dataset, "seed": seed, "size": count, "config": config}
    for item, entry in enumerate(rows_of(dataset, seed, count, config)):
        yield row(SOURCE + dataset, entry["question"] + ASKED, entry["answer"], made | {"item": item})


def games(game: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows of a game of textarena, one seed after the other. Raises ValueError for what is no game of one player."""
    for own in range(seed, seed + count):
        given = {"environment": TEXTARENA, "game": game, "seed": own}
        begun = TextArena()
        begun.reset({"extra_info": given}, own)
        yield row(f"{TEXTARENA}/{game}", begun.opening + TOLD, "", given)


def row(source: str, prompt: str, truth: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """A row of verl's schema."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt}],
        "reward_model": {"style": "rule", "ground_truth": str(truth)},
        "extra_info": extra_info,
    }


def main() -> None:
    """Prints how many rows there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("reasoning-gym", "textarena"))
    parser.add_argument("name", help="data set, or game")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", default="{}", help="of a data set: further options, as JSON")
    parser.add_argument("--out", type=Path, required=True, help="must not exist")
    options = parser.parse_args()
    if options.out.exists():
        sys.exit(f"--out {options.out} is there already")
    given = (options.name, options.count, options.seed)
    rows = games(*given) if options.kind == "textarena" else problems(*given, options.config)
    try:
        with appears_whole(options.out) as work:
            work.write_text("".join(f"{json.dumps(each)}\n" for each in rows), encoding="utf-8")
    except (ConfigError, ImportError, LookupError, OSError, TypeError, ValueError) as error:
        sys.exit(f"{options.kind} {options.name}: {error}")
    print(f"{options.out}: {options.count} rows")


if __name__ == "__main__":
    main()
