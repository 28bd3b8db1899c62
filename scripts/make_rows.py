"""Makes rows of data, as JSON lines: problems of `reasoning-gym`, games of `textarena`, tasks, and tasksets of
`verifiers`.

    python scripts/make_rows.py reasoning-gym countdown --count 1000 --seed 0 --out countdown.jsonl
    python scripts/make_rows.py textarena GuessTheNumber-v0-raw --count 1000 --seed 0 --out games.jsonl
    python scripts/make_rows.py swe-bench verified.parquet --out tasks.jsonl        # rows of SWE-bench; r2e-gym too
    python scripts/make_rows.py harbor tasks/hello --image hello:1 --out hello.jsonl
    python scripts/make_rows.py verifiers gsm8k-v1 --python venv/bin/python --out gsm.jsonl  # or a file: [env] as JSON

Tasksets of verifiers are read by an interpreter that has them, and played by the harness verifiers of rollout.agent.
Tasks are for the environment repository; a row that cannot be read is left out, by name. Both packages come with
`pip install 'mrl[games]'`. Problems are judged by the rule reasoning_gym, which `auto` finds by the rows' data_source;
games are played in the environment textarena and rewarded by reward.function: environment.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from mrl.acting.harnesses import HARNESSES, loop_path
from mrl.acting.sandboxes.task_rows import harbor, r2e_gym, swe_bench
from mrl.acting.text_arena import TEXTARENA, TextArena
from mrl.errors import ConfigError
from mrl.reward.reasoning_rule import SOURCE, rows_of
from mrl.whole_file import appears_whole

ASKED = "\nGive the final answer in <answer></answer>."
TASKS = {"swe-bench": swe_bench, "r2e-gym": r2e_gym}
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


def tasks(kind: str, path: Path, count: int, image: str | None) -> Iterator[dict[str, Any]]:
    """Rows of tasks. Says on standard error which are left out, and why."""
    if kind == "harbor":
        yield harbor(path, image)
        return
    if path.suffix == ".parquet":
        given = pq.read_table(path).to_pylist()
    else:
        given = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for number, each in enumerate(given[:count]):
        try:
            yield TASKS[kind](each)
        except ValueError as error:
            print(f"{path}: row {number} is left out: {error}", file=sys.stderr)


def of_verifiers(name: str, count: int, python: str) -> Iterator[dict[str, Any]]:
    """Rows of a taskset, or of the one that a file's configuration names. Raises OSError where it cannot be read."""
    config = {"taskset": {"id": name}}
    if Path(name).is_file():
        config = json.loads(Path(name).read_text(encoding="utf-8"))
    command = [python, loop_path(HARNESSES["verifiers"]), "rows", str(count)]
    done = subprocess.run(command, input=json.dumps({"config": config}), capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{python}: {done.stderr.strip()[-500:]}")
    for line in done.stdout.splitlines():
        task = json.loads(line)
        made = row(f"verifiers/{config['taskset']['id']}", task["prompt"], "", {"verifiers": json.dumps(task["data"])})
        if task["system"]:
            made["prompt"].insert(0, {"role": "system", "content": task["system"]})
        yield made


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
    parser.add_argument("kind", choices=("reasoning-gym", "textarena", "harbor", "verifiers", *TASKS))
    parser.add_argument("name", help="data set, game, file of rows, or folder of a task")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", default="{}", help="of a data set: further options, as JSON")
    parser.add_argument("--image", help="of a task of Harbor's that names none")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has verifiers and the taskset")
    parser.add_argument("--out", type=Path, required=True, help="must not exist")
    options = parser.parse_args()
    if options.out.exists():
        sys.exit(f"--out {options.out} is there already")
    given = (options.name, options.count, options.seed)
    if options.kind == "textarena":
        rows = games(*given)
    elif options.kind == "reasoning-gym":
        rows = problems(*given, options.config)
    elif options.kind == "verifiers":
        rows = of_verifiers(options.name, options.count, options.python)
    else:
        rows = tasks(options.kind, Path(options.name), options.count, options.image)
    try:
        with appears_whole(options.out) as work:
            lines = [f"{json.dumps(each)}\n" for each in rows]
            work.write_text("".join(lines), encoding="utf-8")
    except (ConfigError, ImportError, LookupError, OSError, TypeError, ValueError) as error:
        sys.exit(f"{options.kind} {options.name}: {error}")
    print(f"{options.out}: {len(lines)} rows")


if __name__ == "__main__":
    main()
