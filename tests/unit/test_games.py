"""Games of textarena and problems of reasoning-gym: with stand-ins, and with the packages where they are installed."""

import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mrl.acting.environment import Reply
from mrl.acting.environment_pool import EnvironmentPool, check_tools
from mrl.acting.text_arena import TextArena
from mrl.acting.tool import ToolsSpec
from mrl.errors import ConfigError
from mrl.reward.items import RewardSpec
from mrl.reward.reasoning_rule import reasoning_gym, rows_of
from mrl.reward.resolve import resolve

ROOT = Path(__file__).resolve().parents[2]


class Dice:
    """Of a game: a guess at the next throw of the process's own dice."""

    def reset(self, num_players, seed):
        assert num_players == 1
        self.seen = [(-1, "Guess the throw.", None)]
        self.right = 0

    def get_observation(self):
        seen, self.seen = self.seen, []
        return 0, seen

    def step(self, action):
        throw = random.randint(1, 6)
        self.right += action == f"[{throw}]"
        self.seen = [(0, action, None), (-1, f"It was {throw}.", None)]
        return throw == 6, {}

    def close(self):
        return {0: self.right}, {}


@pytest.fixture
def dice(monkeypatch):
    package = ModuleType("textarena")
    package.make = lambda name: Dice()
    monkeypatch.setitem(sys.modules, "textarena", package)


def begun(number: int, **extra_info) -> TextArena:
    game = TextArena()
    game.reset({"extra_info": {"game": "Dice-v0-raw", **extra_info}}, number)
    return game


def throws(seed: int) -> list[int]:
    """Of a generator that nobody else draws from, up to the first six."""
    chance = random.Random(seed)
    drawn = [chance.randint(1, 6)]
    while drawn[-1] != 6:
        drawn.append(chance.randint(1, 6))
    return drawn


def test_a_game_without_a_seed_of_its_own_has_the_responses(dice):
    """Parquet gives every row the keys of all, and a seed of None would be drawn from the clock."""
    (throw, *_) = throws(3)
    assert {begun(3, seed=None).act("[9]").text for _ in range(5)} == {f"It was {throw}."}


def test_games_beside_each_other_draw_each_their_own(dice):
    """Turn about, and with others who draw between: each meets the throws of its seed."""
    seeds = [seed for seed in range(50) if len(throws(seed)) == 4][:3]
    games = {seed: begun(seed) for seed in seeds}
    assert {game.opening for game in games.values()} == {"Guess the throw."}
    random.seed(5)
    before = random.getstate()
    for turn in range(4):
        for seed, game in games.items():
            throw = throws(seed)[turn]
            last = turn == 3
            expected = Reply(f"It was {throw}.", 4.0 * last, {"moves": turn + 1.0, "finished": float(last)}, end=last)
            assert game.act(f"[{throw}]") == expected
    assert random.getstate() == before, "nobody else's draws are moved"


def test_the_seed_of_the_row_is_the_one_of_its_prompt(dice):
    assert begun(0, seed=7).act("[1]").text == begun(7).act("[2]").text == f"It was {throws(7)[0]}."


@pytest.mark.parametrize("game", [None, "Dice-v0", 3])
def test_a_row_without_a_game_has_failed(dice, game):
    with pytest.raises(ValueError, match="expected a game of textarena that ends in -raw"):
        begun(0, game=game)


def test_a_package_that_is_missing_is_said_once_with_its_cure(monkeypatch, tmp_path):
    (tmp_path / "textarena.py").write_text("raise ImportError('not here')")
    (tmp_path / "reasoning_gym.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "reasoning_gym", raising=False)
    with pytest.raises(
        ConfigError, match=r"textarena, which cannot be imported \(not here\): pip install 'mrl\[games\]'"
    ):
        check_tools(ToolsSpec((), environments=("textarena",)))
    for spec in (RewardSpec("reasoning_gym"), RewardSpec(data_sources=("reasoning_gym/countdown",))):
        with pytest.raises(ConfigError, match=r"reasoning_gym.*not here.*mrl\[games\]"):
            resolve(spec)


class Sums:
    """A data set: an entry's answer, or one more, is worth half."""

    def __init__(self, seed, size, least=0):
        self.rows = [{"question": f"{i}+{seed}?", "answer": str(i + seed + least)} for i in range(size)]

    def __getitem__(self, item):
        return self.rows[item]

    def score_answer(self, answer, entry):
        return {entry["answer"]: 1.0, str(int(entry["answer"]) + 1): 0.5}.get(answer, 0.01)


@pytest.fixture
def sums(monkeypatch):
    package = ModuleType("reasoning_gym")
    package.create_dataset = lambda name, **given: {"sums": Sums}[name](**given)
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    rows_of.cache_clear()
    yield
    rows_of.cache_clear()


MADE = {"dataset": "sums", "seed": 3, "size": 5, "item": 2, "config": '{"least": 10}'}


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("<answer>15</answer>", 1.0),
        ("<answer>1</answer> no: <answer> 15 </answer>", 1.0),
        ("<answer>16</answer>", 0.5),
        ("<answer>7</answer>", 0.01),
        ("15", 0.0),
        ("<think><answer>15</answer>", 0.0),
        ("<think>7</think><answer>15</answer>", 1.0),
    ],
)
def test_an_answer_is_judged_by_who_made_the_row(sums, said, score):
    assert reasoning_gym("reasoning_gym/sums", said, "15", MADE) == {"score": score, "acc": float(score == 1.0)}


def test_a_row_that_is_another_one_than_it_was_is_no_wrong_answer(sums):
    for truth, made, why in (
        ("16", MADE, "differs from the one that was made"),
        ("15", {"dataset": "sums"}, "no 'seed'"),
        ("15", None, "no 'd"),
    ):
        with pytest.raises(ValueError, match=why):
            reasoning_gym("reasoning_gym/sums", "<answer>15</answer>", truth, made)


# ---------------------------------------------------------------- the packages


def made_rows(tmp_path: Path, kind: str, name: str) -> list[dict]:
    out = tmp_path / f"{name}.jsonl"
    script = [sys.executable, str(ROOT / "scripts" / "make_rows.py"), kind, name, "--count", "3", "--seed", "4"]
    done = subprocess.run([*script, "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_game_of_textarena_is_played_to_its_end(tmp_path):
    pytest.importorskip("textarena")
    row = made_rows(tmp_path, "textarena", "GuessTheNumber-v0-raw")[1]
    assert "between 1 and 20" in row["prompt"][0]["content"] and row["extra_info"]["seed"] == 5
    with EnvironmentPool(ToolsSpec((), environments=("textarena",)), 1, 60.0) as pool:
        session = pool.session("textarena", row, 0)
        low, high = 1, 20
        for _ in range(5):
            middle = (low + high) // 2
            answer = session.step("act", {"action": f"[{middle}]"}).result(60)
            assert answer.reason == "ok", answer
            if answer.end:
                break
            low, high = (middle + 1, high) if "higher" in answer.text else (low, middle - 1)
        assert answer.end and answer.reward == 1.0 and answer.parts["finished"] == 1.0


def test_problems_of_reasoning_gym_are_made_and_judged(tmp_path):
    pytest.importorskip("reasoning_gym")
    for row in made_rows(tmp_path, "reasoning-gym", "countdown"):
        truth = row["reward_model"]["ground_truth"]
        judge = resolve(RewardSpec(data_sources=(row["data_source"],)))
        given = (row["data_source"], "", truth, row["extra_info"])
        assert judge(given[0], f"<answer>{truth}</answer>", *given[2:])["acc"] == 1.0
        assert judge(given[0], "<answer>1</answer>", *given[2:])["score"] < 0.5
