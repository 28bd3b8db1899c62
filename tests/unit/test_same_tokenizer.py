"""A run goes on with the tokens that it was trained on, or says which are others."""

import json
from pathlib import Path

import pytest

from mrl.checkpoint.manifest import Manifest, facts_of
from mrl.driver.resume import _check_same_tokenizer, new_run
from mrl.errors import ConfigError, EnvironmentFault
from mrl.model.vocabularies import vocabulary

WORDS = {"a": 0, "b": 1, "c": 2}


def write(file: Path, vocab: object = None, added: tuple = (), **more: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    tokens = [{"content": word, "id": number} for word, number in added]
    file.write_text(json.dumps({"model": {"vocab": WORDS if vocab is None else vocab}, "added_tokens": tokens} | more))
    return file


def check(tmp_path: Path, now: Path, digest: bool = True) -> None:
    then = tmp_path / "step-1" / "hf" / "tokenizer.json"
    facts = {"tokenizer.json": facts_of(then.read_bytes())} if digest else {}
    manifest = Manifest(1, {}, "float32", {}, (), {}, {}, facts)
    _check_same_tokenizer(now.parent, manifest, tmp_path / "step-1")


@pytest.mark.parametrize("digest", [True, False])
def test_other_tokens_are_refused_with_the_difference(tmp_path, digest):
    write(tmp_path / "step-1" / "hf" / "tokenizer.json", added=[("<end>", 3)])
    same = write(tmp_path / "same" / "tokenizer.json", added=[("<end>", 3)], normalizer=None)
    check(tmp_path, same, digest)
    other = write(tmp_path / "other" / "tokenizer.json", {"a": 0, "b": 2, "c": 1}, added=[("<end>", 3), ("<new>", 4)])
    with pytest.raises(ConfigError, match=r"3 of 4 differ: '<new>': None -> 4, 'b': 1 -> 2, 'c': 2 -> 1\. What"):
        check(tmp_path, other, digest)


def test_what_a_new_run_would_lose_is_told_since_nothing_forces_a_resume(tmp_path):
    write(tmp_path / "step-1" / "hf" / "tokenizer.json")
    other = write(tmp_path / "other" / "tokenizer.json", {"a": 0, "b": 2, "c": 1})
    with pytest.raises(ConfigError) as refused:
        check(tmp_path, other)
    assert str(refused.value).endswith(
        "or start a new run from an export of the checkpoint (mrl convert megatron-to-hf), which keeps its weights and "
        "loses the optimizer's moments, the count of steps (1) that learning rates follow"
    )
    trainer = {"cursor": {"epoch": 3, "index": 8}, "ahead": {}}
    whole = new_run(Manifest(40, {}, "float32", {}, (), trainer, {}, {}))
    assert whole.endswith("follow, the place in the data (epoch 3), the responses on their way")


def test_a_list_of_pieces_is_a_vocabulary_too(tmp_path):
    file = write(tmp_path / "tokenizer.json", [["a", -1.0], ["b", -2.0]], added=[("<s>", 2)])
    assert vocabulary(file) == {"a": 0, "b": 1, "<s>": 2}


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"model": []}', '{"model": {"vocab": 5}}', '{"added_tokens": [1]}', "[" * 9999]
)
def test_what_is_no_tokenizer_is_refused(tmp_path, text):
    write(tmp_path / "step-1" / "hf" / "tokenizer.json")
    (tmp_path / "now").mkdir()
    (tmp_path / "now" / "tokenizer.json").write_text(text)
    with pytest.raises(EnvironmentFault, match="cannot be read as a tokenizer"):
        check(tmp_path, tmp_path / "now" / "tokenizer.json")


def test_one_that_a_checkpoint_no_longer_has_whole_is_compared_with_nothing(tmp_path):
    then = write(tmp_path / "step-1" / "hf" / "tokenizer.json")
    manifest = Manifest(1, {}, "float32", {}, (), {}, {}, {"tokenizer.json": facts_of(then.read_bytes())})
    then.write_text("{")
    now = write(tmp_path / "now" / "tokenizer.json", {"x": 0})
    _check_same_tokenizer(now.parent, manifest, tmp_path / "step-1")
