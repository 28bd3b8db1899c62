"""What a rehearsal sees of a run: nothing is written without the flag, and nothing is lost with it."""

import ast
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from mrl import exercised as module
from mrl.algo.advantages import AdvantageInputs, TokenAdvantages, response_advantages
from mrl.algo.losses import LossInputs, policy_loss
from mrl.algo.plain import Denominators, PolicyLossParameters
from mrl.config.load import load_config
from mrl.config.schema import leaf
from mrl.exercised import VARIABLE, exercised
from mrl.record.spec import metric_spec
from mrl.tools.rehearse.marks import SWITCHES


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    """The folder of a rehearsal, in which this process is."""
    monkeypatch.setattr(module, "_FOLDER", str(tmp_path))
    monkeypatch.setattr(module, "_seen", set())
    return tmp_path


def names(folder: Path) -> dict[str, list[str]]:
    return {file.stem: file.read_text().splitlines() for file in folder.glob("*.txt")}


def test_outside_a_rehearsal_nothing_is_written_or_kept_and_a_call_costs_nothing(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_append", lambda *_: pytest.fail("written outside a rehearsal"))
    assert module._FOLDER is None
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(10_000):
            exercised("actor.param_offload")
        times.append((time.perf_counter() - began) / 10_000)
    assert min(times) < 2e-6, "seconds a call: one comparison"
    assert not module._seen and not list(tmp_path.iterdir())


def test_each_name_is_written_once_into_the_file_of_the_process(folder):
    for name in ("a", "b=1", "a", "b=1"):
        exercised(name)
    assert names(folder) == {str(os.getpid()): ["a", "b=1"]}


def test_a_forked_process_writes_into_its_own_file(folder):
    exercised("a")
    child = multiprocessing.get_context("fork").Process(target=exercised, args=("b",))
    child.start()
    child.join()
    assert names(folder) == {str(os.getpid()): ["a"], str(child.pid): ["b"]}


@pytest.mark.parametrize("given", [True, False])
def test_processes_below_inherit_it_and_what_they_said_outlives_a_kill(given, tmp_path):
    says = (
        "import os, signal; from mrl.exercised import exercised; exercised('a'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {says!r}])"
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment |= {VARIABLE: str(tmp_path)} if given else {}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert list(names(tmp_path).values()) == [["a"]] * given


def loss_metrics(old: torch.Tensor | None) -> dict:
    mask = torch.ones(2, 3, dtype=torch.bool)
    inputs = LossInputs(torch.zeros(2, 3, requires_grad=True), old, torch.ones(2, 3), mask)
    return policy_loss(PolicyLossParameters("vanilla"), inputs, Denominators(6, 2)).metrics


def test_the_loss_and_the_advantages_say_to_a_rehearsal_alone_who_they_are(folder):
    assert loss_metrics(None).keys() == loss_metrics(torch.zeros(2, 3)).keys()
    assert all(metric_spec(name).name == name for name in loss_metrics(None))
    found = response_advantages("rloo", AdvantageInputs(np.array([0.0, 1.0]), np.zeros(2), np.ones(2, np.int64)))
    assert {field.name for field in fields(found)} == {"per_response", "per_turn", "to_come", "shift", "scale"}
    assert isinstance(found, TokenAdvantages)
    assert names(folder)[str(os.getpid())] == [
        "algorithm.policy_loss.loss_mode=vanilla", "algorithm.anchor=on_policy", "algorithm.adv_estimator=rloo",
    ]  # fmt: skip


def said_in_the_code() -> set[str]:
    """Names that `exercised` is called with; of one that ends in a value what stands before it."""
    said = set()
    for file in Path(module.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "exercised":
                name = call.args[0]
                said.add(name.value if isinstance(name, ast.Constant) else name.values[0].value)
    return said


def test_code_behind_a_switch_says_its_value_where_that_is_more_than_on():
    said = said_in_the_code()
    config = load_config("parallel_configs/tiny-moe/cpu.yaml").config
    by_code = [switch for switch in SWITCHES if switch.mark is None and switch.value is None]
    with_value = [each.name for each in by_code if not isinstance(leaf(config, each.name), bool | None)]
    assert {"actor.lora.rank", "actor.lora.dropout", "algorithm.anchor"} <= set(with_value)
    assert [name for name in with_value if not any(each.startswith(f"{name}=") for each in said)] == []
    assert [each.name for each in by_code if isinstance(leaf(config, each.name), bool) and each.name not in said] == []
