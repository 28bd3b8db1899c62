"""Handlers of verl's critic. A critic exists where the advantage estimator reads its values."""

from collections.abc import Mapping
from typing import Any

from mrl.algo.spec import AGGREGATIONS, NEEDS_CRITIC
from mrl.config.schema import LayoutConfig, verl_names
from mrl.tools.import_verl.handlers_algorithm import Handler
from mrl.tools.import_verl.handlers_optimizer import gradient_clip, least_rate, schedule_length
from mrl.tools.import_verl.keys import A, M, row_of
from mrl.tools.import_verl.report import Import
from mrl.tools.import_verl.verl_command import Override, VerlSettings
from mrl.tools.import_verl.verl_defaults import VERL_DEFAULTS

_C = "critic."
_NONE = "there is no critic"
_AS_ACTOR = "the critic is cut and built as the actor is"
_LAYOUT = "critic.layout"
_EXPERT_TENSOR = "expert_tensor_parallel_size"
_MINI = _C + "ppo_mini_batch_size"
# verl's keys of the critic's degrees -> mrl's in a layout
_DEGREES = {
    name.replace(A, _C, 1): path.removeprefix("actor.layout.")
    for name, path in verl_names().items()
    if path.startswith("actor.layout.")
}
# verl's key -> mrl's, where the value is taken unchanged
_CARRIED = {
    **{
        name.replace(A, _C, 1): path.replace("actor.", _C, 1)
        for name, path in verl_names().items()
        if path.startswith("actor.optim.")
    },
    **{_C + name: _C + name for name in ("cliprange_value", "ppo_epochs", "shuffle")},
    **{
        _C + section + name: _C + name
        for section in ("megatron.", "model.fsdp_config.", "fsdp_config.", "fsdp.")
        for name in ("param_offload", "grad_offload", "optimizer_offload")
    },
}
_BY_SAMPLES = ("ppo_micro_batch_size_per_gpu", "forward_micro_batch_size_per_gpu")
_BY_TOKENS = ("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu")
_AS_THE_ACTOR = "all weights and Adam, as the actor has it"
# keys that mrl has no counterpart for -> values that need none, and why
_MISSING: dict[str, tuple[tuple[Any, ...], str]] = {
    _C + "model.lora_rank": ((0,), _AS_THE_ACTOR),
    _C + "model.lora.rank": ((0,), _AS_THE_ACTOR),
    _C + "model.external_lib": ((), "of the user's code rewards, losses, advantages and tools are read by a path"),
    _C + "optim.optimizer": (("adam", "Adam", "AdamW", "adamw"), _AS_THE_ACTOR),
    _C + "enable": ((True,), _AS_THE_ACTOR),
}


def _has_critic(settings: VerlSettings) -> bool:
    return settings.estimator in NEEDS_CRITIC


def needs_value(o: Override, settings: VerlSettings) -> bool:
    """Whether a key with an unknown value must be given one. For the critic's keys only where they are carried over."""
    name = o.key.removeprefix(_C)
    if name == o.key:
        return True
    is_degree = settings.megatron and o.key in _DEGREES
    is_read = _has_critic(settings) and (o.key in _CARRIED or name in _OWN or is_degree)
    return is_read and not (name == "model.path" and _is_actors(o, settings))


def _is_actors(o: Override, settings: VerlSettings) -> bool:
    """Whether the path is the same text as the actor's."""
    return M + "path" in settings.keys and settings.keys[M + "path"].value == o.value


def _critic(o: Override, out: Import, settings: VerlSettings) -> None:
    """Handles all keys below `critic.`."""
    name = o.key.removeprefix(_C)
    if not _has_critic(settings):
        out.leave("not_applicable", o.key, o.value, _NONE, o.line)
    elif o.key in _MISSING:
        needing_none, why = _MISSING[o.key]
        fits = o.value is None or o.value in needing_none
        out.leave("implied" if fits else "unsupported", o.key, o.value, why, o.line)
    elif o.value is None:
        out.leave("implied", o.key, o.value, "left at its default", o.line)
    elif name in _OWN:
        _OWN[name](o, out, settings)
    elif o.key in _CARRIED:
        to = _CARRIED[o.key]
        out.put("carried" if to == o.key else "renamed", o.key, to, o.value, line=o.line)
    elif o.key.startswith(_C + "megatron."):
        _megatron(o, out, settings)
    elif name.startswith("optim."):
        _optimizer(o, out)
    else:
        out.leave("not_applicable", o.key, o.value, "a matter of verl's critic worker", o.line)


def _optimizer(o: Override, out: Import) -> None:
    """Handles a key of the optimizer that goes nowhere, as the actor's key of that name."""
    name = o.key.removeprefix(f"{_C}optim.")
    row = row_of(f"{A}optim.{name}")
    if name.startswith("override_optimizer_config"):
        out.leave("not_applicable", o.key, o.value, _AS_THE_ACTOR, o.line)
    elif row.kind == "unsupported" and o.value in row.neutral:
        out.leave("implied", o.key, o.value, row.why, o.line)
    elif row.kind in ("implied", "not_applicable", "unsupported"):
        out.leave(row.kind, o.key, o.value, row.why, o.line)
    else:
        out.leave("not_applicable", o.key, o.value, _AS_THE_ACTOR, o.line)


def _own_degrees(settings: VerlSettings) -> dict[str, Any]:
    """Degrees that a script gives its critic, under our names, where they are not the actor's; empty: it lies as the
    actor. Degrees that are not given are then verl's default, 1.
    """
    given = {to: settings.given(key) for key, to in _DEGREES.items()}
    given = {to: value for to, value in given.items() if value is not None}
    own = _effective(given, settings)
    of_actor = _effective(settings.degrees, settings)
    if not settings.megatron or all(own[to] == of_actor[to] for to in given):
        return {}
    return given


def _effective(degrees: Mapping[str, Any], settings: VerlSettings) -> dict[str, Any]:
    """All degrees, with what Megatron takes by default: the tensor size for that of experts."""
    whole = LayoutConfig(world_size=1).model_dump() | degrees
    whole["virtual_pipeline_model_parallel_size"] = whole["virtual_pipeline_model_parallel_size"] or 1
    if whole[_EXPERT_TENSOR] is None:
        whole[_EXPERT_TENSOR] = 1 if settings.dense else whole["tensor_model_parallel_size"]
    return whole


def _megatron(o: Override, out: Import, settings: VerlSettings) -> None:
    """Handles a Megatron field of the critic.

    A degree is the actor's, or goes into a layout of the critic's own. Other fields have the actor's values here.
    """
    to = _DEGREES.get(o.key)
    if to is not None and settings.megatron and _own_degrees(settings):
        out.put("renamed", o.key, f"{_LAYOUT}.{to}", o.value, line=o.line)
    else:
        is_degree = to is not None or o.key.endswith("parallel_size")
        out.leave("implied" if is_degree else "not_applicable", o.key, o.value, _AS_ACTOR, o.line)


def critic_layout(out: Import, settings: VerlSettings) -> None:
    """What a layout of the critic's own has beside the degrees that a script gives: 1, where the actor's is another."""
    own = _own_degrees(settings)
    if not any(key.startswith(f"{_LAYOUT}.") for key in out.values):
        return
    for degree in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
                   "expert_model_parallel_size"):  # fmt: skip
        if degree not in own and out.values.get(f"actor.layout.{degree}", 1) != 1:
            out.put("implied", "", f"{_LAYOUT}.{degree}", 1, "verl's default, which its actor's does not change")
    expert_tensor = _effective(own, settings)[_EXPERT_TENSOR]
    if own.get(_EXPERT_TENSOR) is None and expert_tensor != (out.values.get(f"actor.layout.{_EXPERT_TENSOR}") or 1):
        why = "Megatron takes the tensor size where nothing is set"
        out.put("implied", "", f"{_LAYOUT}.{_EXPERT_TENSOR}", expert_tensor, why)


def _path(o: Override, out: Import, settings: VerlSettings) -> None:
    if _is_actors(o, settings):
        out.leave("implied", o.key, o.value, "the critic starts from model.path by default", o.line)
    else:
        out.put("renamed", o.key, "critic.path", o.value, line=o.line)


def remote_code(o: Override, out: Import, settings: VerlSettings) -> None:
    """Handles trust_remote_code. It asks for nothing where the model's family is here."""
    asks = o.value not in (False, None) and settings.model is None
    out.leave("unsupported" if asks else "implied", o.key, o.value, "code of a checkpoint is never run", o.line)


def _mini_batch(o: Override, out: Import, settings: VerlSettings) -> None:
    if o.value == settings.mini_batch:
        out.leave("implied", o.key, o.value, "as the actor's", o.line)
    else:
        out.put("carried", o.key, _MINI, o.value, line=o.line)


def _micro_batch(o: Override, out: Import, settings: VerlSettings) -> None:
    by_tokens = bool(settings.value(A + "use_dynamic_bsz"))
    if by_tokens == o.key.removeprefix(_C).endswith("token_len_per_gpu"):
        out.put("carried", o.key, o.key, o.value, line=o.line)
    else:
        kind = "tokens" if by_tokens else "samples"
        out.leave("implied", o.key, o.value, f"micro-batches are cut by {kind}, as the actor's are", o.line)


def _dynamic(o: Override, out: Import, settings: VerlSettings) -> None:
    out.leave("implied", o.key, o.value, _AS_ACTOR + "; no number depends on it", o.line)


def _aggregation(o: Override, out: Import, settings: VerlSettings) -> None:
    spec = AGGREGATIONS.get(o.value)
    if spec is not None and spec.needs_scale_factor:
        out.leave("unsupported", o.key, o.value, "a critic's loss is a mean over tokens or sequences", o.line)
    else:
        out.put("carried", o.key, o.key, o.value, line=o.line)


def _warmup(o: Override, out: Import, settings: VerlSettings) -> None:
    """Converts training steps, which verl's schedule counts, to the critic's updates, which mrl's counts."""
    name = o.key.rpartition(".")[2]
    steps = schedule_length(o, settings)
    epochs = settings.given(_C + "ppo_epochs") or settings.epochs
    updates = epochs * -(-settings.prompts // (settings.given(_MINI) or settings.mini_batch))
    is_share = name == "lr_warmup_steps_ratio"
    explicit = settings.value(_C + "optim.lr_warmup_steps")
    if is_share and isinstance(explicit, int) and explicit > 0:
        out.leave("implied", o.key, o.value, "lr_warmup_steps wins over a share", o.line)
    elif not isinstance(o.value, int | float) or o.value <= 0:
        out.leave("implied", o.key, o.value, "no warm-up, and decay as long as the run", o.line)
    elif is_share and steps is None:
        out.put("carried", o.key, "critic.optim.lr_warmup_steps_ratio", o.value, line=o.line)
    else:
        count = int(o.value * steps) if is_share else o.value
        to = "critic.optim." + name.removesuffix("_ratio")
        out.put("renamed", o.key, to, count * updates, f"{count} training steps of {updates} updates", o.line)


_OWN: dict[str, Handler] = {
    "model.path": _path,
    "model.trust_remote_code": remote_code,
    "ppo_mini_batch_size": _mini_batch,
    **dict.fromkeys((*_BY_SAMPLES, *_BY_TOKENS), _micro_batch),
    "use_dynamic_bsz": _dynamic,
    "loss_agg_mode": _aggregation,
    **dict.fromkeys(("optim.clip_grad", "optim.grad_clip"), gradient_clip),
    **dict.fromkeys(("optim.min_lr_ratio", "optim.min_lr_factor"), least_rate),
    **dict.fromkeys(
        ("optim.lr_warmup_steps", "optim.lr_warmup_steps_ratio", "optim.lr_decay_steps"),
        _warmup,
    ),
}


def _first_step(o: Override, out: Import, settings: VerlSettings) -> None:
    """Handles the first step that updates the actor. verl counts it without a critic too."""
    if _has_critic(settings):
        out.put("carried", o.key, o.key, o.value, line=o.line)
    elif o.value in (0, 1):
        out.leave("implied", o.key, o.value, "the policy is trained from the first step", o.line)
    else:
        why = "the policy is trained from the first step; there is no critic to train before it"
        out.leave("unsupported", o.key, o.value, why, o.line)


def _lam(o: Override, out: Import, settings: VerlSettings) -> None:
    if _has_critic(settings):
        out.put("carried", o.key, o.key, o.value, line=o.line)
    else:
        out.leave("not_applicable", o.key, o.value, "only estimators with a critic read it", o.line)


def critic_defaults(out: Import, settings: VerlSettings) -> None:
    """Writes verl's defaults of a critic where the script sets nothing and mrl's default differs."""
    if out.values.get("algorithm.adv_estimator") not in NEEDS_CRITIC:
        return
    mode = settings.value(A + "loss_agg_mode")
    if AGGREGATIONS.get(mode) is None or AGGREGATIONS[mode].needs_scale_factor:
        mode = VERL_DEFAULTS[A + "loss_agg_mode"]
    defaults = {
        "critic.optim.weight_decay": VERL_DEFAULTS[A + "optim.weight_decay"],
        "critic.optim.betas": VERL_DEFAULTS[A + "optim.betas"],
        "critic.loss_agg_mode": mode,
    }
    for key, value in defaults.items():
        if key not in out.values:
            out.put("implied", "", key, value, "verl's default")


def epoch_defaults(out: Import, settings: VerlSettings) -> None:
    """Writes verl's order of several epochs where the script sets none: that of the rows, in every epoch."""
    epochs = [out.values.get(f"{section}.ppo_epochs") for section in ("actor", "critic")]
    if any(isinstance(each, int) and each > 1 for each in epochs) and "actor.shuffle" not in out.values:
        out.put("implied", "", "actor.shuffle", False, "verl's default")


CRITIC_HANDLERS: dict[str, Handler] = {
    _C: _critic,
    "trainer.critic_warmup": _first_step,
    "algorithm.lam": _lam,
}
