"""Prompts have the tokens that transformers gives them, or are left to it."""

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import dialect_templates
import pytest
from small_model import SIZES, write_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from mrl.data.dataset import load_tokenizer
from mrl.data.quick_tokenizer import quick_decoder, quick_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEXTS = (
    "What is 12+34?",
    "  a  line\n\nand  another \n",
    "Ünï-cødé 漢字 🙂",
    "e\u0301 = é",
    "x123456789y",
    "it's I'LL",
    "",
)
MARKS = ("<eos>", "<unk>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "<think>", "[gMASK]")
_spec = importlib.util.spec_from_file_location("make_tiny_world", ROOT / "scripts" / "make_tiny_world.py")
world = sys.modules["make_tiny_world"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(world)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def conversations() -> list[list[dict[str, str]]]:
    """Drawn once for all: texts with and without what looks like a token of the family's own."""
    rng = random.Random(7)
    drawn = [" ".join(rng.choices((*TEXTS, *MARKS), k=4)) for _ in range(60)]
    alone = [[{"role": "user", "content": text}] for text in (*TEXTS, *MARKS, *drawn)]
    longer = [
        [{"role": "system", "content": one}, {"role": "user", "content": other}]
        for one, other in zip(drawn[::2], drawn[1::2], strict=True)
    ]
    return alone + longer


def assert_same(folder: Path, **more) -> None:
    quick, usual = quick_tokenizer(folder), load_tokenizer(str(folder))
    arguments = {"add_generation_prompt": True, "tokenize": True, "return_dict": False} | more
    assert quick is not None and quick.chat_template == usual.chat_template
    for messages in conversations():
        found = quick.apply_chat_template(messages, **arguments)
        assert found == list(usual.apply_chat_template(messages, **arguments)), messages


def assert_same_texts(folder: Path) -> None:
    """Of any tokens: whole texts, halves of characters, special ones."""
    quick, usual = quick_decoder(folder), load_tokenizer(str(folder))
    rng = random.Random(3)
    drawn = [rng.choices(range(len(usual)), k=rng.randrange(20)) for _ in range(300)]
    for ids in [*drawn, *(usual.encode(text) for text in TEXTS)]:
        for skip in (True, False):
            assert quick.decode(ids, skip_special_tokens=skip) == usual.decode(ids, skip_special_tokens=skip), ids


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    """A folder with a tokenizer as Qwen's are published, of few merges."""
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated", False)
    core.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=sorted(alphabet)))
    core.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    core.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "<think>")])
    folder = tmp_path_factory.mktemp("qwen")
    core.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(SIZES))
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    settings = {
        "tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None,
        "unk_token": None, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "add_bos_token": False,
        "split_special_tokens": False, "model_max_length": 1000, "errors": "replace",
        "chat_template": dialect_templates.HERMES,
        "added_tokens_decoder": {str(each["id"]): {k: v for k, v in each.items() if k != "id"} for each in added},
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def with_settings(folder: Path, target: Path, **changes) -> Path:
    """A copy of the folder's small files; a setting of None is left out."""
    for name in ("tokenizer.json", "config.json", "tokenizer_config.json", "chat_template.jinja"):
        if (folder / name).exists():
            (target / name).write_bytes((folder / name).read_bytes())
    settings = json.loads((target / "tokenizer_config.json").read_text()) | changes
    kept = {key: value for key, value in settings.items() if value is not None}
    (target / "tokenizer_config.json").write_text(json.dumps(kept))
    return target


def test_tokens_of_a_plain_tokenizer(tmp_path):
    write_model(tmp_path / "model")
    assert_same(tmp_path / "model")


def test_tokens_of_the_tiny_world(tmp_path):
    world.make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    assert_same(tmp_path)


@pytest.mark.parametrize("family", ["hermes", "coder", "glm"])
def test_tokens_of_families(family, tmp_path):
    dialect_templates.tokenizer(family).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    assert_same(tmp_path)


@pytest.mark.parametrize("changes", [{}, {"added_tokens_decoder": None}, {"tokenizer_class": "Qwen2TokenizerFast"}])
def test_tokens_of_qwens_class_which_builds_its_tokenizer_anew(qwen, tmp_path, changes):
    folder = with_settings(qwen, tmp_path, **changes)
    assert type(load_tokenizer(str(folder))).__name__ == "Qwen2Tokenizer"
    assert_same(folder)
    assert_same(folder, enable_thinking=False)


def spoilt(name: str, folder: Path) -> None:
    """One of the things that transformers heeds and the quick way does not."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    core = json.loads((folder / "tokenizer.json").read_text())
    if name == "a file of further tokens":
        (folder / "added_tokens.json").write_text('{"<more>": 500}')
    elif name == "another class":
        settings["tokenizer_class"] = "LlamaTokenizerFast"
    elif name == "code":
        settings["auto_map"] = {"AutoTokenizer": ["code.Tokenizer", None]}
    elif name == "a setting that is not known":
        settings["image_token"] = "<image>"
    elif name == "several templates":
        settings["chat_template"] = [{"name": "default", "template": "x"}]
    elif name == "no template":
        del settings["chat_template"]
    elif name == "a template that is none":
        settings["chat_template"] = "{% for m in"
    elif name == "special tokens that are cut":
        settings["split_special_tokens"] = True
    elif name == "other flags of a token":
        next(iter(settings["added_tokens_decoder"].values()))["lstrip"] = True
    elif name == "another normalizer than the class has":
        core["normalizer"] = {"type": "NFKC"}
    elif name == "a truncation":
        core["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    elif name == "a family that is not known":
        (folder / "config.json").write_text('{"model_type": "llama"}')
    elif name == "no JSON":
        (folder / "tokenizer.json").write_text("{")
        return
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(json.dumps(core))


@pytest.mark.parametrize(
    "name",
    [
        "a file of further tokens", "another class", "code", "a setting that is not known", "several templates",
        "no template", "a template that is none", "special tokens that are cut", "other flags of a token",
        "another normalizer than the class has", "a truncation", "a family that is not known", "no JSON",
    ],
)  # fmt: skip
def test_what_transformers_might_read_otherwise_is_left_to_it(qwen, tmp_path, name):
    folder = with_settings(qwen, tmp_path)
    assert quick_tokenizer(folder) is not None
    spoilt(name, folder)
    assert quick_tokenizer(folder) is None


@pytest.mark.parametrize("name", ["chat_template", "documents"])
def test_what_transformers_takes_for_itself_is_left_to_it(qwen, tmp_path, name):
    folder = with_settings(qwen, tmp_path)
    assert quick_tokenizer(folder, {"enable_thinking": False}) is not None
    assert quick_tokenizer(folder, {name: "x"}) is None


def test_it_takes_no_import_of_transformers(tmp_path):
    write_model(tmp_path / "model")
    code = (
        "import sys; from pathlib import Path; from mrl.data.quick_tokenizer import quick_tokenizer\n"
        f"assert quick_tokenizer(Path({str(tmp_path / 'model')!r})) is not None\n"
        "sys.exit(bool({'transformers', 'torch', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}).returncode == 0


def test_texts_of_the_tiny_world(tmp_path):
    world.make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    assert_same_texts(tmp_path)


def test_texts_of_qwens_class(qwen, tmp_path):
    assert_same_texts(with_settings(qwen, tmp_path, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("cleans", [True, None])
def test_texts_that_might_be_cleaned_up_are_left_to_transformers(qwen, tmp_path, cleans):
    folder = with_settings(qwen, tmp_path, clean_up_tokenization_spaces=cleans)
    assert quick_decoder(folder) is None and quick_tokenizer(folder) is not None


def test_texts_by_another_decoder_than_the_classs_own_are_left_to_transformers(qwen, tmp_path):
    folder = with_settings(qwen, tmp_path, clean_up_tokenization_spaces=False)
    core = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(core | {"decoder": {"type": "Fuse"}}))
    assert quick_decoder(folder) is None
