"""The long world: answers of hundreds of tokens, starts apart, a graded reward;
and the figures drawn from runs of several algorithms.
"""

import functools
import importlib.util
import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from mrl.config.load import load_config
from mrl.record.sinks import JsonlSink

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    """A script loaded as a module, with its neighbours importable as when it is run."""

    def load(path):
        spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "scripts" / path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    sys.path.insert(0, str(ROOT / "scripts"))
    yield load
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def long(script):
    return script("make_long_world.py")


def test_answers_are_hundreds_of_tokens_and_fit_the_preset(long):
    tokenizer = long.make_tokenizer(long.POSITIONS)
    config = load_config(ROOT / "parallel_configs" / "long-moe" / "cpu.yaml").config
    for start in (long.FIRST, long.LAST):
        tokens = len(tokenizer(long.answer(start))["input_ids"]) + 1
        assert tokens == 80 * 4 and 256 <= tokens <= config.data.max_response_length == long.MAX_RESPONSE
        prompt = len(long.prompt_ids(tokenizer, start))
        assert prompt <= config.data.max_prompt_length and prompt + long.MAX_RESPONSE <= long.POSITIONS


def test_held_out_starts_are_never_trained_on(long):
    train, held_out = long.split_starts(0)
    assert not set(train) & set(held_out) and len(held_out) == long.HELD_OUT and len({*train, *held_out}) == 820


def test_the_reward_counts_numbers_in_their_own_places(long):
    right = "5 6 7 8"
    given = {"5 6 7 8": 1.0, "5 6 7": 0.75, "5 7 7 8": 0.75, "6 7 8 9": 0.0, "5 6 7 8 9": 0.8, "": 0.0}
    assert {text: long.compute_score("", text, right) for text in given} == given


def test_a_response_ends_with_its_end_or_at_the_limit(long):
    tokenizer, model = long.make_tokenizer(long.POSITIONS), long.make_model(0, long.POSITIONS)
    drawn = long.sample(model, tokenizer, [100, 200, 300, 400], torch.Generator().manual_seed(0), tokens=40)
    assert all(1 <= len(ids) <= 40 for ids in drawn)
    assert all(tokenizer.eos_token_id not in ids[:-1] for ids in drawn)


def test_a_world_is_written_whole(long, tmp_path, monkeypatch):
    monkeypatch.setattr(long, "sample", functools.partial(long.sample, tokens=8))  # the check at the end, cut short
    from make_tiny_world import make

    world = make(tmp_path / "w", 0, False, long.Counting(steps=1, batch=1), long.build)
    assert json.loads((tmp_path / "w" / "world.json").read_text())["sampled_score"] == world["sampled_score"]
    rows = pq.read_table(tmp_path / "w" / "data" / "val.parquet").to_pylist()
    start = rows[0]["prompt"][0]["content"].removesuffix(">")
    assert len(rows) == 128 and rows[0]["reward_model"]["ground_truth"].startswith(start + " ")


def write_run(folder, scores):
    folder.mkdir(parents=True)
    sink = JsonlSink(folder / "metrics.jsonl")
    for step, score in enumerate(scores):
        sink.write(step, {"val-core/tiny/reward/mean@4": score, "timing_s/step": 2.0, "train/num_gen_batches": 3.0})
    sink.close()


@pytest.fixture
def learning(script):
    return script("evidence/learning.py")


def test_algorithms_are_compared_over_their_seeds(learning, tmp_path):
    runs = tmp_path / "runs" / "algorithms"
    for seed in (0, 1):
        for recipe in ("gspo", "grpo", "dapo"):
            write_run(runs / f"{recipe}-{seed}", [0.2, 0.5 + 0.1 * seed])
        write_run(runs / f"control-{seed}", [0.2, 0.18])
    write_run(runs / "control-2", [0.2, 0.3])  # of a seed that is not asked for
    write_run(runs / "ppo-0", [0.2, 0.2])  # of another experiment
    learning.summarise("algorithms", tmp_path / "runs", tmp_path, [0, 1], 30)
    made = json.loads((tmp_path / "algorithms.json").read_text())
    assert made["command"] == "python scripts/evidence/learning.py algorithms RUNS --seeds 0 1 --steps 30 --out OUT"
    found = made["algorithms"]
    assert found.keys() == {"gspo", "grpo", "dapo", "control"}
    assert found["gspo"]["gain_points"] == [30.0, 40.0] and found["control"]["gain_points"] == [-2.0, -2.0]
    assert found["gspo"]["gen_batches"] == [6.0, 6.0] and (tmp_path / "algorithms.png").stat().st_size > 1000
    with pytest.raises(SystemExit, match=r"there is no run in .*gspo-2"):
        learning.summarise("algorithms", tmp_path / "runs", tmp_path)
    for recipe in ("gspo", "grpo", "dapo"):
        write_run(runs / f"{recipe}-2", [0.2, 0.5])
    with pytest.raises(SystemExit, match=r"the control moved by 10\.0 points"):
        learning.summarise("algorithms", tmp_path / "runs", tmp_path)
    assert json.loads((tmp_path / "algorithms.json").read_text())["command"].endswith(" algorithms RUNS")


def test_runs_are_made_once_and_those_of_other_settings_are_refused(learning, tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(learning.subprocess, "run", lambda command, **_: called.append(command))
    learning.train("critic", tmp_path, [0], 5)
    world, *runs = called
    assert world[1:] == ["scripts/make_tiny_world.py", "--out", str(ROOT / "tiny-world"), "--seed", "0"]
    assert [run[run.index("--run-dir") + 1] for run in runs] == [
        str(tmp_path / "critic" / name) for name in ("ppo-0", "control_ppo-0")
    ]
    assert all("trainer.total_training_steps=5" in run for run in runs)
    learning.train("critic", tmp_path, [0], 5)
    assert called[3:] == [world], "the runs are done"
    (tmp_path / "critic" / "ppo-0.done").unlink()  # it was interrupted
    with pytest.raises(SystemExit, match="ppo-0 was made with other settings"):
        learning.train("critic", tmp_path, [0], None)
    with pytest.raises(SystemExit, match="control_ppo-0 was made with other settings"):
        learning.begin(tmp_path / "critic" / "control_ppo-0", ["other"])


def test_results_of_other_seeds_or_steps_do_not_replace_the_experiments_own(learning, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["learning.py", "critic", str(tmp_path), "--steps", "2"])
    with pytest.raises(SystemExit):
        learning.main()
    assert "--out must be given" in capsys.readouterr().err and not list(tmp_path.iterdir())
