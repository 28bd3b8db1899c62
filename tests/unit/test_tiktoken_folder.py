"""A tokenizer that is code over tiktoken.model becomes one without: tiktoken's own ids, and no code runs."""

import base64
import errno
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

import mrl.tools.tiktoken_folder as subject
from mrl.cli.main import main
from mrl.data.dataset import load_tokenizer
from mrl.errors import ConfigError, EnvironmentFault
from mrl.model.registry import load_model_spec
from mrl.tools.tiktoken_folder import PATTERN, convert_tokenizer, read_ranks

KIMI, MOONSHOT = "tokenization_kimi.TikTokenTokenizer", "tokenization_moonshot.TikTokenTokenizer"
TEMPLATE = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
TEXTS = (
    "Hello, world! 你好，世界！", "I'll do it, DON'T you think? they'VE", "  multiple   spaces\n\n\tand\r\nlines  ",  # noqa: RUF001
    "1234567890 ३४ ½", "中文English混合漢字かな カナ", "naïve café Ünïcôdé ǅ ʰ ा́", "🙂👩‍👩‍👧 \u200b\ufeff",
    "x" * 40, " " * 33, "\n" * 9,
    "def f(a_b):\n    return {'k': [1, 2.5e-3]}  # ok", "<|im_end|>[BOS]mid<|reserved_token_", "",
)  # fmt: skip
TRAP = "from pathlib import Path\nPath(__file__).with_name('PWNED').write_text('')\n"


def learnt_ranks() -> dict[bytes, int]:
    """Single bytes, then what pairs best in some text: a vocabulary that byte pair encoding could have made."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")[:2000] + "".join(TEXTS) * 3
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [[bytes([byte]) for byte in word.encode()] for word in text.replace(" ", "\0 ").split("\0")]
    for _ in range(150):
        counts: dict[bytes, int] = {}
        for word in words:
            for pair in pairwise(word):
                counts[b"".join(pair)] = counts.get(b"".join(pair), 0) + 1
        best = max((joined for joined in counts if joined not in ranks), key=lambda joined: counts[joined])
        ranks[best] = len(ranks)
        words = [merged(word, best) for word in words]
    return ranks


def merged(word: list[bytes], token: bytes) -> list[bytes]:
    out: list[bytes] = []
    for part in word:
        if out and out[-1] + part == token:
            out[-1] = token
        else:
            out.append(part)
    return out


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return learnt_ranks()


@pytest.fixture
def folder(ranks, tmp_path) -> Path:
    """As Moonlight's: a vocabulary, names of some ids behind it, a template and code."""
    made = tmp_path / "model"
    made.mkdir()
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (made / "tiktoken.model").write_bytes(b"".join(lines))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    for name in ("tokenization_kimi.py", "tokenization_moonshot.py"):
        (made / name).write_text(TRAP)
    write_settings(made, len(ranks))
    return made


def write_settings(folder: Path, first: int, **changes) -> None:
    names = {first: ("[BOS]", True), first + 1: ("<|im_end|>", True), first + 5: ("<|tool|>", False)}
    added = {str(number): {"content": name, "special": special} for number, (name, special) in names.items()}
    settings = {
        "added_tokens_decoder": added, "auto_map": {"AutoTokenizer": [MOONSHOT, None]}, "bos_token": "[BOS]",
        "eos_token": "<|im_end|>", "tokenizer_class": "TikTokenTokenizer", "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | changes))


def test_ids_are_tiktokens_and_text_comes_back(folder, ranks, tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    assert main(["convert", "tokenizer", str(folder), "-o", str(tmp_path / "new")]) is None
    ours, first = load_tokenizer(str(tmp_path / "new")), len(ranks)
    special = {f"<|reserved_token_{number}|>": number for number in range(first, first + 256)}
    special |= {"[BOS]": first, "<|im_end|>": first + 1, "<|tool|>": first + 5}
    for number in (first, first + 1, first + 5):
        del special[f"<|reserved_token_{number}|>"]
    theirs = tiktoken.Encoding("made", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
    chosen = random.Random(0)
    letters = "".join(TEXTS)
    drawn = ["".join(chosen.choices(letters, k=60)) for _ in range(300)]
    for text in (*TEXTS, *drawn, "a<|tool|>b<|reserved_token_450|>"):
        ids = theirs.encode(text, allowed_special="all")
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids) == text
    assert (ours.bos_token_id, ours.eos_token_id) == (first, first + 1)
    assert ours.decode([first, first + 5], skip_special_tokens=True) == "<|tool|>"
    assert ours.chat_template == TEMPLATE


def test_the_model_is_read_once_its_files_are_replaced_and_no_code_ran(folder, tmp_path):
    config = Path(__file__).parents[2] / "mrl/model/known/Moonlight-16B-A3B.json"
    known = json.loads(config.read_text()) | {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (folder / "config.json").write_text(json.dumps(known))
    with pytest.raises(ConfigError, match=f"mrl convert tokenizer {folder} -o NEW"):
        load_model_spec(folder)
    for name in convert_tokenizer(folder, tmp_path / "new"):
        (folder / name).write_bytes((tmp_path / "new" / name).read_bytes())
    assert load_model_spec(folder).family == "deepseek_v3"
    assert load_tokenizer(str(folder)).eos_token == "<|im_end|>"
    assert not list(tmp_path.rglob("PWNED"))


def test_kimis_is_held_against_ids_that_are_known_of_it(folder, ranks, tmp_path, monkeypatch):
    write_settings(folder, len(ranks), auto_map={"AutoTokenizer": [KIMI, None]})
    with pytest.raises(EnvironmentFault, match=r"would be .*known to give \[19180, 11, 2695"):
        convert_tokenizer(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(subject, "KIMI_IDS", {"[BOS]": [len(ranks)]})
    assert "tokenizer.json" in convert_tokenizer(folder, tmp_path / "new")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"auto_map": {"AutoTokenizer": ["tokenization_own.T", None]}}, "the tokenizer is tokenization_own.T"),
        ({"auto_map": None}, "the tokenizer is None"),
        ({"added_tokens_decoder": {"5": {"content": "x"}}}, r"names \[5\], not among the ids"),
        ({"added_tokens_decoder": {"a": {"content": "x"}}}, "added_tokens_decoder cannot be read"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder cannot be read"),
    ],
)
def test_another_tokenizer_is_refused(folder, ranks, tmp_path, settings, words):
    write_settings(folder, len(ranks), **settings)
    with pytest.raises((ConfigError, EnvironmentFault), match=words):
        convert_tokenizer(folder, tmp_path / "new")


def test_a_name_that_is_a_token_already_is_refused(folder, ranks, tmp_path):
    write_settings(folder, len(ranks), added_tokens_decoder={str(len(ranks)): {"content": "a", "special": True}})
    with pytest.raises(EnvironmentFault, match=f"'a' is to be token {len(ranks)}"):
        convert_tokenizer(folder, tmp_path / "new")


@pytest.mark.parametrize(
    "data", [b"YQ== 0\n", b"no base64 0\n", b"YQ== x\n", b"YQ==\n", b"YQ== 0\nYQ== 0\n", b"\xff\xfe 1\n", b""]
)
def test_a_damaged_vocabulary_is_refused_by_its_name(tmp_path, data):
    (tmp_path / "tiktoken.model").write_bytes(data)
    with pytest.raises(EnvironmentFault, match=r"tiktoken\.model"):
        read_ranks(tmp_path / "tiktoken.model")


def test_nothing_is_written_over(folder, tmp_path):
    (tmp_path / "new").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        convert_tokenizer(folder, tmp_path / "new")


def test_a_full_disk_leaves_no_half_of_a_tokenizer(folder, tmp_path, monkeypatch):
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.name == "tokenizer_config.json":
            write(path, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(EnvironmentFault, match=r"new cannot be written \(No space left on device\)"):
        convert_tokenizer(folder, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    monkeypatch.undo()
    assert convert_tokenizer(folder, tmp_path / "new") == sorted(path.name for path in (tmp_path / "new").iterdir())
