"""A run's prompts keep the day on which it began, in every place where a chat template is rendered."""

import json
import pickle
from dataclasses import asdict
from datetime import date
from pathlib import Path

import pytest
from small_model import write_model
from test_config_rules import GPT_OSS, LLAMA, TINY, only

from mrl.config.load import load_config
from mrl.data.dataset import load_chat_tokenizer
from mrl.data.quick_tokenizer import quick_tokenizer
from mrl.driver.assemble_data import prompt_parameters
from mrl.driver.first_look import _answered, _answered_apart, _Asked
from mrl.driver.resume import FIXED, begun_in, with_template_date
from mrl.engine.requests import turns_spec
from mrl.record.run_dir import RunDir

MESSAGES = "{% for message in messages %}{{ message.content }}{% endfor %}"
# Meta's Llama-3.2-3B-Instruct writes "%d %b %Y", openai's gpt-oss-20b "%Y-%m-%d"
WRITTEN = {GPT_OSS + MESSAGES: "Current date: 2024-07-26", LLAMA + MESSAGES: "26 Jul 2024"}


def folder_of(tmp_path: Path, template: str) -> Path:
    folder = tmp_path / "model"
    write_model(folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def resolved(folder: Path, *overrides: str):
    return load_config(TINY, overrides=[f"model.path={folder}", *overrides])


@pytest.mark.parametrize("template", WRITTEN)
def test_transformers_and_the_quick_tokenizer_write_the_runs_day_and_not_todays(tmp_path, template):
    folder = folder_of(tmp_path, template)
    config = resolved(folder, "data.template_date=2024-07-26", "rollout.turns={tools: [calculator]}").config
    in_prompts = prompt_parameters(config.data).template_arguments()
    in_turns = turns_spec(config.rollout.turns, config.data).template_arguments
    asked = [{"role": "user", "content": "1+1"}]
    for tokenizer in (quick_tokenizer(folder, in_prompts), load_chat_tokenizer(str(folder), in_prompts)):
        for arguments in (in_prompts, in_turns, pickle.loads(pickle.dumps(in_turns))):
            text = tokenizer.apply_chat_template(asked, tokenize=False, **arguments)
            assert text == WRITTEN[template] + "1+1"


def test_a_resumed_run_has_the_day_of_its_first_start_and_so_has_one_that_begins_from_its_checkpoint(tmp_path):
    dated = folder_of(tmp_path, GPT_OSS)
    first = resolved(dated, f"trainer.run_dir={tmp_path / 'run'}")
    assert begun_in(first.config.trainer, resume=False) is None
    today = with_template_date(first, None).config.data.template_date
    assert today == date.today().isoformat()

    then = resolved(dated, "data.template_date=2024-07-26")
    (tmp_path / "run" / "checkpoints" / "step-2").mkdir(parents=True)
    RunDir(tmp_path / "run").config.write_text(then.to_record())
    again = with_template_date(first, begun_in(first.config.trainer, resume=True))
    assert again.config.data.template_date == "2024-07-26"
    assert again.config.data.template_arguments["strftime_now"]("%d.%m.%y") == "26.07.24"

    checkpoint = tmp_path / "run" / "checkpoints" / "step-2"
    fixed = {"trainer": {"fixed": {"data.template_date": "2024-07-26"}}}
    (checkpoint / "manifest.json").write_text(json.dumps(fixed))
    branch = resolved(dated, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    assert with_template_date(branch, begun_in(branch.config.trainer, False)).config.data.template_date == "2024-07-26"
    assert "data.template_date" in FIXED

    # a checkpoint that lies elsewhere says its day itself, also where no template is at hand
    other = tmp_path / "copied" / "step-2"
    other.mkdir(parents=True)
    (other / "manifest.json").write_text(json.dumps({"trainer": {"fixed": {"data.template_date": "2024-07-25"}}}))
    plain = load_config(TINY)
    assert with_template_date(plain, other).config.data.template_date == "2024-07-25"
    (tmp_path / "run" / "config.resolved.yaml").write_text("of: another version")
    assert with_template_date(first, tmp_path / "run").config.data.template_date == today


def test_a_given_day_is_kept_and_a_template_that_writes_none_gets_none(tmp_path):
    dated = resolved(folder_of(tmp_path, LLAMA), "data.template_date=2020-02-29")
    assert with_template_date(dated, tmp_path) is dated
    plain = load_config(TINY)
    assert with_template_date(plain, None) is plain and "strftime_now" not in plain.config.data.template_arguments


@pytest.mark.parametrize("word", ["2024-02-30", "26 Jul 2024", "2024-7-26", "today"])
def test_what_is_no_date_is_refused(word):
    assert only(f"data.template_date={word}").rule == "must be a date as YYYY-MM-DD"


def test_a_process_without_torch_reads_the_same_prompts(tmp_path):
    folder = folder_of(tmp_path, GPT_OSS + MESSAGES)
    row = {"data_source": "x", "prompt": [{"role": "user", "content": "1+1"}], "reward_model": {"ground_truth": "2"}}
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for _ in range(2)))
    rows = [
        "data.max_prompt_length=32",
        f"data.train_files=[{tmp_path / 'rows.jsonl'}]",
        "data.val_files=[]",
        "data.drop_duplicates=false",
    ]
    found = {}
    for day in ("2024-07-26", "2024-07-27"):
        data = resolved(folder, *rows, "data.train_batch_size=2", f"data.template_date={day}").config.data
        asked = _Asked(str(folder), data, 0, template_arguments=data.template_arguments)
        found[day] = _answered(asked, quick_tokenizer(folder, data.template_arguments)).fingerprint
        assert json.loads(json.dumps(asdict(asked)["template_arguments"])) == {"strftime_now": day}
    assert _answered_apart(asked).fingerprint == found["2024-07-27"] != found["2024-07-26"]
