"""Trains a few steps through each of the agents in scripts/evidence/agents, which know nothing of mrl, and says what
came of it: scripts/evidence/agents.sh starts it.

    python scripts/evidence/agents.py --world tool-world --verifiers VENV/bin/python --work runs/agents [--out FILE]
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from stamp import facts

from mrl.record.run_dir import METRICS, read_metrics

ROOT = Path(__file__).resolve().parents[2]
PRESET = ROOT / "parallel_configs" / "tool-moe" / "cpu.yaml"
AGENTS = Path(__file__).resolve().parent / "agents"
PROMPTS = 4
N = 2
LIMIT_S = 900  # of one run
CACHE = Path.home() / ".cache" / "verifiers"  # that verifiers makes its folders in, which an agent may not by itself
KEPT = ("turns/mean", "turns/context_tokens", "critic/score/mean", "training/rollout_log_probs_abs_diff_max")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=Path, required=True)
    parser.add_argument("--verifiers", type=Path, help="Python that has verifiers; without it that agent is left out")
    parser.add_argument("--work", type=Path, required=True, help="an empty or new folder")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    agents = {"openai": (AGENTS / "openai_agent.py", {"path": str(AGENTS / "openai_agent.py")})}
    if options.verifiers is not None:
        file = AGENTS / "verifiers_agent.py"
        # not resolved: the link is what makes it the Python of its virtual environment
        agents["verifiers"] = (file, {"command": [str(options.verifiers.absolute()), str(file)]})
    found = {}
    for name, (file, agent) in agents.items():
        folder = options.work.resolve() / name
        began = time.monotonic()
        code = trained(options.world.resolve(), folder, agent, options.steps)
        if code:
            print(f"{name}: exit code {code}: {folder}.log", file=sys.stderr)
            return 1
        found[name] = {"agent": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        found[name] |= {"seconds": round(time.monotonic() - began, 1)} | results(folder, options.steps)
    written = facts("scripts/evidence/agents.sh") | {"steps": options.steps, "sessions": PROMPTS * N, "agents": found}
    print(json.dumps(written, indent=1))
    if options.out:
        options.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return 0


def trained(world: Path, folder: Path, agent: dict[str, Any], steps: int) -> int:
    """Trains; the exit code. What is printed goes to FOLDER.log."""
    values = {
        "model.path": str(world / "model"), "data.train_files": str(world / "data" / "train.parquet"),
        "data.val_files": [], "reward.custom_reward_function.path": str(world / "reward.py"),
        "data.train_batch_size": PROMPTS, "actor.ppo_mini_batch_size": PROMPTS, "rollout.n": N,
        "actor.ppo_micro_batch_size_per_gpu": 8, "trainer.total_training_steps": steps, "trainer.save_freq": -1,
        "trainer.test_freq": -1, "trainer.val_before_train": False, "trainer.logger": ["console"],
        "rollout.endpoint": True, "rollout.agent": agent, "rollout.turns.tools": [], "rollout.turns.network": True,
        "rollout.turns.num_workers": 4, "rollout.turns.timeout_s": 100, "rollout.turns.folders": [str(CACHE)],
    }  # fmt: skip
    words = ["train", str(PRESET), "--run-dir", str(folder)]
    words += [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    for needed in (folder.parent, CACHE):
        needed.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", "from mrl.cli.main import main; main()", *words]
    with folder.with_suffix(".log").open("w") as log:
        return subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=LIMIT_S).returncode


def results(folder: Path, steps: int) -> dict[str, Any]:
    """Rows of the steps, and how conversations ended. Raises SystemExit where a step is missing."""
    rows = [row for row in read_metrics(folder / METRICS) if row["training/global_step"]]
    if [row["training/global_step"] for row in rows] != list(range(1, steps + 1)):
        raise SystemExit(f"{folder}: steps are missing in {METRICS}")
    told = []
    for row in rows:
        ended = {name.rpartition("/")[2]: row[name] for name in row if name.startswith("turns/ended/") and row[name]}
        endpoint = {name: row[name] for name in row if name.startswith("endpoint/")}
        told.append({name: row[name] for name in KEPT} | {"ended": ended, "updates": row["actor/updates"]} | endpoint)
    lost = folder.with_suffix(".log").read_text(encoding="utf-8").count(" is lost: ")
    largest = max(each[KEPT[-1]] for each in told)
    return {"rows": told, "largest_log_prob_difference": largest, "engines_lost": lost}


if __name__ == "__main__":
    sys.exit(main())
