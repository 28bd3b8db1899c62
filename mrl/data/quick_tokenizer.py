"""Reads a model's tokenizer without transformers, whose import takes seconds: for prompts, and for texts of responses.

It does so only where transformers would give the same tokens. That needs tokenizer.json as it stands, a chat template
in one piece, and known settings. All other tokenizers are left to transformers.
"""

import json
from collections.abc import Collection, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

from mrl.plain_files import read_json, read_text
from mrl.units import MIB

_SETTINGS_BYTES = 64 * MIB
_TOKENIZER_BYTES = 256 * MIB
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
_WITHOUT_EFFECT = (  # settings that do not change the tokens of a prompt
    "add_bos_token", "add_eos_token", "backend", "clean_up_tokenization_spaces", "errors", "is_local",
    "local_files_only", "model_input_names", "model_max_length", "padding_side", "truncation_side",
)  # fmt: skip
_CLEANS = "clean_up_tokenization_spaces"  # changes texts of responses, so it has to be off for these
_MUST_BE_OFF = ("add_prefix_space", "split_special_tokens")
_KNOWN = {*_NAMED, *_EXTRA, *_WITHOUT_EFFECT, *_MUST_BE_OFF, "added_tokens_decoder", "chat_template", "tokenizer_class"}
# parameters of transformers' apply_chat_template itself, not variables of a template
_PARAMETERS = {
    "chat_template",
    "documents",
    "tokenizer_kwargs",
    "continue_final_message",
    "return_assistant_tokens_mask",
}
_MORE_FILES = ("added_tokens.json", "special_tokens_map.json", "additional_chat_templates", "tokenizer.model")
_FAMILIES = {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "glm4_moe", "glm4_moe_lite"}
_AS_IT_STANDS = {"TokenizersBackend", "PreTrainedTokenizerFast"}
_QWEN = {"Qwen2Tokenizer", "Qwen2TokenizerFast"}
_ALWAYS_QWEN = {"qwen2"}  # families whose tokenizer has Qwen's class, whatever the settings say
_QWEN_DEFAULTS = ("eos_token", "pad_token", "unk_token")  # that class sets these to _QWEN_TOKEN by default
_QWEN_TOKEN = "<|endoftext|>"
_FLAGS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
# parts that the class builds around vocabulary and merges, whatever tokenizer.json says
_QWEN_PARTS = {
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {
                    "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
                },
                "behavior": "Isolated",
                "invert": False,
            },
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    },
}
_QWEN_DECODER = "ByteLevel"
_QWEN_MODEL = {"type": "BPE", "dropout": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}


class QuickTokenizer:
    """The part of a tokenizer that makes prompts and reads responses."""

    def __init__(self, core: Tokenizer, template: Template, text: str, named: Mapping[str, str]):
        """`named`: special tokens that the template may write, by name."""
        self.chat_template = text
        self.backend_tokenizer = core
        self._template = template
        self._named = named

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        tools: list[dict[str, Any]] | None = None,
        tokenize: bool = True,
        return_dict: bool = False,
        **more: Any,
    ) -> list[int] | str:
        """Returns the token ids of the conversation as the template writes it, or its text.

        `more`: further variables of the template.
        """
        text = self._template.render(messages=conversation, tools=tools, documents=None, **{**self._named, **more})
        if tokenize:
            return self.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return text

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """Returns the text of the tokens. It equals transformers' text where `quick_decoder` made this object."""
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


def quick_tokenizer(folder: Path, arguments: Collection[str] = ()) -> QuickTokenizer | None:
    """Makes a tokenizer of tokenizer.json alone.

    Returns None where transformers might read something else, or refuses the files and says why. `arguments`: names of
    further variables that the template will get.
    """
    if not _PARAMETERS.isdisjoint(arguments):
        return None
    try:
        settings = read_json(folder / "tokenizer_config.json", _SETTINGS_BYTES, strict=False)
        core = read_json(folder / "tokenizer.json", _TOKENIZER_BYTES, strict=False)
        family = read_json(folder / "config.json", _SETTINGS_BYTES, strict=False)["model_type"]
        if any((folder / name).exists() for name in _MORE_FILES) or not _is_plain(settings, core, family):
            return None
        if _is_of_qwens_class(settings, family):
            settings = dict.fromkeys(_QWEN_DEFAULTS, _QWEN_TOKEN) | settings
            if not _is_as_qwens_class_builds(settings, core):
                return None
        text = _template_text(folder, settings)
        if text is None:
            return None
        named = _named(settings)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # special tokens of the settings that tokenizer.json holds only in its vocabulary
        known = {token["content"] for token in core["added_tokens"]}
        wanted = dict.fromkeys([*named.values(), *_extra(settings)])
        tokenizer.add_tokens([AddedToken(text, special=True) for text in wanted if text not in known])
        return QuickTokenizer(tokenizer, _environment().from_string(text), text, named)
    except Exception:  # a damaged file, for which Rust raises many types; transformers then says what is wrong
        return None


def quick_decoder(folder: Path) -> QuickTokenizer | None:
    """Makes a tokenizer for texts of responses.

    Returns None where `quick_tokenizer` does. It does so too where transformers might clean up texts, or join tokens in
    another way.
    """
    if (made := quick_tokenizer(folder)) is None:
        return None
    settings = read_json(folder / "tokenizer_config.json", _SETTINGS_BYTES, strict=False)
    decoder = read_json(folder / "tokenizer.json", _TOKENIZER_BYTES, strict=False).get("decoder") or {}
    family = read_json(folder / "config.json", _SETTINGS_BYTES, strict=False)["model_type"]
    if settings.get(_CLEANS) is not False:
        return None
    if _is_of_qwens_class(settings, family) and decoder.get("type") != _QWEN_DECODER:
        return None
    return made


def _is_plain(settings: dict[str, Any], core: dict[str, Any], family: str) -> bool:
    if not settings.keys() <= _KNOWN or any(settings.get(key) for key in _MUST_BE_OFF) or family not in _FAMILIES:
        return False
    if core.get("truncation") or core.get("padding") or not _tokens_agree(settings, core):
        return False
    extra = [settings.get(key) or [] for key in _EXTRA]
    return all(isinstance(each, list) for each in extra) and settings.get("tokenizer_class") in _AS_IT_STANDS | _QWEN


def _is_of_qwens_class(settings: dict[str, Any], family: str) -> bool:
    return settings["tokenizer_class"] in _QWEN or family in _ALWAYS_QWEN


def _tokens_agree(settings: dict[str, Any], core: dict[str, Any]) -> bool:
    """Returns whether the settings list the tokens of tokenizer.json with the same flags, or list none."""
    listed = settings.get("added_tokens_decoder")
    if listed is None:
        return True
    added = {str(token["id"]): _flags(token) for token in core["added_tokens"]}
    return {number: _flags(token) for number, token in listed.items()} == added


def _flags(token: dict[str, Any]) -> dict[str, Any]:
    return {flag: token.get(flag, False) for flag in _FLAGS}


def _is_as_qwens_class_builds(settings: dict[str, Any], core: dict[str, Any]) -> bool:
    """Returns whether tokenizer.json equals what Qwen's class makes of it.

    The class numbers further tokens behind the vocabulary.
    """
    model = core["model"]
    if any(core.get(part) != wanted for part, wanted in _QWEN_PARTS.items()):
        return False
    if any(model.get(key, wanted) != wanted for key, wanted in _QWEN_MODEL.items()):
        return False
    if any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token")):
        return False
    first = len(model["vocab"])
    if sorted(token["id"] for token in core["added_tokens"]) != list(range(first, first + len(core["added_tokens"]))):
        return False
    known = {token["content"]: token for token in core["added_tokens"]}
    return all(text in known and _is_usual(known[text]) for text in (*_named(settings).values(), *_extra(settings)))


def _is_usual(token: dict[str, Any]) -> bool:
    """Returns whether a special token has the flags that the class gives it when it adds it again."""
    return token["special"] and not any(token[flag] for flag in ("lstrip", "rstrip", "normalized", "single_word"))


def _content(token: str | dict[str, Any]) -> str:
    if isinstance(token, str):
        return token
    return token["content"]


def _named(settings: dict[str, Any]) -> dict[str, str]:
    return {name: _content(settings[name]) for name in _NAMED if settings.get(name) is not None}


def _extra(settings: dict[str, Any]) -> list[str]:
    return [_content(token) for key in _EXTRA for token in settings.get(key) or []]


def _template_text(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    text = read_text(file, _SETTINGS_BYTES) if file.exists() else settings.get("chat_template")
    if isinstance(text, str) and text:
        return text
    return None


def _environment() -> ImmutableSandboxedEnvironment:
    """Returns the environment of templates as transformers makes it, but without its marks for generated text."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    made.filters["tojson"] = _as_json
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _as_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
