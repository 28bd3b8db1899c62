"""Figures of the bench beside TRL, worked by hand."""

import importlib.util
import sys
from pathlib import Path

import pytest

from mrl.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def peers():
    spec = importlib.util.spec_from_file_location("peers_bench", ROOT / "scripts" / "bench" / "peers.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def round_of(theirs: list[float], own: list[float]) -> dict:
    """TRL's first step is of no count; generation is half of each of its steps, and rewards a quarter."""
    steps = [99.0, *theirs]
    trl = {"steps": steps, "gen": [s / 2 for s in steps], "before_updates": [s * 3 / 4 for s in steps]}
    rows = [{"timing_s/step": s, "timing_s/gen": s / 4, "response_length/mean": 3.0} for s in own]
    return {"trl": trl | {"mean_length": 3.0}, "mrl": rows}


def test_a_side_is_the_median_of_all_its_steps_and_noise_is_told_by_round_and_quartile(peers):
    rounds = [round_of([1.0, 2.0, 3.0], [4.0, 4.0]), round_of([8.0, 4.0], [2.0, 6.0, 8.0])]
    found = peers.summary(peers.CASES[0], rounds)
    assert (found["trl_s"], found["mrl_s"], found["trl_over_mrl"]) == (3.0, 4.0, 0.75)
    assert found["quartiles_s"] == {"trl": [2.0, 3.0, 4.0], "mrl": [4.0, 4.0, 6.0]}
    assert found["rounds"] == [
        {"first": "trl", "trl_s": 2.0, "mrl_s": 4.0, "trl_over_mrl": 0.5},
        {"first": "mrl", "trl_s": 6.0, "mrl_s": 6.0, "trl_over_mrl": 1.0},
    ]
    assert found["trl_phases_s"] == {"gen": 1.5, "rewards and old_log_prob": 0.75, "update_actor": 0.75}
    assert found["mrl_phases_s"]["gen"] == 1.0


def test_rounds_begin_with_the_two_sides_in_turn(peers):
    assert [peers.order(number)[0] for number in range(4)] == ["trl", "mrl", "trl", "mrl"]


def test_goals_of_both_cases_are_as_fast_at_3_tokens_and_twice_as_fast_at_300(peers):
    assert {case.name: case.goal for case in peers.CASES} == {"short": 1.0, "long": 2.0}


def test_our_side_computes_old_log_probs_in_a_pass_of_its_own_and_makes_as_many_updates(peers):
    for case in peers.CASES:
        settings = peers.settings_of(case, Path("world"), Path("model"), 6)
        assert settings["algorithm.anchor"] == "recompute"  # said, whatever the preset's recipe says
        given = [f"{key}={peers.as_text(value)}" for key, value in settings.items()]
        config = load_config(peers.PRESET, None, given).config
        assert config.algorithm.anchor == "recompute" and config.updates_per_step == peers.UPDATES
        assert config.data.train_batch_size * config.rollout.n == case.prompts * peers.N
        assert config.data.max_response_length == case.tokens
