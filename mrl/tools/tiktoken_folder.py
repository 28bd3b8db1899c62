"""Converts a tokenizer with its own code over `tiktoken.model` (Moonlight's, Kimi-K2's) into one of transformers' own.

    tiktoken.model           a line for each token: its bytes in base64, and its rank, which is its id
    tokenizer_config.json    added_tokens_decoder: names of some of the 256 ids after the ranks

The code that defines how text is split is not read; its pattern is in this module. The result for Kimi-K2 is compared
with published ids. For Moonlight there are none.
"""

import base64
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mrl.checkpoint.manifest import fsync
from mrl.checkpoint.step_folders import write_atomically
from mrl.errors import ConfigError, EnvironmentFault
from mrl.model.hf_files import check_own_file
from mrl.model.registry import TOKENIZER_BYTES
from mrl.plain_files import read_bytes, read_settings, reason
from mrl.units import MIB

VOCABULARY = "tiktoken.model"
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
TOKENIZER = "tokenizer.json"
_VOCABULARY_BYTES = 64 * MIB
_BEHIND_RANKS = 256  # ids that are not bytes: special and reserved tokens
_CLASSES = ("tokenization_kimi.TikTokenTokenizer", "tokenization_moonshot.TikTokenTokenizer")
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT_FORMS}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT_FORMS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# from Kimi-K2's vocabulary, as published by several people who ran its own code
KIMI_IDS = {
    "Hello, world! 你好，世界！": [19180, 11, 2695, 0, 220, 33845, 378, 2243, 856],  # noqa: RUF001
    "The capital of France is": [1008, 10484, 318, 15383, 387],
    "I'll do it, don't you think?": [65447, 859, 483, 11, 4536, 398, 2704, 30],
    "  multiple   spaces\n\nand newlines": [220, 6810, 256, 14803, 382, 516, 814, 11541],
    "1234567890": [6694, 12972, 16242, 15],
    "中文English混合": [16717, 44372, 13935],
}


def convert_tokenizer(model: Path, output: Path) -> list[str]:
    """Writes the tokenizer of a model's folder into another one. Returns the names of its files.

    The folder appears completely or not at all. Raises ConfigError for a tokenizer of another kind or an existing
    output. Raises EnvironmentFault for damaged files, for a result with other ids than published, and if the disk
    fails.
    """
    if output.exists():
        raise ConfigError(f"{output} exists; choose another output")
    settings = _settings(model)
    named = _class_of(model, settings)
    ranks = read_ranks(model / VOCABULARY)
    tokenizer = fast_tokenizer(ranks, _added_tokens(model, settings, len(ranks)))
    if named == _CLASSES[0]:
        _check_ids(model, tokenizer, KIMI_IDS)
    files = _files(model, tokenizer, settings)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, partial(_write, files))
    except OSError as error:
        raise EnvironmentFault(f"{output} cannot be written ({reason(error)}); check the disk") from None
    return sorted(files)


def _files(model: Path, tokenizer: Any, settings: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the content of the files by name. `settings`: of the original tokenizer."""
    kept = {key: value for key, value in settings.items() if key not in ("auto_map", "tokenizer_class")}
    plain = kept | {"tokenizer_class": "PreTrainedTokenizerFast"}
    files = {
        TOKENIZER: tokenizer.to_str(pretty=True).encode(),
        SETTINGS: (json.dumps(plain, indent=2, ensure_ascii=False) + "\n").encode(),
    }
    if (model / TEMPLATE).exists():
        check_own_file(model / TEMPLATE)
        try:
            files[TEMPLATE] = read_bytes(model / TEMPLATE, TOKENIZER_BYTES)
        except (OSError, ValueError) as error:
            raise EnvironmentFault(f"{model / TEMPLATE}: {reason(error)}") from None
    return files


def _write(files: Mapping[str, bytes], folder: Path) -> None:
    """Writes files durably. Raises OSError."""
    for name, data in files.items():
        (folder / name).write_bytes(data)
        fsync(folder / name)
    fsync(folder)


def _settings(model: Path) -> dict[str, Any]:
    check_own_file(model / SETTINGS)
    return read_settings(model / SETTINGS, TOKENIZER_BYTES)


def _class_of(model: Path, settings: Mapping[str, Any]) -> str:
    """Returns the tokenizer's class by module and name. Raises ConfigError for an unknown one."""
    auto_map = settings.get("auto_map")
    classes = None
    if isinstance(auto_map, dict):
        classes = auto_map.get("AutoTokenizer")
    named = classes[0] if isinstance(classes, list) and classes else classes
    if named not in _CLASSES:
        raise ConfigError(
            f"{model / SETTINGS}: the tokenizer is {str(named)[:80]}; converted are only {' and '.join(_CLASSES)}"
        )
    return named


def read_ranks(file: Path) -> dict[bytes, int]:
    """Returns the tokens of a tiktoken.model with their ranks. Raises EnvironmentFault for another kind of file."""
    try:
        check_own_file(file)
        lines = read_bytes(file, _VOCABULARY_BYTES).splitlines()
        pairs = [line.split() for line in lines if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{file} cannot be read as a vocabulary of tiktoken: {reason(error)}") from None
    bytes_alone = {bytes([byte]) for byte in range(256)}
    if len(ranks) != len(pairs) or sorted(ranks.values()) != list(range(len(ranks))) or not bytes_alone <= ranks.keys():
        raise EnvironmentFault(f"{file}: a doubled token, a missing rank, or a byte that is not a token")
    return ranks


def _added_tokens(model: Path, settings: Mapping[str, Any], first: int) -> list[tuple[str, bool]]:
    """Returns the names of the ids from `first` on, and whether each is a special token."""
    given = settings.get("added_tokens_decoder") or {}
    behind = range(first, first + _BEHIND_RANKS)
    try:
        named = {int(number): (str(facts["content"]), bool(facts.get("special"))) for number, facts in given.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EnvironmentFault(f"{model / SETTINGS}: added_tokens_decoder cannot be read: {error}") from None
    if outside := sorted(named.keys() - set(behind)):
        raise EnvironmentFault(
            f"{model / SETTINGS}: added_tokens_decoder names {outside[:5]}, not among the ids {first} to "
            f"{behind[-1]} that {VOCABULARY} leaves"
        )
    return [named.get(number, (f"<|reserved_token_{number}|>", True)) for number in behind]


def fast_tokenizer(ranks: Mapping[bytes, int], added: list[tuple[str, bool]]) -> Any:
    """Makes a tokenizer of the tokenizers library. `added`: tokens after the ranks, and whether each is special.

    Raises EnvironmentFault for a name that is already used.
    """
    from tokenizers import AddedToken
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        """Converts ranks that were already read. transformers' own class needs the tiktoken package to read them."""

        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: Any) -> dict[bytes, int]:
            return dict(tiktoken_url)

    tokenizer = Converter(vocab_file=ranks, pattern=PATTERN).converted()
    for number, (name, is_special) in enumerate(added, len(ranks)):
        add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
        add([AddedToken(name, normalized=False, special=is_special)])
        if tokenizer.token_to_id(name) != number:
            raise EnvironmentFault(f"{SETTINGS}: {name!r} is to be token {number} and is {tokenizer.token_to_id(name)}")
    return tokenizer


def _check_ids(model: Path, tokenizer: Any, known: Mapping[str, list[int]]) -> None:
    for text, ids in known.items():
        found = tokenizer.encode(text, add_special_tokens=False).ids
        if found != ids:
            raise EnvironmentFault(
                f"{model / VOCABULARY}: {text!r} would be {found}, and Kimi-K2's tokenizer is known to give {ids}: the "
                "file is damaged, or belongs to another tokenizer"
            )
