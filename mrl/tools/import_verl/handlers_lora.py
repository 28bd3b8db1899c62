"""Handlers of verl's keys of low-rank adapters: `model.lora_*` of its FSDP workers, `model.lora.*` of Megatron's."""

import re
from collections.abc import Iterator
from typing import Any

from mrl.model.adapters import ALL_LINEAR, TARGETS
from mrl.tools.import_verl.handlers_algorithm import Handler
from mrl.tools.import_verl.keys import M
from mrl.tools.import_verl.report import Import
from mrl.tools.import_verl.verl_command import Override, VerlSettings

_RANKS = (M + "lora_rank", M + "lora.rank")
_ALPHAS = {M + "lora_rank": (M + "lora_alpha", 16), M + "lora.rank": (M + "lora.alpha", 32)}  # with verl's default
_RANK = "actor.lora.rank"
_ALPHA = "actor.lora.alpha"
_TARGETS = "actor.lora.target_modules"
_NO_ADAPTERS = "there are no adapters"
# Megatron's linear layers -> the checkpoint's modules that they consist of
_OF_MEGATRON = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
}
# what adapters can have in verl and not here -> why
_UNLIKE = {
    "type": "adapters are plain ones here",
    "exclude_modules": "adapters are on all modules of a name here",
    "dropout_position": "dropout is of the adapters' inputs here",
    "normalize_moe_lora": "experts have the rank that all modules have here",
    "share_expert_adapters": "every expert has a pair of its own here, as PEFT's form has it",
}
_PLAIN_TYPES = (None, "lora", "canonical_lora")


def trains_adapters(settings: VerlSettings) -> bool:
    """Whether the script trains adapters."""
    return any(settings.given(key) for key in _RANKS)


def _rank(o: Override, out: Import, settings: VerlSettings) -> None:
    if not o.value:
        out.leave("implied", o.key, o.value, _NO_ADAPTERS, o.line)
        return
    out.put("carried", o.key, _RANK, o.value, line=o.line)
    alpha, default = _ALPHAS[o.key]
    if settings.given(alpha) is None:
        out.put("implied", "", _ALPHA, default, f"verl's {alpha.removeprefix(M)} by default")


def _carried(to: str) -> Handler:
    def carry(o: Override, out: Import, settings: VerlSettings) -> None:
        if not trains_adapters(settings):
            out.leave("not_applicable", o.key, o.value, _NO_ADAPTERS, o.line)
        elif o.value is None:
            out.leave("implied", o.key, o.value, "left at its default", o.line)
        else:
            out.put("carried", o.key, to, o.value, line=o.line)

    return carry


def _targets(o: Override, out: Import, settings: VerlSettings) -> None:
    if not trains_adapters(settings):
        out.leave("not_applicable", o.key, o.value, _NO_ADAPTERS, o.line)
        return
    names = [o.value] if isinstance(o.value, str) else list(o.value or ())
    wanted: set[str] = set()
    for name in names:
        if name not in (ALL_LINEAR, *TARGETS, *_OF_MEGATRON):
            out.leave("unsupported", o.key, o.value, f"{name} is no module that adapters are built for", o.line)
            return
        wanted |= set(_OF_MEGATRON.get(name, (name,)))
    targets = [name for name in (ALL_LINEAR, *TARGETS) if name in wanted]
    why = ""
    if targets != names:
        why = "named as in the checkpoint; each has a pair of its own, also where Megatron fuses them"
    out.put("renamed" if why else "carried", o.key, _TARGETS, targets, why, o.line)


def _other(o: Override, out: Import, settings: VerlSettings) -> None:
    """Handles all other keys beside the rank."""
    name = o.key.removeprefix(M + "lora.").removeprefix(M)
    if not trains_adapters(settings):
        out.leave("not_applicable", o.key, o.value, _NO_ADAPTERS, o.line)
    elif name == "merge":
        out.leave("implied", o.key, o.value, "engines always get the weights that base and adapters make", o.line)
    elif _is_plain(name, o.value):
        out.leave("implied", o.key, o.value, "as adapters are here", o.line)
    elif name == "exclude_modules" and not _names_of_text(o.value):
        out.leave("implied", o.key, o.value, "adapters are of the text model, of which it names no module", o.line)
    elif name in _UNLIKE:
        out.leave("unsupported", o.key, o.value, _UNLIKE[name], o.line)
    else:
        out.leave("not_applicable", o.key, o.value, "a matter of how verl builds and sends adapters", o.line)


# where modules of a text model stand, by itself and inside one that reads images
_DECODERS = ("model", "model.language_model", "language_model.model")
_PARTS = ("self_attn", "linear_attn", "mlp", "mlp.shared_expert", "mlp.shared_experts")
_LAYERS, _EXPERTS = 256, 1024  # more than any model has


def _names_of_text(excluded: Any) -> bool:
    """Whether a value of PEFT's exclude_modules takes any module of a text model out.

    A text is a pattern of whole names; a list has names, or ends of names behind a dot. What cannot be read, does.
    """
    if not isinstance(excluded, str | list | tuple):
        return True
    try:
        if isinstance(excluded, str):
            pattern = re.compile(excluded)
            return any(pattern.fullmatch(name) for name in _text_modules())
        ends = tuple(f".{each}" for each in excluded)
        return any(f".{name}".endswith(ends) for name in _text_modules())
    except re.error:
        return True


def _text_modules() -> Iterator[str]:
    """Yields names of modules that may have adapters: of every layer, and of every expert of the first two."""
    for decoder in _DECODERS:
        for layer in range(_LAYERS):
            experts = _EXPERTS if layer < 2 else 1
            for part in (*_PARTS, *(f"mlp.experts.{expert}" for expert in range(experts))):
                yield from (f"{decoder}.layers.{layer}.{part}.{target}" for target in TARGETS)


def _is_plain(name: str, value: Any) -> bool:
    if name == "type":
        return value in _PLAIN_TYPES
    if name == "dropout_position":
        return value in (None, "pre")
    return name in _UNLIKE and not value


LORA_HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(_RANKS, _rank),
    M + "lora_alpha": _carried(_ALPHA),
    M + "lora.alpha": _carried(_ALPHA),
    M + "lora_adapter_path": _carried("actor.lora.path"),
    M + "lora.adapter_path": _carried("actor.lora.path"),
    M + "target_modules": _targets,
    M + "lora.target_modules": _targets,
    M + "lora.dropout": _carried("actor.lora.dropout"),
    M + "exclude_modules": _other,
    M + "lora.": _other,
}
