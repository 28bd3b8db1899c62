"""Causes that break a run, each planted at a drawn step, and what the first verdict of `mrl explain` must say of them.

`python tests/real/planted_causes.py FOLDER [--seeds 0 1 2] [--only NAME ...]` runs them one after the other and writes
FOLDER/planted.jsonl, a line each. The planted faults are in tests/real/planted; no process of `mrl explain` has them,
but those of OF_LAYOUTS.
"""

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from world import PRESET, ROOT, mrl, overrides

PLANTED = ROOT / "tests" / "real" / "planted"
RESPONSES = 64  # of a step
AFTER = 4  # steps from the first broken one to the end
HEALTHY = 14  # steps of a run without a fault: six of them are judged by a band
SOURCES = ("tiny/first", "tiny/second")
USUAL = {
    "trainer__save_freq": 5, "trainer__test_freq": -1, "trainer__val_before_train": False,
    "trainer__max_actor_ckpt_to_keep": 3, "rollout__n": RESPONSES // 8, "trainer__logger": ["console"],
}  # fmt: skip
TWO_REPLICAS = {
    "actor__layout__tensor_model_parallel_size": 1, "actor__layout__expert_model_parallel_size": 1,
    "actor__layout__sequence_parallel": False,
}  # fmt: skip
TOOLS = ROOT / "parallel_configs" / "tool-moe" / "cpu.yaml"
TWO_ENGINES = {"rollout__num_engines": 2, "cluster__n_gpus_per_node": 4, "cluster__cpus_per_engine": 0.5}


@dataclass(frozen=True)
class Cause:
    """`kinds` are kinds of a first verdict that are right, and one of `words` must be in its cause or evidence."""

    name: str
    kinds: tuple[str, ...]
    words: tuple[str, ...]
    values: Mapping[str, Any] = field(default_factory=dict)
    resumes: bool = False  # the fault comes with a resume
    preset: Path = PRESET  # TOOLS: in the world with a tool
    in_software: bool = False  # explain's own ranks have the fault, too, as of a kernel or a collective


CAUSES = (
    Cause("yarn", ("engines",), ("positions",)),
    Cause("stale_expert", ("engines",), ("expert",), TWO_ENGINES),
    Cause("router", ("engines",), ("router",)),
    Cause("routes", ("engines",), ("routes",), {"actor__router_replay": "R3"}),
    Cause("softmax", ("ranks",), ("forward pass",)),
    Cause("gradients", ("update",), ("gradient",), TWO_REPLICAS),
    Cause("learning_rate", ("update",), ("learning rate",)),
    Cause("pays_length", ("reward",), ("length",)),
    Cause("pays_format", ("reward",), ("token", "format")),
    Cause("flipped", ("reward",), ("sign",)),
    Cause("lone", ("samples",), ("one response",)),
    Cause("truncated", ("samples",), ("cut off",)),
    Cause("temperature", ("engines",), ("temperature",)),
    Cause("clip", ("update",), ("clip",)),
    Cause("adam_lost", ("update",), ("optimizer",), resumes=True),
    Cause("old_weights", ("engines",), ("weights of version",)),
    Cause("not_a_number", ("update",), ("finite",)),
    Cause("kl_sign", ("update",), ("KL",), {"algorithm__use_kl_loss": True, "algorithm__kl_loss_coef": 0.1}),
    Cause("truths", ("reward",), ("truth",)),
    Cause("tool", ("tools",), ("other calls",), preset=TOOLS),
)
# faults that a step repeats with: another layout of the ranks is without it, or another number format
OF_LAYOUTS = (
    Cause("tensor_scale", ("ranks",), ("with tensor_model_parallel_size 1 ",), in_software=True),
    Cause("router_bits", ("ranks",), ("in bfloat16",), {"model__dtype": "bfloat16"}, in_software=True),
)


def two_sources(world: Path) -> None:
    """Gives the rows of a tiny world two sources in turn."""
    path = world / "data" / "train.parquet"
    rows = pq.read_table(path)
    names = [SOURCES[number % 2] for number in range(rows.num_rows)]
    pq.write_table(rows.set_column(rows.schema.get_field_index("data_source"), "data_source", [names]), path)


def warm_world(folder: Path) -> Path:
    """Makes a tiny world whose model answers a part of the problems, with two sources of data."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import make_tiny_world

    make_tiny_world.make(folder, 0, False, make_tiny_world.WarmUp())
    two_sources(folder)
    return folder


def tool_world(folder: Path) -> Path:
    """Makes the tiny world with a calculator, unless it is there. Its model calls now and then."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import make_tiny_world
    import make_tool_world

    make_tiny_world.make(folder, 0, False, make_tool_world.Calling(), make_tool_world.build)
    return folder


def world_of(cause: Cause | None, world: Path) -> Path:
    """The world of a cause, where `world` is the warm one; others are beside it."""
    return tool_world(world.with_name("tool-world")) if cause is not None and cause.preset == TOOLS else world


def first_step(cause: Cause, seed: int) -> int:
    """Draws the first broken step, after 10."""
    return random.Random(f"{cause.name} {seed}").randint(11, 15)


def trained(world: Path, run_dir: Path, cause: Cause | None, seed: int, first: int) -> dict[str, str]:
    """Trains a run to its end with a cause, or without one. Returns the environment that explain gets."""
    settings = USUAL | {"trainer__total_training_steps": first + AFTER, "trainer__seed": seed}
    preset = PRESET if cause is None else cause.preset
    world = world_of(cause, world)
    planted = dict(os.environ)
    if cause is not None:
        settings |= cause.values
        if cause.resumes:
            _train(
                preset,
                world,
                run_dir,
                settings | {"trainer__total_training_steps": first - 1, "trainer__save_freq": first - 1},
            )
            settings |= {"trainer__save_freq": first - 1, "trainer__resume_mode": "auto"}
        marks = run_dir.with_suffix(".marks")
        marks.mkdir(parents=True)
        paths = [str(PLANTED), str(ROOT), planted.get("PYTHONPATH", "")]
        planted |= {
            "MRL_PLANTED": f"{cause.name}@{1 if cause.resumes else first}@{RESPONSES}",
            "MRL_MARKS": str(marks),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
    _train(preset, world, run_dir, settings, planted)
    return planted if cause is not None and cause.in_software else dict(os.environ)


def _train(
    preset: Path,
    world: Path,
    run_dir: Path,
    settings: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> None:
    own = overrides(world, **settings)
    place = next(number for number, text in enumerate(own) if "custom_reward_function" in text)
    own = own[: place - 1] + own[place + 1 :]  # the preset's own rule judges answers, or the world's
    if (world / "reward.py").exists():
        own += ["--set", f"reward.custom_reward_function.path={json.dumps(str(world / 'reward.py'))}"]
    done = mrl("train", str(preset), "--run-dir", str(run_dir), *own, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def judged(world: Path, folder: Path, cause: Cause | None, seed: int) -> dict[str, Any]:
    """Runs a cause (None: a healthy run), lets it be explained, and says whether the first verdict names it."""
    first = first_step(cause, seed) if cause else HEALTHY - AFTER
    run_dir = folder / f"{cause.name if cause else 'healthy'}-{seed}"
    began = time.monotonic()
    environment = trained(world, run_dir, cause, seed, first)
    middle = time.monotonic()
    done = mrl("explain", str(run_dir), "--json", env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    verdicts = found["verdicts"]
    told = verdicts[0] if verdicts else {"kind": "", "cause": "", "evidence": ""}
    line = {
        "cause": cause.name if cause else "",
        "seed": seed,
        "planted": first if cause else None,
        "found": found["step"],
        "repeats": found["repeats"],
        "kind": told["kind"],
        "verdict": told["cause"],
        "right": _is_right(cause, told) if cause else not verdicts,
        "train_s": round(middle - began, 1),
        "explain_s": round(time.monotonic() - middle, 1),
        "bytes": sum(file.stat().st_size for file in run_dir.rglob("*") if file.is_file()),
    }
    (run_dir / "explained.json").write_text(done.stdout)
    return line


def _is_right(cause: Cause, told: Mapping[str, Any]) -> bool:
    text = f"{told['cause']} {told['evidence']}"
    return told["kind"] in cause.kinds and any(word in text for word in cause.words)


def main(given: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--only", nargs="*", default=[each.name for each in CAUSES], help="names; healthy: none")
    parser.add_argument("--world", type=Path, help="a warm world with two sources; made by default")
    options = parser.parse_args(given)
    world = options.world or warm_world(options.folder / "world")
    by_name = {each.name: each for each in (*CAUSES, *OF_LAYOUTS)} | {"healthy": None}
    for seed in options.seeds:
        for name in options.only:
            shutil.rmtree(options.folder / f"{name}-{seed}", ignore_errors=True)
            shutil.rmtree(options.folder / f"{name}-{seed}.marks", ignore_errors=True)
            try:
                line = judged(world, options.folder, by_name[name], seed)
            except AssertionError as error:
                line = {"cause": name, "seed": seed, "right": False, "failed": str(error)[-600:]}
            with (options.folder / "planted.jsonl").open("a") as file:
                print(json.dumps(line), file=file)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
