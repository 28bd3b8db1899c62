"""`mrl verify`: what it says, in how long, and how it ends."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from small_model import SIZES

from mrl.cli.main import main
from mrl.errors import ConfigError
from mrl.reshard import proof

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml")


@pytest.fixture
def run(capfd, tmp_path, monkeypatch):
    """Runs `mrl verify` on the tiny preset in a folder with a small model: (exit code, standard output,
    standard error).
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SIZES))

    def run(*arguments: str) -> tuple[int, str, str]:
        code = 0
        try:
            main(["verify", TINY, "--set", "model.path=model", *arguments])
        except SystemExit as ended:
            code = ended.code
        return code, *capfd.readouterr()

    return run


def test_a_right_plan_is_said_to_be_right(run):
    code, out, _ = run()
    assert code == 0
    assert re.fullmatch(
        r"ok: every element arrives exactly once, from a shard that holds it \((\d+) of \1 workers in full\)",
        out.splitlines()[-1],
    )


def test_one_json_object_says_what_was_looked_at(run):
    code, out, _ = run("--json")
    found = json.loads(out)
    assert code == 0
    assert found["ok"] is True and found["fault"] is None
    assert found["proof"]["workers"] == found["proof"]["of_workers"] == found["workers"]
    assert found["proof"]["copies"] > 0 and found["rehearsal"]["elements"] > 0
    assert found["seconds"] < 20


def test_what_was_not_taken_apart_is_said_and_all_takes_it_apart(run, monkeypatch):
    monkeypatch.setattr(proof, "_PROOF_SECONDS", 0.0)
    wanted = ("rollout.num_engines=2", "rollout.tensor_model_parallel_size=2", "cluster.n_gpus_per_node=6")
    engines = [word for setting in wanted for word in ("--set", setting)]
    code, out, _ = run(*engines)
    assert code == 0
    assert out.splitlines()[-1].startswith("ok: for 3 of 4 workers, checked in full, every element arrives")
    code, out, _ = run(*engines, "--all")
    assert code == 0 and out.splitlines()[-1].endswith("(4 of 4 workers in full)")


def test_a_fault_is_printed_with_its_name_and_ends_with_1(run, monkeypatch):
    fault = "engine 0, worker 1: model.norm.weight: 3 of 64 elements are not covered"
    real = proof.prove
    monkeypatch.setattr(proof, "prove", lambda plan, seconds: replace(real(plan, seconds), fault=fault))
    code, out, _ = run()
    assert code == 1
    assert out.splitlines()[-1] == f"FAULT: {fault}"


def test_a_layout_that_is_not_legal_ends_like_every_configuration_error(run):
    code, out, err = run("--set", "rollout.tensor_model_parallel_size=3")
    assert (code, out) == (2, "")
    assert "rollout.tensor_model_parallel_size" in err


def test_a_budget_without_room_for_a_row_names_the_key(run, monkeypatch):
    monkeypatch.setattr("mrl.plan.plan_inputs.MIB", 16)
    code, _, err = run("--set", "reshard.budget_mb=1")
    assert code == 2
    assert "reshard.budget_mb" in err


def test_a_rehearsal_that_no_budget_allows_ends_with_the_last_refusal(run, monkeypatch):
    def refuse(*_, budget_bytes, **__):
        raise ConfigError(f"a row does not fit into {budget_bytes} bytes")

    monkeypatch.setattr(proof, "plan_reshard", refuse)
    code, _, err = run()
    assert code == 2
    assert "a row does not fit into 67108864 bytes" in err  # 64 MiB
