"""Key=value pairs that bash itself passes to verl from 80 public scripts: none is lost, none differs without a word.

Made by scripts/evidence/verl_scripts.py, which runs each script over stubs; the reader of scripts has no part in it.
Every pair is compared twice: as the translation takes it over, and as the reader reads it from a script of these words.
"""

import importlib.util
import json
import re
import shlex
import sys
from collections import Counter
from functools import cache
from math import ceil
from pathlib import Path

import pytest
import yaml

from mrl.tools.import_verl.expansion import Value
from mrl.tools.import_verl.report import Import
from mrl.tools.import_verl.shell import read_script
from mrl.tools.import_verl.translate import translate
from mrl.tools.import_verl.verl_command import from_arguments, from_script

ROWS = [json.loads(line) for line in Path(__file__).with_name("verl_passed.jsonl").read_text().splitlines()]
NAMES = [row["path"] for row in ROWS]
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "evidence"))  # what its scripts import of each other
_spec = importlib.util.spec_from_file_location("verl_scripts", ROOT / "scripts" / "evidence" / "verl_scripts.py")
verl_scripts = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(verl_scripts)
# what is asked of verl and not done here, and the values that do not ask for it
NOT_DONE = {
    "actor_rollout_ref.rollout.multi_turn.enable": ("False", "false"),
    "actor_rollout_ref.rollout.name": ("vllm", "sglang", "trtllm"),  # each import names it: see below
    "actor_rollout_ref.rollout.engine_kwargs.trtllm.kv_cache_config.dtype": ("auto",),
    "actor_rollout_ref.rollout.quantization": ("null", "fp8"),
    "actor_rollout_ref.rollout.dtype": ("bfloat16", "float32"),
    "actor_rollout_ref.actor.megatron.qat.enable": ("False", "false"),
    "reward_model.enable": ("False", "false", "null"),
}
# what is said in another way here, and means the same: verl's key and text -> our value
SAID_ANOTHER_WAY = {
    ("trainer.logger", "console"): ["console"],
    ("actor_rollout_ref.model.target_modules", "all-linear"): ["all-linear"],
    ("algorithm.rollout_correction.bypass_mode", "False"): "recompute",
    ("algorithm.rollout_correction.bypass_mode", "false"): "recompute",
    ("algorithm.rollout_correction.bypass_mode", "true"): "rollout",
    ("algorithm.rollout_correction.bypass_mode", "True"): "rollout",
    ("actor_rollout_ref.model.mtp.enable_rollout", "True"): "mtp",
    ("trainer.logger", "'[console,wandb]'"): [],  # one text, which is no logger's name for verl either: a warning
    ("actor_rollout_ref.rollout.enable_rollout_routing_replay", "True"): "R3",
    ("trainer.log_val_generations", "-1"): 0,
}


def passed(row: dict) -> dict[str, str]:
    """Keys and texts as they reach verl; the last of several wins."""
    pairs = (re.fullmatch(r"(\+\+|\+|~)?([^=]+)=(.*)", word, re.DOTALL) for word in row["words"])
    return {pair[2]: pair[3] for pair in pairs if pair[1] != "~" and not pair[2].startswith("--")}


@cache
def imported(path: str) -> Import:
    row = ROWS[NAMES.index(path)]
    words = [Value(word) for word in ("-m", row["entry"], *row["options"], *row["words"])]
    return translate(from_arguments(words, row["entry"], path), path)


def plain(text: str):
    """A text as Hydra's grammar has it: lists, mappings and quotes as YAML's flow style, all else by `scalar`."""
    text = text.strip()
    if text[:1] not in ("[", "{", "'", '"'):
        return scalar(text)
    # a brace behind a backslash is a letter for Hydra, and nothing that YAML reads
    loaded = yaml.safe_load(text.replace("\\{", "\ue000").replace("\\}", "\ue001"))
    return json.loads(json.dumps(loaded, ensure_ascii=False).replace("\ue000", "{").replace("\ue001", "}"))


def scalar(text: str):
    """One number, truth value or name."""
    known = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in known:
        return known[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def test_the_set_is_large_and_says_where_it_is_from():
    assert len(ROWS) >= 60 and len({(row["repository"], row["path"]) for row in ROWS}) == len(ROWS)
    assert all(re.fullmatch(r"[0-9a-f]{40}", row["commit"]) and row["entry"] for row in ROWS)
    assert sum(len(passed(row)) for row in ROWS) > 4000


@pytest.mark.parametrize("path", NAMES)
def test_no_key_that_bash_passes_is_lost(path):
    assert set(passed(ROWS[NAMES.index(path)])) <= imported(path).keys


@pytest.mark.parametrize("path", NAMES)
def test_no_value_differs_without_a_word(path):
    out, texts = imported(path), passed(ROWS[NAMES.index(path)])
    entries = [entry for entry in out.entries if entry.key in texts]
    assert {entry.key for entry in entries} == texts.keys()
    told = {entry.key for entry in entries if entry.why}  # a key may become several of ours, one of them with a word
    silent = []
    for entry in entries:
        key = entry.key
        wanted = SAID_ANOTHER_WAY.get((key, texts[key]), plain(texts[key]))
        ours = out.values[entry.to] if entry.to else entry.value
        if key not in told and not (equal(entry.value, wanted) and equal(ours, wanted)):
            silent.append(f"{entry}; bash says {texts[key]}")
    assert not silent


def equal(one, other) -> bool:
    """Whether values are the same in kind too; 1 and True are not."""
    return one == other and type(one) is type(other)


@pytest.mark.parametrize("path", NAMES)
def test_a_key_that_goes_nowhere_or_becomes_another_value_says_why(path):
    texts = passed(ROWS[NAMES.index(path)])
    assert not [str(entry) for entry in imported(path).entries if entry.key in texts and not entry.to and not entry.why]


def launch_script(row: dict) -> str:
    """A script that passes the row's words: half of them in an array, the others over lines of their own."""
    words = [*row["options"], *row["words"]]
    half = len(words) // 2
    lines = ["#!/usr/bin/env bash", "ARGS=(", *(f"    {shlex.quote(word)}" for word in words[:half]), ")"]
    rest = [shlex.quote(word) for word in words[half:]]
    return "\n".join([*lines, " \\\n    ".join([f'python3 -m {row["entry"]} "${{ARGS[@]}}"', *rest]), ""])


def test_the_shell_reader_reads_every_value_as_bash_passes_it():
    counts = Counter()
    for row in ROWS:
        command = from_script(read_script(launch_script(row), row["path"], {"HOME": "/home/user"}), row["path"])
        counts.update(verl_scripts._judged(command, row["words"]))
    assert counts == {"same": sum(len(passed(row)) for row in ROWS)}


@pytest.mark.parametrize("path", NAMES)
def test_what_is_asked_and_not_done_is_a_loss(path):
    losses = {entry.key for entry in imported(path).losses}
    texts = passed(ROWS[NAMES.index(path)])
    asked = {key for key, usual in NOT_DONE.items() if key in texts and texts[key].strip("'\"") not in usual}
    assert asked <= losses


ALIKE = {"sglang": "SGLang", "trtllm": "TensorRT-LLM"}


@pytest.mark.parametrize(
    "path", [row["path"] for row in ROWS if passed(row).get("actor_rollout_ref.rollout.name") in ALIKE]
)
def test_an_import_names_the_engine_in_whose_place_vllm_generates(path):
    (entry,) = [entry for entry in imported(path).entries if entry.key == "actor_rollout_ref.rollout.name"]
    assert entry.kind == "not_applicable" and f"vLLM generates in place of {ALIKE[entry.value]}" in entry.why


AHEAD = [row["path"] for row in ROWS if "fully_async" in row["entry"]]


@pytest.mark.parametrize("path", AHEAD)
def test_a_fully_asynchronous_script_has_a_bounded_schedule_and_steps_from_sync_to_sync(path):
    texts, ours = passed(ROWS[NAMES.index(path)]), imported(path).values
    number = {name: float(texts.get(f"async_training.{name}", usual)) for name, usual in
              (("staleness_threshold", 0.1), ("trigger_parameter_sync_step", 4), ("require_batches", 1))}  # fmt: skip
    mini = int(texts["actor_rollout_ref.actor.ppo_mini_batch_size"])
    prompts = int(number["trigger_parameter_sync_step"] * number["require_batches"]) * mini
    assert (ours["trainer.schedule"], ours["trainer.max_staleness"]) == ("bounded", ceil(number["staleness_threshold"]))
    assert (ours["data.train_batch_size"], ours["actor.ppo_mini_batch_size"]) == (prompts, mini)
    assert ours["cluster.placement"] == "separate" and "data.gen_batch_size" not in ours
    if "rollout.total_rollout_steps" in texts:
        assert ours["trainer.total_training_steps"] == int(texts["rollout.total_rollout_steps"]) // prompts


@pytest.mark.parametrize("path", [row["path"] for row in ROWS if "one_step_off" in row["entry"]])
def test_a_script_that_is_one_step_off_is_one_step_off_here(path):
    ours = imported(path).values
    assert (ours["trainer.schedule"], ours["cluster.placement"]) == ("one_step_off", "separate")
    assert ours.get("algorithm.anchor", "recompute") == "recompute"
    assert ours["algorithm.rollout_correction.level"] is not None
