"""What a rehearsal reads: a checkpoint that is the model's, a tokenizer, the user's rows or synthetic ones,
the user's reward.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_model import write_model

from mrl.config.load import load_config
from mrl.data.dataset import PromptDataset, PromptParameters, load_tokenizer
from mrl.errors import ConfigError, DataError
from mrl.model import known_models
from mrl.model.hf_files import check_checkpoint
from mrl.model.registry import has_tokenizer, known_hf_config
from mrl.reward.builtin_rules import environment
from mrl.reward.items import OK, RewardItem, RewardSpec
from mrl.reward.pool import RewardPool
from mrl.tools.rehearse.compose import WorkFolder
from mrl.tools.rehearse.prepare import TRAIN_ROWS, prepare, rows_of, write_rows
from mrl.tools.rehearse.scoring import ROW, VALIDATION, RehearsalScorer, ScoringSettings, load_scorer, write_scorer
from mrl.tools.rehearse.small_model import (
    HEAD,
    copy_tokenizer,
    small_hf_config,
    vocabulary_size,
    write_checkpoint,
    write_tokenizer,
)

PRESET = Path(__file__).parents[2] / "parallel_configs" / "qwen3-8b" / "h100-1x8.yaml"


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(str(folder))


# ---------------------------------------------------------------- checkpoint


@pytest.mark.parametrize(
    "name",
    ["Qwen3-30B-A3B", "Qwen2.5-0.5B", "Qwen3-8B", "GLM-4.5-Air", "Qwen3-Next-80B-A3B", "Qwen3.5-35B-A3B"],
)
def test_the_checkpoint_is_what_its_config_promises(name, tmp_path):
    assert name in known_models()
    config = small_hf_config(known_hf_config(name), 4, 320, 256)
    model = write_checkpoint(tmp_path, config, (7,), 128)
    for drafts in (False, True):
        check_checkpoint(tmp_path, model.holding(drafts))


def test_the_same_seed_gives_the_same_weights(tmp_path):
    config = small_hf_config(known_hf_config("Qwen3-8B"), 2, 320, 256)
    files = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_checkpoint(tmp_path / name, config, (7,), 128, seed)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen2.5-0.5B"], ids=["head of its own", "tied"])
def test_a_response_ends_about_once_in_its_length(name, tmp_path):
    """The stream is taken as the embedding, normed: layers add a tenth."""
    model = write_checkpoint(tmp_path, small_hf_config(known_hf_config(name), 2, 320, 256), (7,), 100)
    tensors = load_file(tmp_path / "model.safetensors")
    stream = tensors["model.embed_tokens.weight"]
    stream = stream / np.sqrt((stream**2).mean(-1, keepdims=True))
    logits = stream @ tensors[HEAD if HEAD in tensors else "model.embed_tokens.weight"].T
    chances = np.exp(logits - logits.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    assert model.tie_word_embeddings == (name == "Qwen2.5-0.5B")
    assert 1 / 400 < np.median(chances[:, 7]) < 1 / 25


# ---------------------------------------------------------------- tokenizer


def test_our_tokenizer_gives_every_text_back(ours):
    for text in ("What is 1 + 1?", "数学 ümläut 🙂\n", "<|im_start|>"):
        assert ours.decode(ours(text)["input_ids"], clean_up_tokenization_spaces=False) == text
    assert ours.eos_token_id is not None and vocabulary_size(ours) % 64 == 0 >= 0


def test_our_chat_template_has_the_thinking_switch(ours):
    chat = [{"role": "user", "content": "x"}]
    plain, off = (
        ours.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **k)
        for k in ({}, {"enable_thinking": False})
    )
    assert (
        plain == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n" and off == f"{plain}<think>\n\n</think>\n\n"
    )


def test_a_tokenizer_of_the_users_is_taken_as_it_is(tmp_path):
    write_model(tmp_path / "model")
    assert has_tokenizer(tmp_path / "model") and not has_tokenizer(tmp_path)
    copy_tokenizer(tmp_path / "model", tmp_path / "copy")
    assert len(load_tokenizer(str(tmp_path / "copy"))) == len(load_tokenizer(str(tmp_path / "model")))
    assert not (tmp_path / "copy" / "config.json").exists()


# ---------------------------------------------------------------- rows


def users_file(path: Path, rows: int, words: int = 1) -> Path:
    """Prompts of about `words` x 6 letters."""
    write_rows(path, [
        {"data_source": "mine",
            "prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": f"{i} " + "letter" * words}],
         "reward_model": {"ground_truth": str(i), "style": "rule"}, "extra_info": {"split": "train"}}
        for i in range(rows)
    ])  # fmt: skip
    return path


def test_the_first_rows_of_the_users_own_files_are_taken(ours, tmp_path):
    files = [str(users_file(tmp_path / f"{name}.jsonl", 100)) for name in "ab"]
    first, second = rows_of(files, TRAIN_ROWS, ours, PromptParameters(max_prompt_length=64), "openai/gsm8k")
    assert len(first.rows) == len(second.rows) == TRAIN_ROWS // 2 and first.cut == 0 and not first.synthetic
    assert [row["reward_model"]["ground_truth"] for row in first.rows] == [str(i) for i in range(16)]
    assert [row["extra_info"] for row in second.rows] == [{"split": "train", ROW: 16 + i} for i in range(16)]


def test_long_prompts_are_cut_to_fit_and_stay_different(ours, tmp_path):
    file = str(users_file(tmp_path / "long.jsonl", 40, words=100))
    limit = PromptParameters(max_prompt_length=48)
    (found,) = rows_of([file], TRAIN_ROWS, ours, limit, "openai/gsm8k")
    assert found.cut == TRAIN_ROWS
    write_rows(tmp_path / "out.jsonl", found.rows)
    report = PromptDataset.load([str(tmp_path / "out.jsonl")], ours, limit).report
    assert (report.kept, report.filtered, report.duplicates) == (TRAIN_ROWS, 0, 0)


def test_rows_that_are_not_there_are_made_up(ours, tmp_path):
    (found,) = rows_of(
        [str(tmp_path / "gone.parquet")], TRAIN_ROWS, ours, PromptParameters(max_prompt_length=48), "math_dapo"
    )
    assert (
        found.synthetic
        and len(found.rows) == TRAIN_ROWS
        and {row["data_source"] for row in found.rows} == {"math_dapo"}
    )


def test_a_file_without_a_usable_row_is_refused_as_in_training(ours, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl"):
        rows_of([str(tmp_path / "bad.jsonl")], TRAIN_ROWS, ours, PromptParameters(), "mine")


# ---------------------------------------------------------------- reward


def settings(group: int = 4, leaves_uniform: bool = False, **changes) -> ScoringSettings:
    return ScoringSettings(**({"reward": {"function": "exact_match"}, "group": group, "keys": ("acc",),
                "leaves_uniform": leaves_uniform,
                               "metric": "score", "seed": 0} | changes))  # fmt: skip


def scores(scorer: RehearsalScorer, row: int, answers: list[str]) -> list:
    return [scorer("mine", answer, "7", {ROW: row, "split": "train"}) for answer in answers]


def test_groups_of_one_score_get_seeded_ones_that_differ(capsys):
    scorer = RehearsalScorer(settings(), lambda **row: 0.0)
    for row in range(8):
        assert set(scores(scorer, row, ["a", "b", "c", "d"])) == {0.0, 1.0}
    assert '"given": 1.0' in capsys.readouterr().out


def test_a_function_of_a_run_of_several_turns_is_asked_as_about_one():
    scorer = RehearsalScorer(settings(turns=True, reward={"function": "environment"}), environment)
    assert set(scores(scorer, 0, ["a", "b", "c", "d"])) == {0.0, 1.0}


def test_scores_of_the_users_stay_where_they_differ():
    scorer = RehearsalScorer(settings(), lambda solution_str, **row: float(len(solution_str)))
    given = scores(scorer, 0, ["a", "bb", "ccc", "a"])
    assert given[1:] == [2.0, 3.0, 1.0]


def test_parts_that_groups_are_compared_by_follow_the_score():
    scorer = RehearsalScorer(settings(), lambda **row: {"score": -1.0, "acc": 0.0, "pred": "x"})
    assert {tuple(answer.values()) for answer in scores(scorer, 0, list("abcd"))} == {(0.0, 0.0, "x"), (1.0, 1.0, "x")}


def test_with_dynamic_sampling_the_second_of_four_prompts_is_left_uniform():
    scorer = RehearsalScorer(settings(leaves_uniform=True), lambda **row: 0.0)
    found = [set(scores(scorer, row, list("abcd"))) for row in (20, 7, 3, 11, 0, 1)]
    assert [len(values) for values in found] == [2, 1, 2, 2, 2, 1]


def test_what_dynamic_sampling_compares_is_what_is_judged():
    """The scores differ and `acc` does not: without a seeded one every group would be dropped."""
    scorer = RehearsalScorer(
        settings(metric="acc"), lambda solution_str, **row: {"score": float(len(solution_str)), "acc": 0.0}
    )
    assert {answer["acc"] for answer in scores(scorer, 0, ["a", "bb", "ccc", "dddd"])} == {0.0, 1.0}


def test_answers_of_validation_keep_the_users_scores():
    assert set(scores(RehearsalScorer(settings(), lambda **row: 0.25), VALIDATION, list("abcd"))) == {0.25}


def test_a_wrong_type_and_an_exception_reach_the_trainer_as_they_are():
    assert RehearsalScorer(settings(), lambda **row: "seven")("mine", "a", "7") == "seven"
    with pytest.raises(ZeroDivisionError):
        RehearsalScorer(settings(), lambda **row: 1 / 0)("mine", "a", "7")


def test_the_function_sees_the_row_as_it_is_in_the_users_file():
    seen = []
    scores(RehearsalScorer(settings(), lambda **row: seen.append(row) or 0.0), 3, ["a"])
    assert seen == [{"data_source": "mine", "solution_str": "a", "ground_truth": "7", "extra_info": {"split": "train"}}]


def test_without_the_users_file_scores_are_seeded_with_the_parts_that_are_asked_for(tmp_path):
    write_scorer(tmp_path / "reward.py", settings(reward=None))
    scorer = load_scorer(tmp_path / "scoring.json")
    assert {tuple(sorted(answer.items())) for answer in scores(scorer, 0, list("abcd"))} == {
        (("acc", 0.0), ("score", 0.0)), (("acc", 1.0), ("score", 1.0)),
    }  # fmt: skip


def test_the_written_reward_is_one_that_the_pool_can_load(tmp_path):
    write_scorer(tmp_path / "reward.py", settings(group=2))
    with RewardPool(RewardSpec(path=str(tmp_path / "reward.py")), 1) as pool:
        results = pool.score([RewardItem(i, "mine", text, "7", {ROW: 0}) for i, text in enumerate(("7", "8"))])
    assert [(r.reason, r.score) for r in results][1] == (OK, 0.0)


# ---------------------------------------------------------------- all of it


def prepared(tmp_path: Path, *overrides: str, preset: str | Path = PRESET):
    work = WorkFolder(tmp_path / "work")
    work.path.mkdir()
    return work, prepare(load_config(preset, overrides=overrides).config, work, 2)


def test_a_preset_without_files_gets_ours_and_says_so(tmp_path):
    work, made = prepared(tmp_path)
    assert [text.split(":")[0] for text in made.substitutes] == ["tokenizer", "data.train_files"]
    assert made.model == "qwen3: 36 layers of 4096 to 2 of 128"
    assert (
        json.loads((work.model / "config.json").read_text())["eos_token_id"]
        == load_tokenizer(str(work.model)).eos_token_id
    )


def test_a_latent_of_another_size_is_brought_to_that_of_the_cpu_kernel_and_said(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    config = known_hf_config("Moonlight-16B-A3B") | {"kv_lora_rank": 256}
    (model / "config.json").write_text(json.dumps(config))
    preset = "parallel_configs/moonlight-16b-a3b/h100-1x8.yaml"
    work, made = prepared(tmp_path, f"model.path={model}", preset=preset)
    assert made.model.endswith("64 to 8 experts, latents of 256 to 512, the size of vLLM's CPU kernel")
    assert json.loads((work.model / "config.json").read_text())["kv_lora_rank"] == 512


def test_the_users_tokenizer_rows_and_reward_are_used(tmp_path):
    write_model(tmp_path / "model")
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.5\n"
    )
    file = users_file(tmp_path / "train.jsonl", 50)
    work, made = prepared(
        tmp_path, f"model.path={tmp_path / 'model'}", f"data.train_files={file}",
        "actor.layout={world_size: 1, tensor_model_parallel_size: 1}",
        "rollout={num_engines: 1, tensor_model_parallel_size: 1}", "cluster.n_gpus_per_node=1",
        "data.max_response_length=64",
        f"reward.custom_reward_function.path={tmp_path / 'mine.py'}",
    )  # fmt: skip
    assert made.substitutes == () and len(work.rows("train", 0).read_text().splitlines()) == TRAIN_ROWS
    assert json.loads((work.path / "scoring.json").read_text())["reward"]["path"] == str(tmp_path / "mine.py")


def test_a_reward_that_raises_is_one_message_before_anything_starts(tmp_path):
    (tmp_path / "bad.py").write_text("def compute_score(*args, **kwargs):\n    raise KeyError('oops')\n")
    with pytest.raises(
        DataError, match=r"the reward failed on 8 of 8 responses[\s\S]*KeyError: 'oops' \(at .*bad.py:2\)"
    ):
        prepared(tmp_path, f"reward.custom_reward_function.path={tmp_path / 'bad.py'}")


def test_a_reward_of_a_wrong_type_is_refused_as_in_training(tmp_path):
    (tmp_path / "text.py").write_text("def compute_score(*args, **kwargs):\n    return 'seven'\n")
    with pytest.raises(DataError, match="8 wrong_type: str 'seven' where a number is expected"):
        prepared(tmp_path, f"reward.custom_reward_function.path={tmp_path / 'text.py'}")


def test_a_reward_that_cannot_be_loaded_is_refused_as_in_training(tmp_path):
    (tmp_path / "bad.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(ConfigError, match="importing it failed: ModuleNotFoundError"):
        prepared(tmp_path, f"reward.custom_reward_function.path={tmp_path / 'bad.py'}")


def test_a_reward_that_is_not_here_is_named(tmp_path):
    _, made = prepared(tmp_path, "reward.custom_reward_function.path=/nowhere/reward.py")
    assert ("reward.custom_reward_function", "/nowhere/reward.py is not here") in [
        (e.switch, e.why) for e in made.rehearsal.out_of_reach
    ]
    assert "seeded scores" in made.substitutes[-1]
