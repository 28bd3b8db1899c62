"""The ladder of checks: what a line says however a check ends, configurations of its runs on devices."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from mrl.cli.main import make_parser
from mrl.config.load import load_config
from mrl.config.rules import check as check_rules
from mrl.errors import EnvironmentFault, InvalidConfig
from mrl.model import model_spec

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "hardware"))
checks, ladder, runs = (importlib.import_module(name) for name in ("checks", "ladder", "runs"))


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
    assert ladder._line_of_process("one", "cpu", 60)["why"] == "ended with 9: out of memory"


def test_a_process_that_says_that_all_is_well_and_then_dies_has_failed(monkeypatch, tmp_path):
    (tmp_path / "ladder.py").write_text(
        'import os; print(\'{"check": "one", "status": "ok"}\', flush=True); os.abort()'
    )
    monkeypatch.setattr(ladder, "HERE", tmp_path)
    line = ladder._line_of_process("one", "cpu", 60)
    assert (line["check"], line["status"]) == ("one", "failed") and line["why"].startswith("ok, then ended with -6")


def test_what_a_check_said_of_its_parts_stays_where_it_is_ended_by_its_deadline(monkeypatch, tmp_path):
    (tmp_path / "ladder.py").write_text(
        "import json, subprocess, sys, time\n"
        "for part in ({'a': 1}, {'b': 2}): print(json.dumps({'check': 'one', 'status': 'part'} | part), flush=True)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"
    )
    monkeypatch.setattr(ladder, "HERE", tmp_path)
    line = ladder._line_of_process("one", "cpu", 3.0)
    assert (line["status"], line["a"], line["b"]) == ("failed", 1, 2) and line["why"].startswith("not done in its time")
    assert line["seconds"] < 60, "nor does what it started hold the line"


def test_every_line_is_kept_with_what_made_it_and_one_without_time_says_so(monkeypatch, tmp_path, capsys):
    out = tmp_path / "lines.jsonl"
    for variable in (checks.OUT, checks.STAMP, checks.SIZES):
        monkeypatch.setenv(variable, "{}")
    monkeypatch.setattr(ladder, "_stamp", lambda machine: {"machine": "a device", "commit": "c0ffee"})
    monkeypatch.setattr(ladder, "_line_of_process", lambda name, device, limit_s: {"check": name, "status": "failed"})
    monkeypatch.setitem(checks.CHECKS, "one", checks.Check("one", print))
    given = ["ladder.py", "cuda", "one", "digest", "--out", str(out), "--size", "layers=4"]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit, match="1"):
        ladder.main()
    monkeypatch.setattr(sys, "argv", [*given, "--budget", "1"])
    with pytest.raises(SystemExit, match="0"):
        ladder.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["check"], line["status"]) for line in lines] == [
        ("one", "failed"), ("digest", "failed"), ("one", "skipped"), ("digest", "skipped")
    ]  # fmt: skip
    assert all((line["machine"], line["commit"]) == ("a device", "c0ffee") for line in lines)
    assert lines[2]["why"] == "1 s are left of the budget"
    assert checks.Machine("cuda").size(48, 2, "layers") == 4
    assert checks.Machine("cpu").size(48, 2) == 2
    with pytest.raises(SystemExit, match="layers=many: each is NAME=N"):
        ladder._sizes(["layers=many"])


HALF_A_RUN = """
import json, os, sys, time
sys.path.insert(0, sys.argv.pop(1))
import checks
name = sys.argv[2]
if name == "first":
    checks.say({"check": name, "status": "ok"})
else:
    checks.Machine("cpu", name).part({"process": os.getpid()})
    time.sleep(600)
"""
CLIMBING = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import checks, ladder
ladder.HERE, ladder.FILES = Path(sys.argv[2]), ()
ladder._stamp = lambda machine: {"machine": "a device", "commit": "c0ffee"}
for name in ("first", "second", "third"):
    checks.CHECKS[name] = checks.Check(name, print)
sys.argv[1:] = ["cpu", "first", "second", "third", "--out", sys.argv[3]]
ladder.main()
"""


def test_what_was_found_before_the_whole_run_is_killed_is_in_the_file(tmp_path):
    """As where a device's time is over: a check that has ended, and a part of the one that has not."""
    here = str(ROOT / "scripts" / "hardware")
    (tmp_path / "ladder.py").write_text(HALF_A_RUN.replace("sys.argv.pop(1)", repr(here)))
    out = tmp_path / "lines.jsonl"
    climb = subprocess.Popen([sys.executable, "-c", CLIMBING, here, str(tmp_path), str(out)])
    until = time.monotonic() + 50
    while not out.exists() or len(out.read_text().splitlines()) < 2:
        assert climb.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    climb.kill()
    climb.wait()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    os.killpg(lines[1]["process"], signal.SIGKILL)
    assert [(line["check"], line["status"]) for line in lines] == [("first", "ok"), ("second", "part")]
    assert all((line["machine"], line["commit"]) == ("a device", "c0ffee") for line in lines)


def test_a_piece_is_of_checks_in_the_order_of_their_worth():
    for file in ladder.FILES:
        importlib.import_module(file)
    for names in ladder.PIECES.values():
        assert ladder._names(names, fast=False) == list(names)
        assert all(checks.CHECKS[name].limit_s < ladder.BUDGET_S for name in names)


def test_the_page_of_findings_names_tests_and_checks_that_are_there():
    for file in ladder.FILES:
        importlib.import_module(file)
    rows = [line for line in (ROOT / "docs" / "several_devices.md").read_text().splitlines() if line.startswith("| ")][
        1:
    ]
    named = [re.findall(r"`([^` ]+)`", row.rpartition("|")[0].rpartition("|")[2]) for row in rows]
    assert len(rows) > 20 and all(row.split(" | ")[1] in ("mended", "open", "untried") for row in rows)
    for row, names in zip(rows, named, strict=True):
        files = [name for name in names if "/" in name and name.endswith(".py")]
        rungs = [name for name in names if name.isidentifier() and re.search(rf"`{name}`[^.]* of [ABC]", row)]
        assert all((ROOT / file).exists() for file in files), row
        assert all(name in {rung for piece in ladder.PIECES.values() for rung in piece} for name in rungs), row
        assert files or " | mended | " not in row, "who says so?"
        assert rungs or " | untried | " not in row, "what will tell?"


def test_of_vllms_wheel_what_a_hopper_device_does_not_load_is_left_out(tmp_path):
    subset = importlib.import_module("hopper_subset").subset
    kept = ["vllm/_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "vllm/config.py"]
    wheel = tmp_path / "vllm-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        for name in (*kept, "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm/_flashmla_C.abi3.so"):
            made.writestr(name, name)
    (tmp_path / "out").mkdir()
    path, left_out = subset(wheel, tmp_path / "out")
    with zipfile.ZipFile(path) as made:
        assert made.namelist() == kept and made.read(kept[2]) == b"vllm/config.py"
    assert left_out == ["vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm/_flashmla_C.abi3.so"]


def test_a_process_of_several_that_fails_or_does_not_end_is_told(monkeypatch):
    several = importlib.import_module("several")
    program = (
        "import sys, time; w = sys.argv[1]\nif w == 'hang': time.sleep(600)\nprint('[%s]' % w if w != 'die' else 3 / 0)"
    )
    monkeypatch.setattr(several, "__file__", "-c")
    calls = {name: [program, name] for name in ("1", "die", "hang")}
    found = several.together(calls, 5.0)
    assert found["1"] == [1] and found["hang"] is None
    assert found["die"] == "ended with 1: ZeroDivisionError: division by zero"
    assert not several.ended_well(found) and "hang: None" in several._errors(found)


ALONE = """
import importlib.metadata, re, sys
def name(text): return re.sub(r"[-_.]+", "-", text).lower()
packed = set(sys.argv[1:])
owners = {top: {name(one) for one in of} for top, of in importlib.metadata.packages_distributions().items()}
class Refusing:
    def find_spec(self, module, path=None, target=None):
        if owners.get(module) and not owners[module] & packed:
            raise ModuleNotFoundError(f"{module} is of {owners[module]}, which is not packed")
sys.meta_path.insert(0, Refusing())
import huggingface_hub.utils, pydantic, rich.table, safetensors, tokenizers, yaml
huggingface_hub.utils.get_session()
"""


def test_what_is_packed_for_a_machine_without_a_network_needs_nothing_else():
    """The part that is quick to try; what one needs under a condition that holds here, it needs."""
    packed = importlib.import_module("pins").pins()
    done = subprocess.run([sys.executable, "-c", ALONE, *packed], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-500:]
    assert {"megatron-core", "mbridge", "transformers", "numpy"} <= set(packed)
    assert not {"torch", "ray", "vllm", "pandas", "datasets"} & set(packed)


def test_figures_are_rounded_and_a_line_is_json(capsys):
    checks.say({"a": 1.23456789, "b": [0.1234567, "x"], "c": {"d": 12345.6}})
    assert json.loads(capsys.readouterr().out) == {"a": 1.235, "b": [0.1235, "x"], "c": {"d": 12350.0}}


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


@pytest.mark.parametrize("devices", [1, 2])
def test_the_run_in_fp8_breaks_no_rule_on_devices_with_its_wider_model(devices):
    own = runs.colocated_settings("cuda", devices) | runs.QUANTISED
    given = [f"{k}={json.dumps(v)}" for k, v in own.items()]
    resolved = load_config(ROOT / "parallel_configs" / "tiny-moe" / "cpu-colocated.yaml", None, given)
    wide = {"hidden_size": 256, "head_dim": 128, "intermediate_size": 256, "moe_intermediate_size": 256}
    check_rules(resolved, replace(TINY, **wide), check_paths=False)
    with pytest.raises(InvalidConfig, match="needs cuts between blocks of 128 x 128"):
        check_rules(resolved, TINY, check_paths=False)


@pytest.mark.parametrize("name", ["run_separate", "run_colocated", "run_quantised", "resume"])
def test_commands_of_the_ladder_are_commands(monkeypatch, name):
    given = []

    def parsed(machine, *words):
        given.append(make_parser().parse_args(words))  # exits for what is no command
        raise checks.Wrong("it ran")

    monkeypatch.setattr(runs, "_mrl", parsed)
    monkeypatch.setattr(runs, "_has_engines", lambda: None)
    monkeypatch.setattr(runs, "make_world", lambda folder: folder)
    monkeypatch.setattr(runs, "_widen", lambda model: None)
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
