"""Agents that know nothing of mrl are trained on the tokens that vLLM sampled: one of the `openai` package alone, and
an environment of `verifiers`, in a virtual environment of its own (MRL_VERIFIERS_VENV; made where it is missing).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from world import ROOT, metrics, mrl

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(1800)]

PRESET = ROOT / "parallel_configs" / "tool-moe" / "cpu.yaml"
AGENTS = Path(__file__).with_name("agents")
STEPS = 3
PROMPTS = 4
N = 2
LIMIT_S = 900  # of one run
CACHE = Path.home() / ".cache" / "verifiers"  # that verifiers makes its folders in, which an agent may not by itself
LARGEST = 1e-4  # difference of log-probs of an engine and the ranks


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tool") / "world"
    command = [sys.executable, str(ROOT / "scripts" / "make_tool_world.py"), "--out", str(folder), "--seed", "0"]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture
def verifiers() -> Path:
    """Python of an environment that has verifiers."""
    folder = Path(os.environ.get("MRL_VERIFIERS_VENV", ROOT / ".venv-verifiers")).absolute()
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "-q", "verifiers==0.4.0"], check=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    return python


def trained(world: Path, run: Path, agent: dict) -> None:
    """Trains STEPS steps; each has an update, and log-probs of the engine are those of the ranks."""
    values = {
        "model.path": str(world / "model"), "data.train_files": str(world / "data" / "train.parquet"),
        "data.val_files": [], "reward.custom_reward_function.path": str(world / "reward.py"),
        "data.train_batch_size": PROMPTS, "actor.ppo_mini_batch_size": PROMPTS, "rollout.n": N,
        "actor.ppo_micro_batch_size_per_gpu": 8, "trainer.total_training_steps": STEPS, "trainer.save_freq": -1,
        "trainer.test_freq": -1, "trainer.val_before_train": False, "trainer.logger": ["console"],
        "rollout.endpoint": True, "rollout.agent": agent, "rollout.turns.tools": [], "rollout.turns.network": True,
        "rollout.turns.num_workers": 4, "rollout.turns.timeout_s": 100, "rollout.turns.folders": [str(CACHE)],
    }  # fmt: skip
    settings = [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    done = mrl("train", str(PRESET), "--run-dir", str(run), *settings, seconds=LIMIT_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " is lost: " not in done.stdout + done.stderr
    rows = [row for row in metrics(run) if row["training/global_step"]]
    assert [row["training/global_step"] for row in rows] == list(range(1, STEPS + 1))
    print({name: rows[-1][name] for name in ("turns/mean", "turns/context_tokens", "critic/score/mean")})
    assert all(row["actor/updates"] > 0 for row in rows)
    assert max(row["training/rollout_log_probs_abs_diff_max"] for row in rows) < LARGEST


def test_an_agent_that_uses_the_openai_package_alone(world, tmp_path):
    CACHE.mkdir(parents=True, exist_ok=True)
    trained(world, tmp_path / "run", {"path": str(AGENTS / "openai_agent.py")})


def test_an_environment_of_verifiers(world, tmp_path, verifiers):
    trained(world, tmp_path / "run", {"command": [str(verifiers), str(AGENTS / "verifiers_agent.py")]})
