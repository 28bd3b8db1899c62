"""Key=value pairs that bash itself passes to verl from 80 public scripts: none is lost, none differs without a word.

Made by scripts/evidence/verl_scripts.py, which runs each script over stubs; the reader of scripts has no part in it.
"""

import json
import re
from functools import cache
from math import ceil
from pathlib import Path

import pytest

from mrl.extras.import_verl.expansion import Value
from mrl.extras.import_verl.keys import row_of
from mrl.extras.import_verl.report import Import
from mrl.extras.import_verl.translate import translate
from mrl.extras.import_verl.verl_command import from_words

ROWS = [json.loads(line) for line in Path(__file__).with_name("verl_passed.jsonl").read_text().splitlines()]
NAMES = [row["path"] for row in ROWS]
# what is asked of verl and not done here, and the values that do not ask for it
NOT_DONE = {
    "actor_rollout_ref.model.lora_rank": ("0",),
    "actor_rollout_ref.rollout.multi_turn.enable": ("False", "false"),
    "actor_rollout_ref.rollout.name": ("vllm",),
    "actor_rollout_ref.rollout.quantization": ("null",),
    "actor_rollout_ref.rollout.dtype": ("bfloat16", "float32"),
    "actor_rollout_ref.actor.megatron.qat.enable": ("False", "false"),
    "actor_rollout_ref.model.mtp.enable": ("False", "false"),
    "reward_model.enable": ("False", "false", "null"),
}


def passed(row: dict) -> dict[str, str]:
    """Keys and texts as they reach verl; the last of several wins."""
    pairs = (re.fullmatch(r"(\+\+|\+|~)?([^=]+)=(.*)", word, re.DOTALL) for word in row["words"])
    return {pair[2]: pair[3] for pair in pairs if pair[1] != "~" and not pair[2].startswith("--")}


@cache
def imported(path: str) -> Import:
    row = ROWS[NAMES.index(path)]
    words = [Value(word) for word in ("-m", row["entry"], *row["options"], *row["words"])]
    return translate(from_words(words, row["entry"], path), path)


def scalar(text: str):
    """A text as Hydra's grammar has it, for what is one number, truth value or name; lists and quotes stay text."""
    text = text.strip()
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
    out, silent = imported(path), []
    texts = passed(ROWS[NAMES.index(path)])
    for entry in out.entries:
        plain = entry.kind in ("carried", "renamed") and not entry.why and not row_of(entry.key).convert
        wanted = scalar(texts.get(entry.key, "")) if plain else None
        if plain and not isinstance(wanted, str) and row_of(entry.key).kind == "to":
            silent += [] if (entry.value, out.values[entry.to]) == (wanted, wanted) else [str(entry)]
    assert not silent


@pytest.mark.parametrize("path", NAMES)
def test_what_is_asked_and_not_done_is_a_loss(path):
    losses = {entry.key for entry in imported(path).losses}
    texts = passed(ROWS[NAMES.index(path)])
    asked = {key for key, usual in NOT_DONE.items() if key in texts and texts[key].strip("'\"") not in usual}
    assert asked <= losses


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
