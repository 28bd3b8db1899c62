"""Reads the tokens of a tokenizer.json with their numbers, and compares two vocabularies."""

from collections.abc import Mapping
from pathlib import Path

from mrl.errors import EnvironmentFault
from mrl.plain_files import read_json

TOKENIZER = "tokenizer.json"
_SHOWN = 4  # tokens


def vocabulary(file: Path) -> dict[str, int]:
    """Returns token -> number of a tokenizer.json. Raises EnvironmentFault for another kind of file."""
    try:
        described = read_json(file, strict=False)
        vocab = described.get("model", {}).get("vocab", {})
        known = vocab if isinstance(vocab, dict) else {piece[0]: number for number, piece in enumerate(vocab)}
        return known | {token["content"]: token["id"] for token in described.get("added_tokens", ())}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise EnvironmentFault(f"{file} cannot be read as a tokenizer: {error}") from None


def differing_tokens(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Describes how many tokens have other numbers, and names the first of them; empty if there is none."""
    differing = sorted(token for token in before.keys() | after.keys() if before.get(token) != after.get(token))
    if not differing:
        return ""
    shown = ", ".join(f"{token!r}: {before.get(token)} -> {after.get(token)}" for token in differing[:_SHOWN])
    more = ""
    if len(differing) > _SHOWN:
        more = " ..."
    return f"{len(differing)} of {len(before)} differ: {shown}{more}"
