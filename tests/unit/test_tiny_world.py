"""The tiny world and the picture of its learning: files as published checkpoints have them, problems apart,
the same from the same seed.
"""

import importlib.util
import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

from mrl.data.dataset import load_tokenizer

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def _script(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tiny = _script("make_tiny_world")
HASTY = tiny.WarmUp(steps=1, batch=8, lowest=0.0, highest=1.0)  # everything but the learning


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    out = tmp_path_factory.mktemp("world") / "tiny-world"
    return out, tiny.make(out, 0, False, HASTY)


def test_a_prompt_is_the_question_between_role_markers():
    tokenizer = tiny.make_tokenizer()
    problem = tiny.Problem(12, 34)
    ids = tiny.Task(tokenizer).prompt_ids(problem)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<user>", *"12+34=", "<assistant>"]
    assert tiny.Task(tokenizer).answer_ids(problem) == [
        *tokenizer.convert_tokens_to_ids(["4", "6"]),
        tokenizer.eos_token_id,
    ]


def test_every_printable_character_survives_the_tokenizer():
    tokenizer = tiny.make_tokenizer()
    text = "".join(chr(c) for c in range(32, 127)) + "\n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == tiny.VOCAB_SIZE


def test_held_out_problems_are_never_trained_on():
    train, held_out = tiny.split_problems(0)
    assert not set(train) & set(held_out)
    assert len(set(train)) == len(train) >= 2000
    assert len(set(held_out)) == 256


def test_another_seed_holds_out_other_problems():
    assert set(tiny.split_problems(0)[1]) != set(tiny.split_problems(1)[1])


def test_rows_have_verls_schema_and_right_answers(world):
    for split, count in (("train", world[1]["train_prompts"]), ("val", 256)):
        rows = pq.read_table(world[0] / "data" / f"{split}.parquet").to_pylist()
        assert len(rows) == count
        for row in rows:
            left, right = row["prompt"][0]["content"].removesuffix("=").split("+")
            assert row["reward_model"] == {"style": "rule", "ground_truth": str(int(left) + int(right))}
        assert (row["data_source"], row["ability"], row["prompt"][0]["role"]) == ("tiny/addition", "math", "user")
        assert row["extra_info"] == {"index": count - 1, "split": split}


def test_the_checkpoint_looks_like_a_published_one(world):
    config = json.loads((world[0] / "model" / "config.json").read_text())
    assert (config["num_experts"], config["rope_theta"], config["torch_dtype"]) == (8, 10000.0, "float32")
    with safe_open(world[0] / "model" / "model.safetensors", "np") as file:
        names = set(file.keys())
        assert file.get_slice("model.layers.3.mlp.experts.7.down_proj.weight").get_shape() == [128, 64]
    # embedding, head, last norm; a layer: four projections, two head norms, two norms, a router, three matrices an
    # expert
    assert len(names) == 3 + 4 * (4 + 2 + 2 + 1 + 3 * 8)


def test_transformers_loads_it_with_the_sizes_that_were_meant(world):
    config = tiny.Qwen3MoeForCausalLM.from_pretrained(world[0] / "model").config
    assert (config.num_experts, config.num_experts_per_tok, config.vocab_size) == (8, 2, 128)
    assert config.rope_parameters["rope_theta"] == 10000.0


def test_the_saved_tokenizer_renders_the_same_prompt(world):
    tokenizer = load_tokenizer(str(world[0] / "model"))
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+2="}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ids == tiny.Task(tiny.make_tokenizer()).prompt_ids(tiny.Problem(1, 2))


def test_the_same_seed_gives_the_same_files(world, tmp_path):
    tiny.make(tmp_path / "again", 0, False, HASTY)
    for file in (
        "model/model.safetensors",
        "model/config.json",
        "model/tokenizer.json",
        "data/train.parquet",
        "data/val.parquet",
    ):
        assert (tmp_path / "again" / file).read_bytes() == (world[0] / file).read_bytes(), file


def test_a_world_that_stands_is_returned_at_once(world):
    before = (world[0] / "world.json").stat().st_mtime_ns
    assert tiny.make(world[0], 0, False, HASTY) == world[1]
    assert (world[0] / "world.json").stat().st_mtime_ns == before


def test_a_world_of_another_seed_is_refused(world):
    with pytest.raises(SystemExit, match="--force"):
        tiny.make(world[0], 1, False, HASTY)


def test_a_folder_that_is_no_tiny_world_is_never_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    for force in (False, True):
        with pytest.raises(SystemExit, match="no tiny world"):
            tiny.make(tmp_path, 0, force, HASTY)


def test_a_build_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(SystemExit, match=r"answers 0\.\d+ of the held-out problems and not 0\.1 to 0\.4"):
        tiny.make(tmp_path / "world", 0, False, tiny.WarmUp(steps=1, batch=8))
    assert list(tmp_path.iterdir()) == []
