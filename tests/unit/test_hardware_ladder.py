"""The ladder of checks: what a line says however a check ends, what is wrong between nodes, configurations of its runs
on devices.
"""

import importlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mrl.cli.main import make_parser
from mrl.config.load import load_config
from mrl.config.rules import check as check_rules
from mrl.errors import EnvironmentFault
from mrl.model import model_spec

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "hardware"))
checks, ladder, nodes, runs = (importlib.import_module(name) for name in ("checks", "ladder", "nodes", "runs"))


def ended(monkeypatch, function) -> dict:
    monkeypatch.setitem(checks.CHECKS, "one", checks.Check("one", function))
    return checks.run_check("one", checks.Machine("cpu"))


def raising(error: Exception):
    def function(machine):
        raise error

    return function


def test_a_line_says_how_a_check_ended(monkeypatch):
    line = ended(monkeypatch, lambda machine: {"gb_per_s": 2.0})
    assert (line["check"], line["device"], line["status"], line["gb_per_s"]) == ("one", "cpu", "ok", 2.0)
    assert ended(monkeypatch, raising(checks.Skip("one device")))["why"] == "one device"
    wrong = ended(monkeypatch, raising(checks.Wrong("slow: look at the link")))
    assert (wrong["status"], wrong["why"]) == ("failed", "slow: look at the link")
    assert ended(monkeypatch, raising(EnvironmentFault("no driver; install it")))["status"] == "failed"
    defect = ended(monkeypatch, raising(KeyError("x")))
    assert defect["status"] == "failed" and defect["where"].startswith("test_hardware_ladder.py")


def test_a_process_that_says_nothing_has_a_line_made_for_it(monkeypatch, tmp_path):
    (tmp_path / "ladder.py").write_text(
        "import sys; print('no line'); print('out of memory', file=sys.stderr); sys.exit(9)"
    )
    monkeypatch.setattr(ladder, "HERE", tmp_path)
    assert ladder._line_of_process("one", "cpu")["why"] == "ended with 9: out of memory"


def test_figures_are_rounded_and_a_line_is_json(capsys):
    checks.say({"a": 1.23456789, "b": [0.1234567, "x"], "c": {"d": 12345.6}})
    assert json.loads(capsys.readouterr().out) == {"a": 1.235, "b": [0.1235, "x"], "c": {"d": 12350.0}}


WELL = nodes.Node("a", "NVIDIA H100 80GB HBM3", "580.65", "torch 2.13.0", 0.0, 16.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"device": "NVIDIA H200"},
            r"several devices: NVIDIA H100 80GB HBM3 on a, c; NVIDIA H200 on b\. a job takes one kind",
        ),
        ({"driver": "535.1"}, "several drivers: .*535.1 on b. install one driver"),
        ({"versions": "torch 2.12.0"}, "several versions .* install the same row"),
        ({"clock_s": 7.5}, r"clocks differ by 7\.5 s \(b is off\): run chrony"),
        ({"shm_gib": 0.0625}, "b: /dev/shm has 64 MiB: give its container --shm-size"),
        ({"closed": ("10.0.0.1:20123",)}, r"b cannot reach 10\.0\.0\.1:20123: open TCP between the nodes"),
    ],
)
def test_what_does_not_belong_together_is_told_with_its_cure(change, said):
    every = [WELL, replace(WELL, name="b", **change), replace(WELL, name="c", clock_s=0.1)]
    (fault,) = nodes.faults(every)
    assert re.search(said, fault), fault
    assert nodes.faults([WELL, replace(WELL, name="b", clock_s=0.4)]) == []


def test_a_node_says_what_it_is():
    said = nodes.facts("cpu")
    assert "torch " in said["versions"] and said["shm_gib"] > 0


def test_a_closed_port_is_found_and_an_open_one_is_not():
    listener = nodes.Listener()
    (open_port, *_), free = listener.ports(), nodes.Listener()
    closed = free.ports()[0]
    for each in free._sockets:
        each.close()
    assert nodes.closed_of([("127.0.0.1", open_port), ("127.0.0.1", closed)]) == [f"127.0.0.1:{closed}"]


@pytest.mark.parametrize("device", ["cuda", "npu"])
@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize(
    ("preset", "settings"), [("cpu.yaml", "separate_settings"), ("cpu-colocated.yaml", "colocated_settings")]
)
def test_runs_of_the_ladder_break_no_rule_on_devices(device, devices, preset, settings):
    if (preset, devices) == ("cpu.yaml", 1):
        with pytest.raises(checks.Skip, match="one device"):
            runs.separate_settings(device, 1)
        return
    own = getattr(runs, settings)(device, devices)
    resolved = load_config(
        ROOT / "parallel_configs" / "tiny-moe" / preset, None, [f"{k}={json.dumps(v)}" for k, v in own.items()]
    )
    check_rules(resolved, TINY, check_paths=False)


@pytest.mark.parametrize("name", ["run_separate", "run_colocated", "resume"])
def test_commands_of_the_ladder_are_commands(monkeypatch, name):
    given = []

    def parsed(machine, *words):
        given.append(make_parser().parse_args(words))  # exits for what is no command
        raise checks.Wrong("it ran")

    monkeypatch.setattr(runs, "_mrl", parsed)
    monkeypatch.setattr(runs, "_has_engines", lambda: None)
    monkeypatch.setattr(runs, "make_world", lambda folder: folder)
    assert ended(monkeypatch, getattr(runs, name))["why"] == "it ran" and len(given) == 1


TINY = model_spec({
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "intermediate_size": 256,
    "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "rope_theta": 1e4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
    "torch_dtype": "float32",
})  # fmt: skip


def test_every_check_of_the_ladder_has_a_word_and_names_are_found():
    for file in ladder.FILES:
        importlib.import_module(file)
    assert all(check.function.__doc__ for check in checks.CHECKS.values())
    assert ladder._names(["digest"], fast=False) == ["digest"]
    assert {"devices", "doctor", "digest", "log_probs"} <= set(ladder._names([], fast=True))
    assert not {"actor", "run_separate"} & set(ladder._names([], fast=True))
    with pytest.raises(SystemExit, match="no check nothing"):
        ladder._names(["nothing"], fast=False)
