"""Where the time of a step goes: stacks of the driver, a rank and an engine's processes, sampled while they work.

    python scripts/bench/step_profile.py [--case short|long|plain|plane] [--seconds 20] [--stacks FOLDER] [--json]

`short` and `long` are our side of scripts/bench/peers.py, 512 answers of 3 tokens and 128 of 300; `plain` is the tiny
preset as it stands, whose step scripts/compare_commits.py times; `plane` is the driver of scripts/bench/data_plane.py
while 8,192 responses are generated at its pace, told from 4,096. py-spy 0.4.3, in an environment of its own (.venv-spy,
made here once), looks at one process after the other, a hundred times a second, for three steps at least. A sample
counts for the part (PARTS) whose function is the innermost in its stack. `busy_s` are a step's seconds of processor, as
the system counts them of the process, divided among parts as samples are. `step_s` is the median step of the same run
before py-spy looks, and `looked_at_s` while it does. Needs tiny-world/ (scripts/make_tiny_world.py).
"""

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from data_plane import FULL, child_command
from data_plane import RATE as RATE_OF_RESPONSES
from peers import CASES, ROOT, programs, settings_of, train_command, world_model

from mrl.record.run_dir import METRICS, read_metrics

ENVIRONMENT = ROOT / ".venv-spy"
PIN = "py-spy==0.4.3"
RATE = 100
FEW, MOST = 4, 100_000  # steps that are left alone; more than any look takes
LIMIT_S = 300.0
LEAST_STEPS = 3
BEGUN_S = 25.0  # until the engines of data_plane.py answer
DRIVER, RANK, ENGINE, CORE, WORKER, SCORER = "driver", "rank", "engine", "vLLM's core", "vLLM's worker", "scorer"
TITLES = {
    RANK: "ray::ActorWorker",
    ENGINE: "ray::EngineWorker",
    CORE: "VLLM::EngineCore",
    WORKER: "VLLM::Worker",
    SCORER: "ray::Scorer",
}
# functions by file and name, of each part of a process
PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    DRIVER: {
        "Ray's calls": ("actor.py:_actor_method_call", "actor.py:_remote", "calls.py:ask"),
        "values put and fetched": ("worker.py:put_object", "worker.py:get_objects", "serialization.py:serialize",
            "serialization.py:deserialize_objects"),
        "answers taken in": ("generation.py:_take_in", "request_streams.py:take", "dispatch.py:answered"),
        "requests sent": ("generation.py:_send_assignments", "dispatch.py:assignments"),
        "scores": ("scoring.py:forward", "scoring.py:collect", "judged_groups.py:collect"),
        "advantages and metrics": ("loop.py:weigh_samples",),
        "rows for ranks": ("step_batch.py:__init__",),
        "weight sync": ("loop.py:sync_engines",),
        "samples' file and metrics": ("loop.py:end_line", "views.py:_serve"),
    },
    RANK: {
        "attention forward": ("attention.py:forward",),
        "experts forward": ("moe_layer.py:forward",),
        "other layers forward": ("gpt_model.py:forward",),
        "backward": ("graph.py:_engine_run_backward",),
        "loss and log-probs": ("forward.py:forward_step", "forward.py:loss_pass", "forward.py:log_prob_pass"),
        "rows of a step": ("rank_step.py:score",),
        "micro-batches": ("rank_step.py:update", "actor.py:_update_once", "actor.py:_gradients"),
        "gradients' exchange": ("finalize_model_grads.py:finalize_model_grads",
            "param_and_grad_buffer.py:start_grad_sync", "param_and_grad_buffer.py:finish_grad_sync"),
        "optimizer": ("optimizer.py:step",),
        "weight sync": ("rank_worker.py:send_weights",),
    },
    ENGINE: {
        "requests made": ("async_llm.py:add_request", "completions.py:sampling_parameters"),
        "requests sent": ("core_client.py:add_request_async",),
        "tokens taken in": ("async_llm.py:output_handler", "core_client.py:process_outputs_socket"),
        "answers made": ("vllm_engine.py:_complete", "vllm_engine.py:_final_output", "vllm_engine.py:_put_completion"),
        "answers taken": ("outbox.py:_tell", "outbox.py:take_finished", "engine_worker.py:take_finished"),
        "Ray's arguments": ("worker.py:deserialize_objects", "serialization.py:serialize"),
        "the event loop": ("threading.py:run",),
    },
    CORE: {
        "schedule": ("scheduler.py:schedule",),
        "tokens entered": ("scheduler.py:update_from_output",),
        "requests received": ("core.py:process_input_sockets", "core.py:_process_input_queue"),
        "tokens sent": ("core.py:process_output_sockets",),
        "RPC to worker": ("multiproc_executor.py:collective_rpc", "multiproc_executor.py:result"),
        "weight sync": ("core.py:_invoke_utility_method",),
    },
    WORKER: {
        "attention": ("qwen3_moe.py:Qwen3MoeAttention.forward",),
        "experts": ("qwen3_moe.py:Qwen3MoeSparseMoeBlock.forward",),
        "other layers": ("qwen3_moe.py:Qwen3MoeForCausalLM.forward",),
        "batches made": ("gpu_model_runner.py:execute_model",),
        "sampling": ("gpu_model_runner.py:sample_tokens", "gpu_worker.py:sample_tokens", "sampler.py:forward"),
        "RPC from core": ("multiproc_executor.py:worker_busy_loop",),
        "weight sync": ("v0_common.py:answer",),
    },
    SCORER: {},
}  # fmt: skip
# a thread is said to work where it naps between looks, or waits within Ray
WAITS = ("cpu_worker.py:wait", "worker.py:main_loop", "worker.py:wait", "threading.py:wait", "selectors.py:select")
FRAME = re.compile(r"^(?P<name>.*) \((?P<file>[^()]*?)(?::\d+)?\)$")


@dataclass(frozen=True)
class Look:
    """Samples of one process: stacks with their counts, and the share of the time that it was on a processor."""

    stacks: Counter[tuple[str, ...]]
    busy: float

    def shares(self, parts: dict[str, tuple[str, ...]]) -> Counter[str]:
        """What of the time each part was on a processor, and what is no part's."""
        named = {function: part for part, functions in parts.items() for function in functions}
        found: Counter[str] = Counter()
        for stack, count in self.stacks.items():
            if any(key in WAITS for key in _keys(stack[-1])):
                continue
            inner = (named[key] for frame in reversed(stack) for key in _keys(frame) if key in named)
            found[next(inner, "all else")] += count
        return Counter({part: self.busy * count / found.total() for part, count in found.items()})


def _keys(frame: str) -> Iterator[str]:
    """How PARTS may name it: by its file and function, the class before that or not."""
    if found := FRAME.match(frame):
        file, name = Path(found["file"]).name, found["name"]
        yield f"{file}:{name}"
        yield f"{file}:{name.rpartition('.')[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=["short", "long", "plain", "plane"])
    parser.add_argument("--seconds", type=float, default=20.0, help="that each process is looked at, at least")
    parser.add_argument("--stacks", type=Path, help="keep what was sampled there")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {}
    for case in options.case or ["short", "long", "plain", "plane"]:
        with tempfile.TemporaryDirectory() as folder:
            run = profile_of_plane if case == "plane" else profile
            found[case] = run(case, Path(folder), options)
        print(*lines(case, found[case]), sep="\n", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(found, indent=1))


def lines(case: str, found: dict[str, Any]) -> Iterator[str]:
    """What a case came to."""
    yield f"{case}: a step takes {found['step_s']:.3f} s, looked at {found['looked_at_s']:.3f} s"
    for role, parts in found["busy_s"].items():
        told = ", ".join(f"{part} {seconds:.3f}" for part, seconds in parts.items())
        yield f"  {role} {sum(parts.values()):.3f}: {told}"


def profile(case: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Runs the case until each of its processes was looked at."""
    with running(case, folder) as (run, metrics):
        wait_for(run, metrics, FEW)
        alone = len(read_metrics(metrics))
        seconds = max(options.seconds, LEAST_STEPS * median(row["timing_s/step"] for row in read_metrics(metrics)[1:]))
        looks = {}
        for role, process in processes(run).items():
            looks[role] = looked(process, seconds, folder / f"{case} {role}", options.stacks)
        steps = [row["timing_s/step"] for row in read_metrics(metrics)]
    looked_at = median(steps[alone:])
    return {
        "step_s": round(median(steps[1:alone]), 3),
        "looked_at_s": round(looked_at, 3),
        "busy_s": {role: in_order(look.shares(PARTS[role]), looked_at) for role, look in looks.items()},
    }


def in_order(shares: Counter[str], step_s: float) -> dict[str, float]:
    """Seconds of a step, the largest first."""
    return {part: round(share * step_s, 3) for part, share in shares.most_common()}


def endless(case: str, folder: Path) -> dict[str, Any]:
    """Settings of the tiny preset with which a case runs until it is ended."""
    world = ROOT / "tiny-world"
    for own in CASES:
        if own.name == case:
            return settings_of(own, world, world_model(own, world, folder), MOST)
    settings: dict[str, Any] = {"trainer.total_training_steps": MOST, "trainer.val_before_train": False}
    return settings | {"trainer.save_freq": -1, "trainer.test_freq": -1}


@contextmanager
def running(case: str, folder: Path) -> Iterator[tuple[psutil.Popen, Path]]:
    """The run's process and the file of its metrics; it is ended as a user would."""
    command = train_command(folder / "run", endless(case, folder))
    with (folder / "log").open("wb") as log:
        run = psutil.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield run, folder / "run" / METRICS
        except RuntimeError as error:
            raise SystemExit(f"{error}:\n{(folder / 'log').read_text()[-3000:]}") from None
        finally:
            if run.poll() is None:
                run.send_signal(signal.SIGTERM)
            try:
                run.wait(LIMIT_S)
            except psutil.TimeoutExpired:
                run.kill()


def wait_for(run: psutil.Popen, metrics: Path, steps: int) -> None:
    """Until so many are over. Raises RuntimeError where the run ends before, or takes too long."""
    until = time.monotonic() + LIMIT_S
    while not metrics.exists() or len(read_metrics(metrics)) < steps:
        if run.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"no {steps} steps")
        time.sleep(0.2)


def processes(run: psutil.Popen) -> dict[str, psutil.Process]:
    """The first of each role. Raises RuntimeError where a role has none."""
    found = {DRIVER: run}
    for child in run.children(recursive=True):
        title = " ".join(child.cmdline())
        for role, begin in TITLES.items():
            if title.startswith(begin):
                found.setdefault(role, child)
    if missing := TITLES.keys() - found.keys():
        raise RuntimeError(f"no process is {' or '.join(sorted(missing))}")
    return found


def profile_of_plane(case: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The driver while its engines answer; what it takes for a whole step's responses."""
    generation = FULL / RATE_OF_RESPONSES
    run = psutil.Popen(child_command(FULL // 2), cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        time.sleep(BEGUN_S)
        look = looked(run, 2 * options.seconds, folder / case, options.stacks)
        if run.wait(LIMIT_S):
            raise SystemExit(f"scripts/bench/data_plane.py ended with {run.returncode}")
    finally:
        if run.poll() is None:
            run.kill()
    busy = in_order(look.shares(PARTS[DRIVER]), generation)
    return {"step_s": generation, "looked_at_s": generation, "busy_s": {DRIVER: busy}}


def looked(process: psutil.Process, seconds: float, file: Path, kept: Path | None) -> Look:
    """Samples a process for so long, and keeps the stacks where they are asked for."""
    words = ["record", "--nonblocking", "--format", "raw", "--rate", str(RATE), "--duration", str(ceil(seconds))]
    command = [str(programs(ENVIRONMENT, (PIN,)) / "py-spy"), *words, "--pid", str(process.pid), "--output", str(file)]
    began, used = time.monotonic(), sum(process.cpu_times()[:2])
    subprocess.run(command, check=True, capture_output=True, timeout=seconds + LIMIT_S)
    busy = (sum(process.cpu_times()[:2]) - used) / (time.monotonic() - began)
    if kept:
        kept.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, kept)
    return Look(read(file.read_text()), busy)


def read(text: str) -> Counter[tuple[str, ...]]:
    """Stacks of py-spy's raw form, a line each: frames from the outermost, and how often they were seen."""
    found: Counter[tuple[str, ...]] = Counter()
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        found[tuple(stack.split(";"))] += int(count)
    return found


if __name__ == "__main__":
    main()
