"""Published configurations by name, so that a preset can be planned where its checkpoint is not.

`mrl/model/known/NAME.json` holds the fields of the public config.json of `Qwen/NAME` that a ModelSpec is read from.
Training never looks here.
"""

import json
import re
from functools import cache
from pathlib import Path

from mrl.errors import MrlError
from mrl.model.reader import load_model_spec, model_spec
from mrl.model.spec import ModelSpec

_FOLDER = Path(__file__).parent / "known"
# Words behind a name that mean other weights than its own: what reads images, what is no language model, what is quantised.
_OTHERS = ("vl", "omni", "embedding", "reranker", "awq", "gptq", "gguf", "int4", "int8", "fp8", "mxfp4")
# Names that leave something out and can still mean one model only.
_SHORT = {"qwen330b": "Qwen3-30B-A3B", "qwen3235b": "Qwen3-235B-A22B"}


@cache
def known_models() -> tuple[str, ...]:
    """The names that are known, e.g. Qwen3-30B-A3B."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.json")))


def known_name(path: str | Path) -> str | None:
    """The known model that the last part of a path or hub name begins with, case and punctuation aside: `-Base`, `-Instruct` and what a
    user adds to the name do not change the shape of the weights. None where it says that they are others."""
    text = _plain(Path(path).name)
    names = {_plain(name): name for name in known_models()} | _SHORT
    begun = [name for name in names if text.startswith(name)]
    if not begun:
        return None
    longest = max(begun, key=len)
    return None if any(word in text[len(longest) :] for word in _OTHERS) else names[longest]


@cache
def known_spec(name: str) -> ModelSpec:
    """The ModelSpec of a known name."""
    return model_spec(json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8")))


def planning_model_spec(path: str | Path) -> tuple[ModelSpec, str]:
    """The model for commands that only calculate, and a note where it is a published configuration and not the checkpoint's own.

    A folder that is there is always read, and refused when it has no config.json or wants remote code. Only a path that is not on
    this machine falls back to its name. Raises what `load_model_spec` raises when the name is not known either.
    """
    if Path(path).is_dir() or (name := known_name(path)) is None:
        try:
            return load_model_spec(path), ""
        except MrlError as error:
            here = "" if Path(path).is_dir() else f"; known by name for planning: {', '.join(known_models())}"
            raise type(error)(f"{error}{here}") from None
    return known_spec(name), f"model.path {path} is not on this machine: the published configuration of {name} stands in for it"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
