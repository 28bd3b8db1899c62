"""What responses of several turns are made of, and what is learnt by them: pieces, each a run of the tool world or of a
guessing game, each stored by itself.

    python scripts/evidence/trajectories.py --work runs/trajectories --out docs/results/trajectories.json
    python scripts/evidence/trajectories.py --work runs/trajectories --only tokens-tools learn-calculator-0
    python scripts/evidence/trajectories.py --work /tmp/small --small

tokens-*   every request of an engine, as vLLM says that it was asked, is a stored row up to there, and what it answered
           stands behind; every turn that is stored was asked for once: tools, games, an agent over the endpoint, and
           conversations that go on by newer weights
learn-*    held-out score before and after, by seed: with the calculator; with its answers those to another product;
           with rewards that know nothing of the response; a game, and the same one whose later answers are blanked

A piece that was made at this commit is not made again, so that what was stopped goes on. `--small`: a few steps each,
which show that a piece runs and are stored nowhere.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import guess_world
import make_tool_world
import pyarrow.parquet as pq
from make_tool_world import Calling
from stamp import changes, facts
from tokenizers import Tokenizer
from turn_marks.sitecustomize import FILE, digest

from mrl.record.run_dir import METRICS, read_metrics

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PRESET = ROOT / "parallel_configs" / "tool-moe" / "cpu.yaml"
SEEDS = (0, 1, 2)
LIMIT_S = 1800  # of one run
Values = Mapping[str, Any]
SAID_LAST = """

def is_right(solution_str, ground_truth):
    return float(solution_str.rsplit("assistant\\n", 1)[-1].strip() == ground_truth)
"""
RANDOM = '''"""In training a coin that knows nothing of the response; on held-out prompts the truth."""

import random

_coin = random.Random(0)
''' + SAID_LAST + '''

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["split"] == "train":
        return float(_coin.random() < 0.2)
    return is_right(solution_str, ground_truth)
'''  # fmt: skip
SHUFFLED = '''"""A calculator whose answer is that to another product."""

import random


def calculator(expression: str) -> str:
    """Computes.

    Args:
        expression: a product
    """
    drawn = random.Random(expression)
    return str(drawn.randint(100, 999) * drawn.randint(100, 999))
'''
MADE_UP = "mrl.tools.rehearse.made_up_calls:MadeUpCalls"


@dataclass(frozen=True)
class Worlds:
    """Folders of what runs begin from, made once."""

    work: Path
    small: bool = False  # with a short warm start

    def tools(self) -> Path:
        """The tool world."""
        plan = Calling()
        if self.small:
            plan = Calling(steps=60, batch=16, share=0.9)
        return self._made("tool-world", make_tool_world.build, plan)

    def game(self) -> Path:
        """The guessing game."""
        plan = guess_world.PLAN
        if self.small:
            plan = [replace(part, steps=20, batch=16) for part in plan]
        return self._made("guess-world", guess_world.build, plan)

    def _made(self, name: str, build: Callable[[Path, int, Any], Any], plan: Any) -> Path:
        folder = self.work / name
        finished = folder / "finished"
        if not finished.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            build(folder, 0, plan)
            finished.touch()
        return folder

    def written(self, name: str, text: str) -> Path:
        """A file with the text."""
        file = self.work / name
        file.write_text(text)
        return file


@dataclass(frozen=True)
class Piece:
    """One run and what is asked of it."""

    values: Callable[[Worlds], Values]
    result: Callable[[Path, Path], dict[str, Any]]  # of the run's folder and its world's
    world: Callable[[Worlds], Path]
    steps: int
    small_steps: int = 2
    variables: Mapping[str, str] = field(default_factory=dict)


# ---------------------------------------------------------------- tokens


def token_result(folder: Path, world: Path) -> dict[str, Any]:
    """Turns of all stored rows, and how many of them and of the engine's requests have no other side.

    `after_the_end` are requests to go on from what no row has: begun for a step that is none any more. Where a row's
    own was asked otherwise, its turn was `never_asked`.
    """
    asked = Counter((line["before"], line["after"]) for line in _lines(folder.with_suffix(".marks")))
    found = {"responses": 0, "turns": 0, "requests": asked.total(), "never_asked": 0}
    begun = set()
    for row in _rows(folder):
        found["responses"] += 1
        found["turns"] += len(row["turns"])
        ids = row["prompt_ids"] + row["response_ids"]
        for base, start, end in spans(row):
            prefixes = [digest(ids[base:to]) for to in range(start, end + 1)]
            begun |= set(prefixes)
            found["never_asked"] += not take_requests(asked, prefixes)
    never_stored = sum(count for (before, _), count in asked.items() if before in begun)
    return found | {"never_stored": never_stored, "after_the_end": asked.total() - never_stored}


def take_requests(asked: Counter[tuple[str, str]], prefixes: list[str]) -> bool:
    """Takes the requests that sampled a run of tokens, and whether there were some for all of it.

    `prefixes`: digests of all before its first token, and behind each. A border of the weights parts a turn into two
    requests, which may be of one version.
    """
    at = 0
    last = len(prefixes) - 1
    while at < last:
        ends = (end for end in range(last, at, -1) if asked[prefixes[at], prefixes[end]] > 0)
        end = next(ends, None)
        if end is None:
            return False
        asked[prefixes[at], prefixes[end]] -= 1
        at = end
    return True


def spans(row: Mapping[str, Any]) -> Iterator[tuple[int, int, int]]:
    """Runs of sampled tokens of one version: where the sequence begins, where they begin, where they end."""
    before = len(row["prompt_ids"])
    sampled = row["sampled"]
    borders = {span["first_token"] for span in row["weight_version"]}
    later = [before + branch["first_token"] for branch in (row.get("branches") or [])[1:]]
    edges = [
        place
        for place in range(len(sampled) + 1)
        if place in (0, len(sampled)) or sampled[place] != sampled[place - 1] or place in borders
    ]
    for start, end in pairwise(edges):
        if sampled[start]:
            base = max([0, *(begin for begin in later if begin <= before + start)])
            yield base, before + start, before + end


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    for file in sorted((folder / "samples").glob("step-*.parquet")):
        if not file.name.endswith(".log_probs.parquet"):
            yield from pq.read_table(file).to_pylist()


def _lines(file: Path) -> Iterator[dict[str, str]]:
    with file.open() as lines:
        yield from map(json.loads, lines)


def with_tools(worlds: Worlds) -> Values:
    """Of the tool world."""
    world = worlds.tools()
    return {
        "model.path": world / "model", "data.train_files": world / "data" / "train.parquet",
        "data.val_files": world / "data" / "val.parquet", "reward.custom_reward_function.path": world / "reward.py",
    }  # fmt: skip


UNSEEN = {"trainer.test_freq": -1, "trainer.val_before_train": False}


def tools(worlds: Worlds) -> Values:
    """Every step on its own weights."""
    return with_tools(worlds) | UNSEEN


def held(worlds: Worlds) -> Values:
    """Up to two versions behind."""
    ahead = {"schedule": "bounded", "max_staleness": 2, "partial_rollouts": True, "segment_tokens": 20}
    return tools(worlds) | {f"trainer.{key}": value for key, value in ahead.items()}


def games(worlds: Worlds) -> Values:
    """The game, whose calls are made up."""
    return with_game(worlds) | UNSEEN


def agent(worlds: Worlds) -> Values:
    """An agent that knows the package openai alone."""
    own = {
        "rollout.endpoint": True, "rollout.agent": {"path": HERE / "agents" / "openai_agent.py"},
        "rollout.turns.tools": [], "rollout.turns.network": True, "rollout.turns.num_workers": 4,
        "rollout.turns.timeout_s": 100, "data.train_batch_size": 8, "actor.ppo_mini_batch_size": 8,
        "rollout.n": 4,
    }  # fmt: skip
    return tools(worlds) | own


# ---------------------------------------------------------------- learning


def learning(folder: Path, world: Path) -> dict[str, Any]:
    """Held-out scores in points, before, after and by step."""
    rows = read_metrics(folder / METRICS)
    scores = [
        (row["training/global_step"], 100 * value)
        for row in rows
        for name, value in row.items()
        if name.startswith("val-core/") and "/mean@" in name
    ]
    (_, before), *_, (last, after) = scores
    found = {"before": round(before, 2), "after": round(after, 2), "points": round(after - before, 2), "steps": last}
    found["scores"] = {str(step): round(score, 2) for step, score in scores}
    found["run_s"] = round(sum(row.get("timing_s/step", 0.0) for row in rows), 1)
    return found


def learning_with_calls(folder: Path, world: Path) -> dict[str, Any]:
    """With the share of responses that call for the product they were asked for, in the first and the last step."""
    decode = Tokenizer.from_file(str(world / "model" / "tokenizer.json")).decode
    steps = [row["training/global_step"] for row in read_metrics(folder / METRICS) if row["training/global_step"]]
    shares = {}
    for name, step in (("first", steps[0]), ("last", steps[-1])):
        rows = pq.read_table(folder / "samples" / f"step-{step}.parquet").to_pylist()
        shares[name] = round(sum(calls_rightly(row, decode) for row in rows) / len(rows), 4)
    return learning(folder, world) | {"right_calls": shares}


def calls_rightly(row: Mapping[str, Any], decode: Callable[..., str]) -> bool:
    """Whether the response calls the calculator with what stands in the prompt."""
    asked = re.search(r"user\n(\d+\*\d+)=", decode(row["prompt_ids"], skip_special_tokens=False))
    said = decode(row["response_ids"], skip_special_tokens=False)
    return asked is not None and f'{{"expression": "{asked[1]}"}}' in said


def calculator(worlds: Worlds, seed: int) -> Values:
    """As the preset has it."""
    return with_tools(worlds) | {"trainer.seed": seed}


def shuffled(worlds: Worlds, seed: int) -> Values:
    """With answers to other products."""
    return calculator(worlds, seed) | {"rollout.turns.path": worlds.written("shuffled.py", SHUFFLED)}


def random_rewards(worlds: Worlds, seed: int) -> Values:
    """With rewards of a coin."""
    reward = worlds.written("random_reward.py", RANDOM)
    return calculator(worlds, seed) | {"reward.custom_reward_function.path": reward}


def with_game(worlds: Worlds) -> Values:
    """The shipped game in its own world."""
    world = worlds.game()
    return {
        "model.path": world / "model", "data.train_files": world / "data" / "train.parquet",
        "data.val_files": world / "data" / "val.parquet", "reward.function": "environment",
        "reward.custom_reward_function": None, "rollout.turns.tools": [],
        "rollout.turns.environments": ["guess_the_number"], "rollout.turns.max_turns": guess_world.GUESSES + 1,
        "rollout.turns.max_answer_characters": 60, "data.max_response_length": guess_world.POSITIONS - 24,
    }  # fmt: skip


def game(worlds: Worlds, seed: int) -> Values:
    """With all that it tells."""
    return with_game(worlds) | {"trainer.seed": seed}


def blanked(worlds: Worlds, seed: int) -> Values:
    """With what it tells of the first guess alone."""
    own = {"rollout.turns.environments": ["Blanked"], "rollout.turns.path": worlds.game() / "blanked.py"}
    return game(worlds, seed) | own


# ---------------------------------------------------------------- pieces

PIECES = {
    "tokens-tools": Piece(tools, token_result, Worlds.tools, 6),
    "tokens-held": Piece(held, token_result, Worlds.tools, 6, 4),
    "tokens-games": Piece(games, token_result, Worlds.game, 3, variables={"MRL_CALL_READER": MADE_UP}),
    "tokens-agent": Piece(agent, token_result, Worlds.tools, 6),
}
for _seed in SEEDS:
    PIECES |= {
        f"learn-calculator-{_seed}": Piece(partial(calculator, seed=_seed), learning_with_calls, Worlds.tools, 60),
        f"learn-shuffled-{_seed}": Piece(partial(shuffled, seed=_seed), learning_with_calls, Worlds.tools, 60),
        f"learn-random-{_seed}": Piece(partial(random_rewards, seed=_seed), learning_with_calls, Worlds.tools, 60),
        f"learn-game-{_seed}": Piece(partial(game, seed=_seed), learning, Worlds.game, 100),
        f"learn-blanked-{_seed}": Piece(partial(blanked, seed=_seed), learning, Worlds.game, 100),
    }


def made(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs a piece. Raises SystemExit where its run fails."""
    piece = PIECES[name]
    worlds = Worlds(options.work, options.small)
    folder = options.work / name
    shutil.rmtree(folder, ignore_errors=True)
    marks = folder.with_suffix(".marks")
    marks.unlink(missing_ok=True)
    steps = piece.small_steps if options.small else piece.steps
    values = {"trainer.total_training_steps": steps, "trainer.save_freq": -1, "trainer.logger": ["console"]}
    if options.small and name.startswith("learn"):
        values |= {"trainer.test_freq": steps}
    values |= piece.values(worlds)
    began = time.monotonic()
    run(folder, values, dict(piece.variables) | {FILE: str(marks)})
    took = round(time.monotonic() - began, 1)
    command = f"scripts/evidence/trajectories.sh --only {name}"
    return facts(command) | {"seconds": took} | piece.result(folder, piece.world(worlds))


def run(folder: Path, values: Values, variables: Mapping[str, str]) -> None:
    """Trains; what is printed goes to FOLDER.log. Raises SystemExit where it fails."""
    words = ["train", str(PRESET), "--run-dir", str(folder)]
    words += [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value, default=str)}")]
    command = [sys.executable, "-c", "from mrl.cli.main import main; main()", *words]
    paths = [str(HERE / "turn_marks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths)}
    log = folder.with_suffix(".log")
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, env=environment, timeout=LIMIT_S)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}: {log}")


def is_made(held: Mapping[str, Any], name: str) -> bool:
    """Whether the piece was made at this commit."""
    return name in held and held[name]["commit"] == facts("")["commit"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=PIECES, metavar="NAME", default=list(PIECES))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--list", action="store_true", help="name the pieces, run none")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.list:
        print("\n".join(PIECES))
        return 0
    if not options.small and (changed := changes()):
        print(f"commit these first, results name a commit:\n{changed}", file=sys.stderr)
        return 2
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    file = options.out or options.work / "results.json"
    for name in options.only:
        held = json.loads(file.read_text()) if file.exists() else {}
        if is_made(held, name) and not options.small:
            print(f"{name}: made already")
            continue
        found = made(name, options)
        print(f"{name}: {json.dumps(found)}", flush=True)
        if not options.small:
            file.write_text(json.dumps(held | {name: found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
