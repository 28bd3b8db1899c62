"""The ladder of checks: what a line says however a check ends, configurations of its runs on devices."""

import importlib
import json
import subprocess
import sys
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
    assert ladder._line_of_process("one", "cpu")["why"] == "ended with 9: out of memory"


def test_a_process_that_says_that_all_is_well_and_then_dies_has_failed(monkeypatch, tmp_path):
    (tmp_path / "ladder.py").write_text(
        'import os; print(\'{"check": "one", "status": "ok"}\', flush=True); os.abort()'
    )
    monkeypatch.setattr(ladder, "HERE", tmp_path)
    line = ladder._line_of_process("one", "cpu")
    assert (line["check"], line["status"]) == ("one", "failed") and line["why"].startswith("ok, then ended with -6")


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
