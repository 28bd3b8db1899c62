"""A step beside TRL's, on the same cores: same model, prompts, samples, updates and limits.

    python scripts/bench/peers.py [--steps 6] [--rounds 4] [--case short|long] [--json FILE]

Two cases of the tiny world's shape, four updates each: 512 samples of 3 tokens with the tiny world's own weights, and
128 samples of up to 300 tokens with random weights over a vocabulary of 4,096, so that next to none ends by itself. TRL
1.16 has an environment of its own, .venv-trl, made here once. Both sides run once a round, and every other round begins
with the other side, since machines are noisy; a side's figure is the median of its steps after the first. `rounds` has
each round's medians and their ratio, `quartiles_s` those of all steps. Needs tiny-world/ (scripts/make_tiny_world.py).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from mrl.record.run_dir import METRICS, read_metrics

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "evidence"))
from stamp import changes, facts  # noqa: E402

PRESET = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
ENVIRONMENT = ROOT / ".venv-trl"
PINS = ("torch==2.13.0+cpu", "trl==1.16.0", "transformers==5.19.0")
UPDATES, N, PROMPT_TOKENS = 4, 8, 16
PHASES = ("gen", "old_log_prob", "update_actor", "reshard")
RUN_S = 900.0


@dataclass(frozen=True)
class Case:
    """What both sides are asked for, per step."""

    name: str
    prompts: int
    tokens: int
    goal: float  # TRL's seconds / ours


CASES = (Case("short", 64, 4, 1.0), Case("long", 16, 300, 2.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="of a run; the first is left out")
    parser.add_argument("--rounds", type=int, default=4, help="runs of each side")
    parser.add_argument("--case", choices=[case.name for case in CASES])
    parser.add_argument("--world", type=Path, default=ROOT / "tiny-world")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.json and (changed := changes()):
        parser.error(f"commit these first, results name a commit:\n{changed}")
    stamp = facts("python scripts/bench/peers.py")  # the load is that before both sides make their own
    python = programs(ENVIRONMENT, PINS) / "python"
    found = {}
    for case in CASES:
        if args.case in (None, case.name):
            with tempfile.TemporaryDirectory() as folder:
                found[case.name] = compared(case, args, Path(folder), python)
            print(json.dumps({case.name: found[case.name]}, indent=1), flush=True)
    if args.json:
        args.json.write_text(json.dumps(stamp | {"pins": PINS} | found, indent=1) + "\n")


def programs(environment: Path, pins: tuple[str, ...]) -> Path:
    """The folder of an environment's programs. The environment is made where it is missing."""
    folder = environment / "bin"
    if not (environment / ".made").exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        subprocess.run([str(folder / "python"), "-m", "pip", "install", "-q", *pins], check=True)
        (environment / ".made").touch()
    return folder


def compared(case: Case, args: argparse.Namespace, folder: Path, python: Path) -> dict[str, Any]:
    """Both sides' seconds a step."""
    model = world_model(case, args.world, folder)
    rounds = []
    for number in range(args.rounds):
        both = {}
        for side in order(number):
            if side == "trl":
                both[side] = trl(case, args, folder / f"trl-{number}", model, python)
            else:
                both[side] = ours(case, args, folder / f"run-{number}", model)
        rounds.append(both)
    return summary(case, rounds)


def order(number: int) -> tuple[str, str]:
    """The side that a round begins with, and the other."""
    return ("trl", "mrl") if number % 2 == 0 else ("mrl", "trl")


def summary(case: Case, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a case from both sides' runs of each round. TRL's first step is left out here, ours is already."""
    steps, gen, before = (
        [seconds for both in rounds for seconds in both["trl"][name][1:]] for name in ("steps", "gen", "before_updates")
    )
    rows = [row for both in rounds for row in both["mrl"]]
    own = [row["timing_s/step"] for row in rows]
    length = median(row["response_length/mean"] for row in rows)
    return {
        "samples": case.prompts * N, "limit_tokens": case.tokens, "updates": UPDATES,
        "trl_s": round(median(steps), 3), "trl_mean_tokens": round(rounds[0]["trl"]["mean_length"], 1),
        "mrl_s": round(median(own), 3), "mrl_mean_tokens": round(length, 1),
        "trl_over_mrl": round(median(steps) / median(own), 3), "goal": case.goal,
        "quartiles_s": {"trl": quartiles(steps), "mrl": quartiles(own)},
        "rounds": [of_round(both, order(number)) for number, both in enumerate(rounds)],
        "trl_phases_s": {
            "gen": round(median(gen), 3),
            "rewards and old_log_prob": round(median(before) - median(gen), 3),
            "update_actor": round(median(steps) - median(before), 3),
        },
        "mrl_phases_s": {name: round(median(row.get(f"timing_s/{name}", 0.0) for row in rows), 3) for name in PHASES},
    }  # fmt: skip


def quartiles(seconds: list[float]) -> list[float]:
    """The first, the second and the third."""
    return [round(float(value), 3) for value in np.quantile(seconds, (0.25, 0.5, 0.75))]


def of_round(both: dict[str, Any], sides: tuple[str, str]) -> dict[str, Any]:
    """Medians of a round, and which side was first."""
    theirs = median(both["trl"]["steps"][1:])
    own = median(row["timing_s/step"] for row in both["mrl"])
    ratio = round(theirs / own, 3)
    return {"first": sides[0], "trl_s": round(theirs, 3), "mrl_s": round(own, 3), "trl_over_mrl": ratio}


def world_model(case: Case, world: Path, folder: Path) -> Path:
    """The tiny world's model; for long answers one of its shape whose answers do not end."""
    if case.name == "short":
        return world / "model"
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(world / "model", vocab_size=4096, max_position_embeddings=512)
    target = folder / "model"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(target)
    AutoTokenizer.from_pretrained(world / "model").save_pretrained(target)
    return target


def trl(case: Case, args: argparse.Namespace, folder: Path, model: Path, python: Path) -> dict[str, Any]:
    """TRL's run: seconds of each step, and what it made."""
    folder.mkdir()
    table = pq.read_table(args.world / "data" / "train.parquet").to_pylist()
    rows = [{"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]} for row in table]
    job = {
        "model": str(model), "folder": str(folder), "rows": rows, "prompts": case.prompts, "n": N, "updates": UPDATES,
        "tokens": case.tokens, "steps": args.steps, "threads": os.cpu_count(),
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    command = [str(python), str(Path(__file__).with_name("peers_trl.py")), str(folder / "job.json")]
    with (folder / "log").open("w") as log:
        ended = subprocess.run(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=RUN_S, check=False
        )
    if ended.returncode:
        raise SystemExit(f"TRL ended with {ended.returncode}:\n{(folder / 'log').read_text()[-3000:]}")
    return json.loads((folder / "job.out").read_text())


def ours(case: Case, args: argparse.Namespace, folder: Path, model: Path) -> list[dict[str, Any]]:
    """Metrics of each step after the first. The best layout found for two cores: two data-parallel ranks with a core
    each, and an engine, in turn.
    """
    command = train_command(folder, settings_of(case, args.world, model, args.steps))
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False)
    if ended.returncode:
        raise SystemExit(f"mrl ended with {ended.returncode}:\n{ended.stdout[-1500:]}{ended.stderr[-3000:]}")
    return [row for row in read_metrics(folder / METRICS) if row["training/global_step"] > 1]


def train_command(folder: Path, settings: dict[str, Any]) -> list[str]:
    """Trains the tiny preset with these settings."""
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={as_text(value)}")]
    return ["mrl", "train", str(PRESET), "--run-dir", str(folder), *words]


def settings_of(case: Case, world: Path, model: Path, steps: int) -> dict[str, Any]:
    """What our side's run sets beside the preset. Old log-probs are a pass of their own, as TRL computes them."""
    return {
        "model.path": model, "data.train_files": world / "data" / "train.parquet", "data.val_files": [],
        "data.train_batch_size": case.prompts, "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": case.tokens, "rollout.n": N,
        "algorithm.anchor": "recompute",
        "actor.ppo_mini_batch_size": case.prompts // UPDATES, "actor.optim.lr": 1e-5, "actor.optim.lr_warmup_steps": 0,
        "actor.layout.world_size": 2, "actor.layout.tensor_model_parallel_size": 1,
        "actor.layout.expert_model_parallel_size": 1, "actor.layout.sequence_parallel": False,
        "cluster.n_gpus_per_node": 3, "cluster.cpus_per_actor": 0.5, "cluster.cpus_per_engine": 1,
        "trainer.deterministic": False, "trainer.total_training_steps": steps, "trainer.val_before_train": False,
        "trainer.test_freq": -1, "trainer.save_freq": -1,
    }  # fmt: skip


def as_text(value: Any) -> str:
    """Of a setting, as YAML."""
    return str(value) if isinstance(value, Path) else json.dumps(value)


if __name__ == "__main__":
    main()
