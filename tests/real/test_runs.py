"""Whole runs through the command line and through a Ray job: three steps on eight-fold parallelism's small sibling,
and exact resume.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from deadlines import END_S, RUN_S
from metric_names import DYNAMIC, KL_LOSS, OFFLOAD, REFERENCE, SAVING, STEPS_AFTER_SAVING, VALIDATION, check_names
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from world import FOUR_GRPO_STEPS, GRPO, PRESET, ROOT, make_world, metrics, overrides, succeeded, without_times

from mrl.process.free_ports import free_port
from mrl.record.sample_files import read_samples


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


def train(world: Path, run_dir: Path, *more: str, preset: Path = PRESET, **values) -> subprocess.Popen:
    command = ["mrl", "train", str(preset), "--run-dir", str(run_dir), *overrides(world, **values), *more]
    log = run_dir.with_suffix(".log").open("a")
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def finish(process: subprocess.Popen, run_dir: Path, deadline_s: float = RUN_S) -> int:
    """Exit status; ends the process, with all it started, when the deadline passes."""
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(
            f"not done after {deadline_s} s:\n{run_dir.with_suffix('.log').read_text()[-3000:]}"
        ) from None


def wait_for_step(process: subprocess.Popen, run_dir: Path, step: int, deadline_s: float = RUN_S) -> None:
    end = time.monotonic() + deadline_s
    while not any(row["training/global_step"] >= step for row in metrics(run_dir)):
        assert process.poll() is None, run_dir.with_suffix(".log").read_text()[-3000:]
        assert time.monotonic() < end, f"step {step} did not come within {deadline_s} s"
        time.sleep(0.05)


def exported(run_dir: Path, folder: Path) -> dict:
    """Weights of a checkpoint, or of a run's newest one, through the conversion command."""
    succeeded("convert", "megatron-to-hf", str(run_dir), "-o", str(folder))
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


@pytest.mark.real
@pytest.mark.long
def test_three_steps_on_tp2_pp2_ep2_with_two_engines(world, tmp_path):
    run_dir = tmp_path / "run"
    layout = dict(
        actor__layout__world_size=4, actor__layout__pipeline_model_parallel_size=2, rollout__num_engines=2,
        cluster__n_gpus_per_node=6, cluster__cpus_per_actor=0.25, cluster__cpus_per_engine=0.5,
    )  # fmt: skip
    steps = dict(
        trainer__total_training_steps=3, trainer__save_freq=2, trainer__val_before_train=False, trainer__test_freq=-1
    )
    process = train(world, run_dir, **steps, **layout)
    assert finish(process, run_dir) == 0, run_dir.with_suffix(".log").read_text()[-3000:]
    rows = metrics(run_dir)
    assert [row["training/global_step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["training/rollout_log_probs_abs_diff_mean"] < 1e-4
        assert row["reshard/weight_version"] == row["training/global_step"]
        assert row["actor/grad_norm"] > 0 and row["actor/skipped_updates"] == 0
    before, after = (
        load_file(world / "model" / "model.safetensors"),
        exported(run_dir / "checkpoints" / "step-2", tmp_path / "hf"),
    )
    assert after.keys() == before.keys()
    assert all((after[name] != before[name]).any() for name in before), "every tensor is trained"
    samples = read_samples(run_dir / "samples", 3)
    assert {sample["weight_version"] for sample in samples} == {2}
    transformers_says_what_the_engines_said(tmp_path / "hf", samples[::4])


def transformers_says_what_the_engines_said(folder: Path, samples: list[dict]) -> None:
    """The exported weights are those that vLLM generated with: its log-probs of what it sampled are transformers'."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for sample in samples:
        prompt, response = sample["prompt_ids"], sample["response_ids"]
        with torch.no_grad():
            log_probs = model(torch.tensor([prompt + response])).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        expected = log_probs.gather(-1, torch.tensor(response)[:, None])[:, 0]
        assert (expected - torch.tensor(sample["rollout_log_probs"])).abs().max() < 1e-5


@pytest.mark.real
def test_killed_and_resumed_as_a_job_equals_uninterrupted(four_grpo_steps, tmp_path):
    world, whole = four_grpo_steps
    broken = tmp_path / "broken"
    check_the_run_of_a_recipe(metrics(whole))
    command = ["mrl", "explain", str(whole), "--replay", "--json"]
    replaying = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)  # beside what follows

    settings = FOUR_GRPO_STEPS | {"trainer__resume_mode": "auto"}
    process = train(world, broken, *GRPO, **settings)  # there is no run yet: it begins one
    wait_for_step(process, broken, 3)
    started = [(p, p.name()) for p in psutil.Process(process.pid).children(recursive=True)]
    check_that_they_come_from_one_server([p for p, name in started if name.startswith("VLLM")])
    check_what_is_listened_on(started)
    process.kill()
    process.wait()
    check_that_no_worker_outlives(started)

    again = json.loads(replaying.communicate(timeout=RUN_S)[0])  # its last two steps, from the checkpoint before
    assert again["repeats"] and again["weights"] and (again["from"], again["step"]) == (2, 4), again
    of_ranks = [name for name in metrics(whole)[-1] if name.startswith(("actor/", "training/rollout_"))]
    assert again["compared"] >= len(of_ranks) > 20, (again, of_ranks)

    with ray_head(tmp_path / "ray") as environment:
        arguments = ["--run-dir", str(broken), *overrides(world, **FOUR_GRPO_STEPS)]
        check_that_a_job_resumes_and_a_wrong_one_fails(arguments, environment)

    assert without_times(metrics(broken)) == without_times(metrics(whole))
    first, second = exported(whole, tmp_path / "hf-whole"), exported(broken, tmp_path / "hf-broken")
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)


def check_that_no_worker_outlives(started: list[tuple[psutil.Process, str]]) -> None:
    """Workers end after their driver was killed; those that do not are ended here."""
    kinds = ("ray::Actor", "ray::Engine", "VLLM")  # Ray's own processes leave in their own time
    assert all(any(name.startswith(kind) for _, name in started) for kind in kinds), started
    workers = [p for p, name in started if name.startswith(kinds)]
    _, left = psutil.wait_procs(workers, timeout=END_S)
    for worker in left:
        worker.kill()
    assert not left, f"outlived a killed driver: {left}"


def check_that_a_job_resumes_and_a_wrong_one_fails(arguments: list[str], environment: dict[str, str]) -> None:
    """`arguments` of a run that is there, for launch/submit.sh."""
    submit = [str(ROOT / "launch" / "submit.sh"), str(PRESET), *GRPO, *arguments]
    done = subprocess.run([*submit, "--resume"], env=environment, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    failed = subprocess.run(
        [*submit, "--set", "actor.optim.lrr=1"], env=environment, capture_output=True, text=True, timeout=END_S
    )
    assert failed.returncode != 0 and "did you mean" in failed.stdout + failed.stderr


def check_that_they_come_from_one_server(processes: list[psutil.Process]) -> None:
    """Core and workers of an engine are forked from a process that has imported vLLM, with no thread to lose."""
    (server,) = {process.parent() for process in processes}
    assert len(processes) == 3 and server.num_threads() == 1
    assert "multiprocessing.forkserver" in " ".join(server.cmdline())


def check_what_is_listened_on(started: list[tuple[psutil.Process, str]]) -> None:
    """As SECURITY.md says it: on every address listen a store at most, and Ray in its own processes."""
    most = {"VLLM": 1, "ray::Actor": 2, "ray::Engine": 2}
    for process, name in started:
        allowed = next((number for kind, number in most.items() if name.startswith(kind)), None)
        if allowed is None:
            continue
        sockets = [each for each in process.net_connections(kind="inet") if each.status == psutil.CONN_LISTEN]
        everywhere = {each.laddr.port for each in sockets if each.laddr.ip in ("::", "0.0.0.0")}
        assert len(everywhere) <= allowed, (name, sockets)


def check_the_run_of_a_recipe(rows: list[dict]) -> None:
    """The first mini-batch of the run stands at its reference, the others have left it."""
    check_names(rows, REFERENCE, KL_LOSS, DYNAMIC, OFFLOAD, VALIDATION, SAVING, STEPS_AFTER_SAVING)
    first, second = (row for row in rows if row["training/global_step"] in (1, 2))
    assert 0 <= first["actor/kl_loss"] < second["actor/kl_loss"] < 1
    assert first["router/drift"] == second["router/drift"] == 0
    assert first["timing_s/ref"] > 0
    assert first["actor/padding_share"] < 0.02


class ray_head:
    """A Ray head on loopback with its own ports and folder, as launch/start_head.sh starts it;
    the environment of its clients.
    """

    def __init__(self, folder: Path):
        self.folder = Path("/tmp") / f"ray-{os.getpid()}"  # short, for Ray's sockets
        self.log = folder.with_suffix(".log")

    def __enter__(self) -> dict[str, str]:
        port, dashboard = free_port(), free_port()
        environment = os.environ | {
            "PORT": str(port), "DASHBOARD_PORT": str(dashboard), "TEMP": str(self.folder), "CPUS": "2",
            "RAY_API": f"http://127.0.0.1:{dashboard}",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [str(ROOT / "launch" / "start_head.sh"), "--block"], env=environment, stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._wait(dashboard)
        return environment

    def _wait(self, port: int) -> None:
        end = time.monotonic() + END_S
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.2)
        raise AssertionError(f"no dashboard after {END_S:.0f} s:\n{self.log.read_text()[-2000:]}")

    def __exit__(self, *_) -> None:
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        _, left = psutil.wait_procs([*children, psutil.Process(self.process.pid)], timeout=END_S)
        for child in left:
            child.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
