"""What a rehearsal sees of a run: what ran, in each process below its commands, and nothing without its hook."""

import importlib
import inspect
import os
import subprocess
import sys
from functools import reduce
from types import SimpleNamespace

import pytest

from mrl.config.load import load_config
from mrl.config.schema import leaf
from mrl.tools.rehearse.compose import WorkFolder
from mrl.tools.rehearse.marks import SWITCHES
from mrl.tools.rehearse.stages import environment
from mrl.tools.rehearse.watched import WATCHED, write_hook

ESTIMATES = """
import os, signal
import numpy as np
from mrl.algo.advantages import AdvantageInputs, response_advantages
def estimate(name):
    response_advantages(name, AdvantageInputs(np.array([0.0, 1.0]), np.zeros(2), np.ones(2, np.int64)))
for name in ("rloo", "rloo", "grpo"):
    estimate(name)
if os.fork():
    os.wait()
else:
    estimate("grpo")
os.kill(os.getpid(), signal.SIGKILL)
"""
LOSES = """
import torch
from types import SimpleNamespace
from mrl.algo.losses import LossInputs, policy_loss
from mrl.algo.plain import Denominators, PolicyLossParameters
from mrl.rank.forward import _loss
ones, current = torch.ones(2, 3), torch.zeros(2, 3, requires_grad=True)
parameters, mask = PolicyLossParameters("vanilla"), torch.ones(2, 3, dtype=torch.bool)
policy_loss(parameters, LossInputs(current, None, ones, mask), Denominators(6, 2))
"""
NOTHING_SEEN = """
import os, sys
assert not os.listdir(sys.argv[1])
"""
ON_A_RANK = """
fields = dict.fromkeys(["ref_log_probs", "teacher_log_probs", "teacher_top_log_probs", "loss_weights", "selected"])
outputs = SimpleNamespace(log_probs=current, entropy=None, top_log_probs=None)
_loss(parameters, SimpleNamespace(old_log_probs=None, advantages=ones, response_mask=mask, **fields), outputs,
    Denominators(6, 2))
"""


def seen(work: WorkFolder, *arguments: str) -> dict[str, list[str]]:
    """Runs Python with these arguments as a rehearsal runs its commands. Returns the names of each process."""
    write_hook(work.hook, work.exercised)
    subprocess.run([sys.executable, *arguments], env=environment(work), check=True, timeout=120)
    return {file.stem: file.read_text().splitlines() for file in work.exercised.glob("*.txt")}


def test_a_name_is_written_once_by_each_process_below_and_outlives_a_kill(tmp_path):
    """A process that another Python started, and one that is forked from it after its own names."""
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ESTIMATES!r}])"
    found = seen(WorkFolder(tmp_path), "-c", program)
    both = ["algorithm.adv_estimator=rloo", "algorithm.adv_estimator=grpo"]
    assert sorted(found.values(), key=len) == [both[1:], both]


def test_a_loss_that_ranks_train_with_is_seen_and_one_that_is_only_tried_is_not(tmp_path):
    work = WorkFolder(tmp_path)
    (found,) = seen(work, "-c", LOSES + NOTHING_SEEN + ON_A_RANK, str(work.exercised)).values()
    assert found == ["algorithm.policy_loss.loss_mode=vanilla", "algorithm.anchor=on_policy"]


def test_calls_are_made_up_in_a_rehearsal_and_the_hosts_own_sitecustomize_runs(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import os\nos.environ['RAN'] = 'own'\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "own"), os.environ.get("PYTHONPATH", "")]))
    says = "import inspect, os; from mrl.engine.conversations import Conversations as C; "
    says += "print(os.environ['RAN'], inspect.signature(C).parameters['reader'].default.__name__)"
    work = WorkFolder(tmp_path)
    write_hook(work.hook, work.exercised)
    for env, reader in ((environment(work), "MadeUpCalls"), (os.environ, "DialectReader")):
        told = subprocess.run([sys.executable, "-c", says], env=env, check=True, capture_output=True, text=True)
        assert told.stdout.split() == ["own", reader]


@pytest.mark.parametrize("row", WATCHED, ids=lambda row: f"{row.switch}-{row.function}")
def test_what_is_watched_is_in_the_trainer(row):
    function = reduce(getattr, row.function.split("."), importlib.import_module(row.module))
    assert inspect.isfunction(function) and function.__module__ == row.module


def given_to(function: str, **given) -> SimpleNamespace:
    """Arguments for `seen` of a row: those named, which the function must have, with its own defaults for others."""
    (row,) = {(row.module, row.function) for row in WATCHED if row.function == function}
    parameters = inspect.signature(reduce(getattr, row[1].split("."), importlib.import_module(row[0]))).parameters
    assert given.keys() <= parameters.keys()
    return SimpleNamespace(**{name: given.get(name, each.default) for name, each in parameters.items()})


def some(**values) -> SimpleNamespace:
    return SimpleNamespace(**values)


CHUNK = some(config=some(recompute_granularity="full"), ddp_config=some(overlap_grad_reduce=True))
PLAIN = some(config=some(recompute_granularity=None), ddp_config=some(overlap_grad_reduce=False))
# function, arguments, result, what is seen of each of its switches in the table's order
SEEN = (
    ("loss_pass", {"chunks": [CHUNK, CHUNK]}, None, [2, "full"]),
    ("loss_pass", {"chunks": [PLAIN]}, None, [1, "None"]),
    ("set_gradient_reduction", {"chunks": [CHUNK]}, None, [True]),
    ("set_gradient_reduction", {"chunks": [PLAIN]}, None, [None]),
    ("AdamState.__init__", {"self": some(_hybrid=True)}, None, [True]),
    ("AdamState.__init__", {"self": some(_hybrid=False)}, None, [None]),
    ("PredictingLayer.make_trained", {}, None, [True]),
    ("_choosing", {"wanted": [1], "has_gaps": True, "training": True}, None, ["R3"]),
    ("_choosing", {"wanted": [1], "has_gaps": False, "training": True}, None, ["R2"]),
    ("_choosing", {"wanted": [1], "has_gaps": True}, None, [None]),
    ("_choosing", {"wanted": None, "has_gaps": False, "training": True}, None, [None]),
    ("Adapter.__init__", {"lora": some(rank=4)}, None, [4]),
    ("drawing_noise", {"dropout": 0.1}, None, [0.1]),
    ("drawing_noise", {"dropout": 0.0}, None, [None]),
    ("block_scales", {}, None, ["fp8"]),
    ("response_advantages", {"adv_estimator": "rloo"}, None, ["rloo"]),
    ("value_loss_pass", {}, None, ["gae"]),
    ("MegatronCritic.__init__", {"self": some(_has_own_groups=True)}, None, [True]),
    ("MegatronCritic.__init__", {"self": some(_has_own_groups=False)}, None, [None]),
    ("_loss", {"parameters": some(loss_mode="gspo"), "inputs": some(old_log_probs=1)}, None, ["gspo", None]),
    ("_loss", {"parameters": some(loss_mode="gspo"), "inputs": some(old_log_probs=None)}, None, ["gspo", "on_policy"]),
    ("RankBatch._take_anchor", {"self": some(_algorithm=some(anchor="rollout"))}, {"anchor": 1}, ["rollout"]),
    ("RankBatch._take_anchor", {"self": some(_algorithm=some(anchor="rollout"))}, {}, [None]),
    ("RankBatch._take_anchor", {"self": some(_algorithm=some(anchor="recompute"))}, {"anchor": 1}, [None]),
    ("Residence.__init__", {"section": "distillation.teacher_model", "switched": ("parameters",)}, None, [True]),
    ("Residence.__init__", {"section": "distillation.teacher_model", "switched": ()}, None, [None]),
    ("Residence.__init__", {"switched": ("parameters",)}, None, [None]),
)  # fmt: skip


@pytest.mark.parametrize(("function", "given", "result", "wanted"), SEEN)
def test_a_call_shows_the_value_whose_code_it_ran(function, given, result, wanted):
    arguments = given_to(function, **given)
    assert [row.seen(arguments, result) for row in WATCHED if row.function == function] == wanted


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("is_base", [True, False])
def test_a_reference_on_the_host_is_a_copy_and_not_the_base_of_adapters(leaves, is_base):
    adapters = object()
    own = some(config=some(ref=some(param_offload=leaves)), adapters=adapters)
    (row,) = [row for row in WATCHED if row.function == "MegatronActor._load_reference"]
    assert row.seen(given_to(row.function, self=own), adapters if is_base else object()) is (
        True if leaves and not is_base else None
    )


def test_a_frozen_router_is_seen_on_its_parameter():
    from mrl.rank.parameter_marks import FROZEN

    (row,) = [row for row in WATCHED if row.switch == "actor.freeze_router"]
    for frozen, name, found in (
        (True, "a.router.weight", True),
        (True, "a.weight", None),
        (False, "a.router.weight", None),
    ):
        parameter = some(**{FROZEN: frozen})
        chunk = some(named_parameters=lambda name=name, parameter=parameter: [(name, parameter)])
        assert row.seen(given_to(row.function, chunks=[chunk]), None) is found


def test_code_behind_a_switch_says_its_value_where_that_is_more_than_on():
    """In the words of the key: a rehearsal waits for key=value."""
    config = load_config("parallel_configs/tiny-moe/cpu.yaml").config
    by_code = [switch for switch in SWITCHES if switch.mark is None and switch.value is None]
    with_value = {each.name for each in by_code if not isinstance(leaf(config, each.name), bool | None)}
    on_alone = {each.name for each in by_code if isinstance(leaf(config, each.name), bool)}
    calls = ((row, given, result) for function, given, result, _ in SEEN for row in WATCHED if row.function == function)
    values = [(row.switch, row.seen(given_to(row.function, **given), result)) for row, given, result in calls]
    assert not [name for name, value in values if value is True and name in with_value]
    assert not [name for name, value in values if value not in (None, True) and name in on_alone]
