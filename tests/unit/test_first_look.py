"""What is told of data, reward and plug-ins before anything starts, by `mrl validate` and `mrl train` alike."""

import json
import re
import sys
from pathlib import Path

import dialect_templates
import numpy as np
import pytest
import torch
from small_model import write_model

from mrl.acting.environment_pool import check_tools
from mrl.algo.advantages import ADVANTAGE_FUNCTIONS, AdvantageInputs, tried_advantage
from mrl.algo.losses import TOKEN_LOSSES
from mrl.algo.own_functions import unload
from mrl.cli.main import main
from mrl.cluster.prerequisites import check_devices_here
from mrl.config.load import load_config
from mrl.config.rules import seen_violations
from mrl.config.run_rules import unseen_files
from mrl.config.schema import RunConfig
from mrl.data.dataset import PromptDataset, PromptParameters, load_tokenizer
from mrl.data.quick_tokenizer import quick_tokenizer
from mrl.driver.assemble_data import load_training
from mrl.driver.first_look import look
from mrl.driver.own_loss import refusal
from mrl.engine.requests import turns_spec
from mrl.errors import VERBOSE, ConfigError, DataError, EnvironmentFault
from mrl.model import planning_model_spec
from mrl.reward.pool import RewardPool

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
REWARD = "reward.custom_reward_function.path"
LOSS = "algorithm.policy_loss.custom.path"
RIGHT = "def compute_score(solution_str, ground_truth, **_):\n    return float(solution_str == ground_truth)\n"
LOSS_TEXT = "from mrl.algo.losses import register_loss\n\n\n@register_loss('mine')\ndef loss(*_):\n    ...\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with rows, a reward and a loss; `model.path` is not there, so no row is tokenised."""
    monkeypatch.chdir(tmp_path)
    for name in ("train", "val"):
        rows = [
            {"data_source": "mine", "prompt": f"{i}+1=", "reward_model": {"ground_truth": str(i + 1)}} for i in range(4)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(RIGHT)
    (tmp_path / "loss.py").write_text(LOSS_TEXT)
    return tmp_path


def config_with(*overrides: str):
    own = ["model.path=Qwen/Qwen3-30B-A3B", "data.train_files=train.jsonl", "data.val_files=val.jsonl"]
    return load_config(TINY, overrides=[*own, f"{REWARD}=reward.py", *overrides])


def seen(*overrides: str):
    resolved = config_with(*overrides)
    return [(v.field, v.rule) for v in seen_violations(resolved, planning_model_spec(resolved.config.model.path)[0])]


def test_a_file_is_missed_where_its_folder_is_here_and_said_where_it_is_not(folder):
    assert seen() == [] and unseen_files(config_with().config) == []
    assert seen("data.train_files=tarin.jsonl", f"{REWARD}=/nope.py", f"{LOSS}=/nope.py") == [
        ("data.train_files", "tarin.jsonl is not a file that can be read"),
        (REWARD, "is not a file that can be read"),
        (LOSS, "is not a file that can be read"),
    ]
    elsewhere = config_with("data.train_files=/shared/data/train.parquet")
    assert seen("data.train_files=/shared/data/train.parquet") == []
    (said,) = unseen_files(elsewhere.config)
    assert "data.train_files: /shared/data/train.parquet" in said


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("$HOME/data/train.parquet", "variables of a shell"),
        ("${DATA}/train.parquet", "variables of a shell"),
        ("$(pwd)/none/train.parquet", "variables of a shell"),
        ("\"['/a/b.parquet', '/a/c.parquet']\"", "a list in quotes"),
        ("hdfs://a/b.parquet", "it is a URL"),
        ("s3://a/b.parquet", "the path of a copy or mounted folder"),
    ],
)
def test_what_is_a_path_on_no_host_is_a_fault_as_hydra_would_read_it(folder, written, why):
    """Lines of verl's scripts, where a shell and hydra read variables and lists (examples/grpo_trainer of 0.9.1)."""
    resolved = config_with(f"data.train_files={written}")
    (found,) = seen_violations(resolved, planning_model_spec(resolved.config.model.path)[0])
    assert why in found.why and unseen_files(resolved.config) == []


def test_a_dollar_inside_of_a_name_is_no_variable_and_one_of_the_runs_folder_is(folder):
    resolved = config_with("data.train_files=/cluster/users/a$b/train.parquet")
    model = planning_model_spec(resolved.config.model.path)[0]
    assert seen_violations(resolved, model) == [] and "a$b" in " ".join(unseen_files(resolved.config))
    (found,) = seen_violations(config_with("trainer.run_dir=$HOME/runs/x"), model)
    assert found.field == "trainer.run_dir" and "variables of a shell" in found.why
    (found,) = seen_violations(config_with("trainer.run_dir=s3://bucket/runs/x"), model)
    assert found.field == "trainer.run_dir" and "it is a URL" in found.why


def test_a_misspelt_folder_is_a_fault_where_the_file_is_in_its_neighbour(folder, monkeypatch):
    monkeypatch.setenv(VERBOSE, "1")  # folders of tests may have long names
    Path("data/gsm8k").mkdir(parents=True)
    Path("data/gsm8k/train.jsonl").write_bytes(Path("train.jsonl").read_bytes())
    for wrong in ("data/gsmk8/train.jsonl", "dta/gsm8k/train.jsonl", str(folder / "daat/gsm8k/train.jsonl")):
        resolved = config_with(f"data.train_files={wrong}")
        (found,) = seen_violations(resolved, planning_model_spec(resolved.config.model.path)[0])
        assert f"did you mean {folder}/data/gsm8k/train.jsonl?" in str(found) and unseen_files(resolved.config) == []
    assert seen("data.train_files=data/gsmk8/other.jsonl") == [], "it may be on the run's host alone"


def test_a_folder_is_missed_where_its_parent_is_here_and_said_where_it_is_not(folder):
    """The reference model's and the first checkpoint's, as files are."""
    kl = ["algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.001"]
    begun = "trainer.resume_mode=resume_path"
    assert seen(*kl, "ref.path=none", begun, "trainer.resume_from_path=none") == [
        ("ref.path", "is no folder"),
        ("trainer.resume_from_path", "is no folder"),
    ]
    assert seen("ref.path=none") == [], "no reference is asked"
    elsewhere = [*kl, "ref.path=/shared/models/r", begun, "trainer.resume_from_path=/shared/runs/a"]
    assert seen(*elsewhere) == []
    (said,) = unseen_files(config_with(*elsewhere).config)
    assert "ref.path: /shared/models/r" in said and "trainer.resume_from_path: /shared/runs/a" in said
    assert seen(*kl, "ref.path=hf://ORG/NAME") == [] == unseen_files(config_with(*kl, "ref.path=hf://ORG/NAME").config)


def test_a_reference_of_another_architecture_is_told_before_anything_starts(folder):
    write_model(folder / "small")
    kl = ["algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.001"]
    ((field, rule),) = seen(*kl, "ref.path=small")
    assert field == "ref.path" and "another architecture than model.path's (" in rule and "num_layers" in rule
    Path("small/config.json").unlink()
    ((field, rule),) = seen(*kl, "ref.path=small")
    assert field == "ref.path" and "config.json does not exist" in rule
    write_model(folder / "same")
    resolved = config_with("model.path=same", *kl, "ref.path=same")
    assert seen_violations(resolved, planning_model_spec("same")[0]) == []


def test_a_configuration_without_prompts_says_what_training_needs():
    (said,) = unseen_files(load_config(TINY, overrides=["data.train_files=[]", "data.val_files=[]"]).config)
    assert said == "data.train_files names no file, and mrl train wants prompts"


def test_the_home_of_who_starts_the_run_stands_for_its_sign(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    config = config_with(
        "data.train_files=[~/train.jsonl, /elsewhere/~/b.jsonl]", f"{REWARD}=~/reward.py", f"{LOSS}=~/loss.py",
        "algorithm.policy_loss.loss_mode=mine", "trainer.run_dir=~/runs/one", "model.path=~/models/Qwen3-30B-A3B",
    ).config  # fmt: skip
    assert config.data.train_files == (f"{folder}/train.jsonl", "/elsewhere/~/b.jsonl")
    assert config.model.path == f"{folder}/models/Qwen3-30B-A3B" and config.trainer.run_dir == f"{folder}/runs/one"
    assert seen("data.train_files=~/train.jsonl", f"{REWARD}=~/reward.py") == []
    assert look(config_with("data.train_files=~/train.jsonl", f"{REWARD}=~/reward.py").config).fingerprint is None
    monkeypatch.delenv("HOME")
    assert not config_with("data.train_files=~/train.jsonl").config.data.train_files[0].startswith("~")
    assert config_with("trainer.experiment_name=a~b").config.trainer.experiment_name == "a~b"


@pytest.mark.parametrize(
    ("text", "mode", "rule"),
    [
        (LOSS_TEXT, "mine", None),
        (LOSS_TEXT, "other", "registers mine, not other"),
        ("def loss(*_):\n    ...\n", "mine", "registers nothing, not mine"),
        ("def loss(:\n", "mine", "is no Python"),
        ("from helpers import *\n", "mine", None),  # another file of the user's may register it
        ("from mrl.algo.losses import register_loss\nNAME = 'a'\nregister_loss(NAME)(print)\n", "mine", None),
    ],
)
def test_the_name_that_a_loss_is_registered_by_is_read_off_its_file(folder, text, mode, rule):
    (folder / "loss.py").write_text(text)
    found = seen(f"{LOSS}=loss.py", f"algorithm.policy_loss.loss_mode={mode}")
    assert found == [] if rule is None else [field for field, _ in found] == [LOSS] and rule in found[0][1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def compute_score(**_):\n    return None\n", "NoneType 'None' where a number is expected"),
        ("def compute_score(**_):\n    raise KeyError('answer')\n", "3 raised: KeyError: 'answer'"),
        ("def another(**_):\n    return 1.0\n", "no function 'compute_score'; the file defines: another"),
        ("import nothing_of_this_name\n", "importing it failed: ModuleNotFoundError"),
    ],
)
def test_a_reward_that_cannot_score_is_told_from_one_row(folder, text, words):
    (folder / "reward.py").write_text(text)
    with pytest.raises(Exception, match="reward") as refused:
        look(config_with().config)
    assert words in str(refused.value) and getattr(refused.value, "exit_code", 1) in (2, 3)


@pytest.mark.parametrize(
    ("overrides", "missing"),
    [
        (["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[acc, accuracy_reward]"], "accuracy_reward"),
        (["algorithm.filter_groups={enable: true, metric: seq_reward}"], "seq_reward"),  # one of verl's metrics
        (["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[acc, reward]"], None),
        (["algorithm.filter_groups={metric: seq_reward}"], None),
    ],
)
def test_a_part_that_the_reward_does_not_give_is_missed_before_anything_is_generated(folder, overrides, missing):
    config = config_with(*overrides).config
    if missing is None:
        assert look(config).reward is None
        return
    with pytest.raises(DataError, match=rf"has no number under '{missing}' .*; allowed: score, reward, acc"):
        look(config)


def test_a_reward_is_looked_at_where_the_rows_are_elsewhere_and_the_other_way_round(folder):
    elsewhere = ["data.train_files=/shared/t.parquet", "data.val_files=/shared/v.parquet"]
    with pytest.raises(ConfigError, match="no function 'other'; the file defines: compute_score"):
        look(config_with(*elsewhere, "reward.custom_reward_function.name=other").config)
    assert look(config_with(*elsewhere).config).fingerprint is None
    assert look(config_with(f"{REWARD}=/shared/reward.py").config).fingerprint is None


def test_a_reward_may_fail_on_some_answers_and_be_allowed_to_fail_on_all(folder):
    (folder / "reward.py").write_text("def compute_score(solution_str, **_):\n    return float(int(solution_str))\n")
    said = look(config_with().config).reward
    begin = "train.jsonl, row 1: the reward failed on 2 of 3 texts that it was tried on, first on 'nonsense': raised: "
    assert said.startswith(f"{begin}ValueError")
    (folder / "reward.py").write_text("def compute_score(**_):\n    return None\n")
    said = look(config_with("reward.max_failure_share=1.0").config).reward
    assert "failed on all that it was tried on, which" in said
    (folder / "reward.py").write_text(RIGHT)
    assert look(config_with().config).reward is None


def test_of_a_long_text_on_which_a_reward_fails_the_beginning_is_said(folder):
    body = "    return None if solution_str[0] == 'y' else 1.0\n"
    (folder / "reward.py").write_text(f"def compute_score(solution_str, **_):\n{body}")
    (folder / "train.jsonl").write_text((folder / "train.jsonl").read_text().replace('"1"', json.dumps("y" * 400)))
    said = look(config_with().config).reward
    assert f"failed on 1 of 3 texts that it was tried on, first on '{'y' * 40}'...: " in said and len(said) < 300


@pytest.mark.parametrize("failing", ["nonsense", "1", "Answer: 1"])
def test_validate_warns_of_a_reward_that_fails_on_some_texts_and_of_rows_that_are_left_out(folder, capsys, failing):
    """Rows are counted from 1, as lines are."""
    body = f"    if solution_str == {failing!r}:\n        return None\n    return 1.0\n"
    (folder / "reward.py").write_text(f"def compute_score(solution_str, **_):\n{body}")
    lines = Path("train.jsonl").read_text().splitlines(keepends=True)
    Path("train.jsonl").write_text("".join([*lines[:2], "not json\n", *lines[2:], "neither\n", "[]\n"]))
    own = ["model.path=Qwen/Qwen3-30B-A3B", "data.train_files=train.jsonl", "data.val_files=val.jsonl"]
    own += [f"{REWARD}=reward.py", "data.max_bad_row_share=0.5"]
    main(["validate", str(TINY), "--json", *(part for each in own for part in ("--set", each))])
    said = json.loads(capsys.readouterr().out)
    warned = [line for line in said["notes"] if line.startswith("warning: ")]
    assert said["ok"] and all(len(line) <= 300 for line in warned)
    words = ["row 3: not JSON", "(and 1 more row of the file)", "row 7: a JSON list where an object", failing]
    assert len(warned) == 3 and all(any(word in line for line in warned) for word in words)
    assert "failed on 1 of 3 texts" in warned[2]


def test_a_reward_of_the_network_that_has_judged_one_answer_is_asked_no_more(folder, monkeypatch):
    """A judge may take seconds, and cost."""
    asked = []
    score = RewardPool.score
    monkeypatch.setattr(RewardPool, "score", lambda pool, items: asked.extend(items) or score(pool, items))
    look(config_with("reward.network=true").config)
    assert [item.response_text for item in asked] == ["nonsense"]
    asked.clear()
    (folder / "reward.py").write_text("def compute_score(solution_str, **_):\n    return float(int(solution_str))\n")
    look(config_with("reward.network=true").config)
    assert [item.response_text for item in asked] == ["nonsense", "1"]
    asked.clear()
    look(config_with().config)
    assert [item.response_text for item in asked] == ["nonsense", "1", "Answer: 1"]


def test_looking_needs_neither_torch_nor_ray(folder):
    code = "import sys; import mrl.driver.preflight; sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    import subprocess

    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}).returncode == 0


def test_a_column_that_lines_lack_is_told_without_a_tokenizer(folder):
    rows = [{"data_source": "mine", "question": str(i), "reward_model": {"ground_truth": "1"}} for i in range(12)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"no column prompt; found: data_source, question.*and 11 more rows"):
        look(config_with().config)


TURNS = ["rollout.turns.tools=[weather]", "rollout.turns.path=tools.py"]
TOOL = 'def weather(place: str) -> str:\n    """Says the weather of a place."""\n    return "rain"\n'


def test_tools_are_looked_for_and_loaded_as_other_plug_ins_are(folder):
    assert seen(*TURNS) == [("rollout.turns.path", "is not a file that can be read")]
    assert ("rollout.turns.index", "is not a file that can be read") in seen(*TURNS, "rollout.turns.index=none.db")
    Path("tools.py").write_text("def another() -> str:\n    return ''\n")
    assert seen(*TURNS) == []
    with pytest.raises(ConfigError, match="weather"):
        look(config_with(*TURNS).config)
    Path("tools.py").write_text(TOOL)
    assert look(config_with(*TURNS).config).fingerprint is None


@pytest.mark.parametrize("quick", [True, False])
def test_the_prompts_of_a_run_with_tools_name_them_at_the_first_look_too(folder, monkeypatch, quick):
    """Else a resume would be refused for other prompts."""
    config = of_a_model_that_calls(monkeypatch, quick)
    offer = check_tools(turns_spec(config.rollout.turns, config.data).tools)
    tokenizer = load_tokenizer("model")
    of_run = load_training(config.data, config.trainer.seed, tokenizer, offer).prompts.fingerprint
    without = load_training(config.data, config.trainer.seed, tokenizer).prompts.fingerprint
    assert look(config).fingerprint == of_run != without


def of_a_model_that_calls(monkeypatch, quick: bool, *overrides: str):
    """Its configuration; `quick`: its tokenizer is read without transformers."""
    write_model(Path("model"))
    hermes = dialect_templates.tokenizer("hermes")
    hermes.save_pretrained("model")
    settings = json.loads(Path("model/config.json").read_text())
    end = hermes.convert_tokens_to_ids("<|im_end|>")
    Path("model/config.json").write_text(json.dumps(settings | {"vocab_size": len(hermes), "eos_token_id": end}))
    Path("tools.py").write_text(TOOL)
    if quick:
        assert quick_tokenizer(Path("model")) is not None
    else:
        monkeypatch.setattr("mrl.driver.first_look.quick_tokenizer", lambda *_: None)
    lengths = ["data.max_prompt_length=900", "data.train_batch_size=4"]
    shipped = ["reward.custom_reward_function=null", "reward.function=exact_match"]  # no process has to load a file
    return config_with(*TURNS, "model.path=model", *lengths, *shipped, *overrides).config


@pytest.mark.parametrize("whole", [True, False], ids=["all rows", "too many rows"])
@pytest.mark.parametrize("how", ["quick", "here", pytest.param("apart", marks=pytest.mark.long)])
def test_a_model_that_train_refuses_for_tools_is_refused_at_the_first_look_too(folder, monkeypatch, how, whole):
    config = of_a_model_that_calls(monkeypatch, how == "quick")
    if how == "apart":
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    if not whole:
        monkeypatch.setattr("mrl.driver.first_look.READ_WHOLE_BYTES", 0)
    assert (look(config).fingerprint is None) != whole
    template = Path("model/chat_template.jinja")
    said = template.read_text()
    if how != "apart" or whole:  # a process takes two seconds: apart each refusal is seen once
        template.write_text(said.replace("tool_response", "result"))
        with pytest.raises(ConfigError, match="in no form that is known"):
            look(config)
        template.write_text(said)
    if how != "apart" or not whole:
        Path("model/config.json").write_text(Path("model/config.json").read_text().replace("eos_token_id", "other_id"))
        with pytest.raises(ConfigError, match="no eos_token_id"):
            look(config)


class _Characters:
    """A tokenizer of one token a character."""

    chat_template = "{{ messages }}"

    def apply_chat_template(self, messages, **_):
        return [ord(letter) for message in messages for letter in message["content"]]


def test_equal_reasons_are_one_line_with_a_count(folder):
    rows = [{"data_source": "mine", "question": str(i), "reward_model": {"ground_truth": "1"}} for i in range(12)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError) as refused:
        PromptDataset.load(["train.jsonl"], _Characters(), PromptParameters())
    said = str(refused.value).splitlines()
    assert len(said) == 2 and "train.jsonl, row 1: no column prompt; found: data_source, question, rew" in said[1]
    assert said[1].endswith("(and 11 more rows of the file)")


def test_where_no_prompt_is_short_enough_the_limit_its_key_and_the_shortest_are_named(folder):
    with pytest.raises(DataError, match=r"data\.max_prompt_length is 2 tokens, and the shortest prompt has 4; 4 rows"):
        PromptDataset.load(["train.jsonl"], _Characters(), PromptParameters(max_prompt_length=2))


def test_weights_that_are_here_are_looked_at_by_validate(folder, capsys):
    """A folder with a configuration alone is enough for a plan, which is said."""
    write_model(folder / "model")
    files = ["data.train_files=train.jsonl", "data.val_files=val.jsonl", f"{REWARD}=reward.py", "model.path=model"]
    small = ["data.max_prompt_length=16", "data.max_response_length=16", "data.train_batch_size=4"]
    given = [*files, *small, "actor.ppo_mini_batch_size=4"]

    def validate() -> tuple[int, str]:
        try:
            main(["validate", str(TINY), *(part for each in given for part in ("--set", each))])
        except SystemExit as ended:
            return ended.code, "".join(capsys.readouterr())
        return 0, "".join(capsys.readouterr())

    code, said = validate()
    assert code == 0 and "no weights" not in said, said
    weights = Path("model/model.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    code, said = validate()
    assert code == 4 and "model.safetensors cannot be read as safetensors" in said
    weights.unlink()
    code, said = validate()
    assert code == 0 and "model.path: model has no weights, and mrl train wants them" in said


def test_validate_and_train_refuse_alike_before_anything_starts(folder, capsys, monkeypatch):
    """The same message from both; train stops before it imports what brings Ray."""
    (folder / "reward.py").write_text("def compute_score(**_):\n    return None\n")
    monkeypatch.setattr("mrl.driver.preflight.check_checkpoint", lambda *_: None)
    monkeypatch.setattr("mrl.driver.preflight.load_model_spec", lambda path, *_: planning_model_spec(path)[0])
    monkeypatch.setattr("mrl.driver.preflight.check_disk_space", lambda *_: None)
    monkeypatch.setattr("mrl.driver.preflight.with_models_at_hand", lambda resolved, **_: resolved)
    said = {}
    for command in ("validate", "train"):
        files = ["data.train_files=train.jsonl", "data.val_files=val.jsonl", f"{REWARD}=reward.py"]
        overrides = ["model.path=Qwen/Qwen3-30B-A3B", *files]
        with pytest.raises(SystemExit) as ended:
            main([command, str(TINY), *(part for each in overrides for part in ("--set", each))])
        said[command] = (ended.value.code, capsys.readouterr().err.replace(f"mrl {command}: ", ""))
    assert said["validate"] == said["train"] and said["train"][0] == 3 and "NoneType" in said["train"][1]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("inputs.totals * inputs.custom['scale']", "fails raised KeyError: 'scale'; constants are read from"),
        ("inputs.nothing", "fails raised AttributeError"),
        ("np.zeros(3)", "gives an array of shape (3,)"),
    ],
)
def test_an_advantage_that_fails_is_told_from_a_made_up_step(folder, body, words):
    (folder / "fails.py").write_text(
        "import numpy as np\nfrom mrl.algo.advantages import register_advantage\n\n\n"
        f"@register_advantage('fails')\ndef fails(inputs):\n    return {body}\n"
    )
    own = f"algorithm.custom_advantage.path={folder / 'fails.py'}"
    with pytest.raises(ConfigError, match=re.escape(words)):
        look(config_with("algorithm.adv_estimator=fails", own).config)
    assert "fails" not in ADVANTAGE_FUNCTIONS


@pytest.mark.parametrize(
    "more", [(), ("use_kl_in_reward=true",), ("gdpo_reward_keys=[acc]", "gdpo_reward_weights=[2]")]
)
def test_an_advantage_that_works_is_asked_of_what_a_step_has_and_its_file_runs_anew(folder, more):
    (folder / "works.py").write_text(
        "from mrl.algo.advantages import register_advantage\n\nseen = []\n\n"
        "@register_advantage('works')\ndef works(inputs):\n"
        "    seen.append(inputs)\n"
        f"    taken_off = inputs.penalties if {'use_kl_in_reward=true' in more} else 0.0\n"
        "    weighed = sum((inputs.part_weights[key] * part for key, part in inputs.parts.items()), inputs.scores)\n"
        "    return len(seen) * inputs.custom['scale'] * (weighed - taken_off)\n"
    )
    path = folder / "works.py"
    own = f"algorithm.custom_advantage={{path: {path}, parameters: {{scale: 2.0}}}}"
    look(config_with("algorithm.adv_estimator=works", own, *(f"algorithm.{key}" for key in more)).config)
    assert "works" not in ADVANTAGE_FUNCTIONS
    inputs = AdvantageInputs(
        np.ones(2), np.zeros(2, int), np.ones(2, int), penalties=np.zeros(2), custom={"scale": 3.0}
    )
    with tried_advantage(str(path), "works"):
        assert ADVANTAGE_FUNCTIONS["works"](inputs).tolist() == [3.0, 3.0], "what was asked before is forgotten"


@pytest.fixture
def own_loss(folder, monkeypatch):
    """Writes a file whose loss returns an expression, and names it with constants and further settings."""
    monkeypatch.setattr("mrl.driver.own_loss.PATIENCE_S", 900.0)  # beside others torch may take long

    def written(body: str, *more: str, imported: str = "torch") -> RunConfig:
        (folder / "own.py").write_text(
            f"import {imported}\n\nfrom mrl.algo.losses import TokenLoss, register_loss\n\n\n"
            f"@register_loss('own')\ndef own(parameters, inputs, log_ratio):\n    print('asked')\n    return {body}\n"
        )
        custom = "algorithm.policy_loss.custom={path: own.py, parameters: {scale: 2.0}}"
        mode = "algorithm.policy_loss.loss_mode=own"
        return config_with(custom, mode, "algorithm.policy_loss.loss_agg_mode=token-mean", *more).config

    yield written
    TOKEN_LOSSES.pop("own", None)
    unload("own.py")


def test_a_loss_whose_import_is_wrong_is_told_before_anything_starts(own_loss, monkeypatch):
    wrong = own_loss("None", imported="nothing_of_this_name")
    with pytest.raises(ConfigError, match=r"custom\.path: .*own\.py cannot be loaded: ModuleNotFoundError"):
        look(wrong)
    assert "own" not in TOKEN_LOSSES
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    look(wrong)  # without torch, as on a laptop


def test_a_loss_that_prints_may_import_from_the_current_directory_as_on_ranks(own_loss, folder):
    """It is loaded, and what fails is its constant."""
    (folder / "beside.py").write_text("")
    with pytest.raises(ConfigError, match="own raised KeyError: 'strength'"):
        look(own_loss("parameters.custom['strength']", imported="beside"))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("parameters.custom['strength'] * log_ratio", "own raised KeyError: 'strength'; constants are read from"),
        ("log_ratio", "own raised AttributeError"),
        ("TokenLoss(log_ratio[:, :2], inputs.response_mask)", "own raised RuntimeError"),
        ("TokenLoss(log_ratio.detach(), inputs.response_mask)", "own raised RuntimeError: element 0 of tensors"),
        ("TokenLoss(inputs.ref_log_probs * log_ratio, inputs.response_mask)", "own raised TypeError"),
    ],
)
def test_a_loss_that_fails_is_told_from_a_made_up_micro_batch(own_loss, body, words):
    config = own_loss(body)
    assert words in refusal(config.algorithm, config.distillation)


@pytest.mark.parametrize("needed", ["torch.distributed.get_rank()", "torch.zeros(1, device='cuda')"])
def test_a_loss_that_needs_what_ranks_alone_have_is_left_to_them(own_loss, needed):
    if torch.cuda.is_available():
        pytest.skip("this process has a device")
    config = own_loss(f"TokenLoss(log_ratio * ({needed} + 1), inputs.response_mask)")
    assert refusal(config.algorithm, config.distillation) is None


def test_a_file_that_ends_the_process_or_writes_past_python_is_told(own_loss, folder):
    (folder / "ends.py").write_text("import os\n\nos.system('echo said')\nraise SystemExit(3)\n")
    with pytest.raises(ConfigError, match=r"own\.py cannot be loaded: SystemExit: 3"):
        look(own_loss("None", imported="ends"))


@pytest.mark.parametrize(
    ("more", "column"),
    [
        ((), "inputs.entropy"),
        (("algorithm.anchor=on_policy",), "inputs.old_log_probs"),
        (("algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.1"), "inputs.ref_log_probs"),
        (("algorithm.rollout_correction={level: token, mode: truncate, high: 2}",), "inputs.weights"),
        (("distillation.enabled=true", "distillation.teacher_model.model_path=x"), "inputs.teacher_log_probs"),
        (("algorithm.entropy_coeff=0.1",), "parameters.custom['scale']"),
    ],
)
def test_a_loss_is_asked_about_what_an_update_has(own_loss, more, column):
    config = own_loss(f"TokenLoss(log_ratio * {column}, inputs.response_mask)", *more)
    assert refusal(config.algorithm, config.distillation) is None


def test_a_host_without_the_runs_devices_is_told_before_a_model_is_fetched(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cluster = config_with("cluster.device=cuda", "cluster.n_gpus_per_node=8").config.cluster
    monkeypatch.setattr("mrl.cluster.prerequisites.shows_devices", lambda kind: kind == "cpu")
    with pytest.raises(EnvironmentFault, match=r"cluster\.device is cuda, and this host shows no such device"):
        check_devices_here(cluster)
    check_devices_here(config_with().config.cluster)
    check_devices_here(cluster.model_copy(update={"address": "10.0.0.1:6379"}))  # of another's devices
