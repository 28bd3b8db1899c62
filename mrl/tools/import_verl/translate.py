"""Translates verl's overrides into a configuration of mrl, and reports what happened to every key.

The script's own values are kept. Where it says nothing and the defaults differ, verl's default is written. A layout is
chosen where the script has none.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mrl.config.schema_rollout import RolloutConfig
from mrl.errors import ConfigError, MrlError
from mrl.model import ModelSpec, planning_model_spec
from mrl.tools.import_verl.expansion import Value, known_part, why_unknown
from mrl.tools.import_verl.handlers import HANDLERS
from mrl.tools.import_verl.handlers_algorithm import SEQUENCE_MEANS
from mrl.tools.import_verl.handlers_critic import critic_defaults, critic_layout, epoch_defaults, needs_value
from mrl.tools.import_verl.handlers_distillation import complete_distillation
from mrl.tools.import_verl.handlers_images import carry_images
from mrl.tools.import_verl.handlers_lora import trains_adapters
from mrl.tools.import_verl.handlers_optimizer import drop_unread_starts
from mrl.tools.import_verl.handlers_schedule import carry_schedule
from mrl.tools.import_verl.keys import LAYOUT, MEGATRON, ROWS, TRANSFORMER, A, M, R, row_of
from mrl.tools.import_verl.report import Import
from mrl.tools.import_verl.script_model import Chosen, choose_layout, unknown_family
from mrl.tools.import_verl.shell import read_script
from mrl.tools.import_verl.verl_command import (
    Override,
    VerlCommand,
    VerlSettings,
    from_arguments,
    from_script,
    says_megatron,
    trains_by_own_code,
)
from mrl.tools.import_verl.verl_defaults import SAY_NOTHING, VERL_DEFAULTS
from mrl.tools.import_verl.verl_keys import is_section, is_verls, nearest, releases

_OWN_CODE = (
    "its code is not read, and may have a loss, estimator or reward that no key names; where it trains as "
    "verl.trainer.main_ppo does, name that module in the script"
)
# mrl's keys whose default differs from verl's -> verl's key. Keys of the policy loss hold only for losses that read
# them.
_OTHER_DEFAULT = {
    "data.train_batch_size": "data.train_batch_size",
    "data.max_prompt_length": "data.max_prompt_length",
    "data.max_response_length": "data.max_response_length",
    "data.filter_overlong_prompts": "data.filter_overlong_prompts",
    "data.drop_duplicates": "data.drop_duplicates",
    "actor.ppo_mini_batch_size": A + "ppo_mini_batch_size",
    "actor.optim.weight_decay": A + "optim.weight_decay",
    "actor.optim.betas": A + "optim.betas",
    "algorithm.adv_estimator": "algorithm.adv_estimator",
    "algorithm.policy_loss.loss_mode": A + "policy_loss.loss_mode",
    "algorithm.policy_loss.loss_agg_mode": A + "loss_agg_mode",
    "algorithm.policy_loss.clip_ratio_low": A + "clip_ratio_low",
    "algorithm.policy_loss.clip_ratio_high": A + "clip_ratio_high",
    "algorithm.policy_loss.clip_ratio_c": A + "clip_ratio_c",
    "rollout.n": R + "n",
    "rollout.tensor_model_parallel_size": R + "tensor_model_parallel_size",
    "rollout.gpu_memory_utilization": R + "gpu_memory_utilization",
    "rollout.enable_chunked_prefill": R + "enable_chunked_prefill",
    "rollout.val_kwargs.temperature": R + "val_kwargs.temperature",
    "trainer.total_epochs": "trainer.total_epochs",
    "trainer.resume_mode": "trainer.resume_mode",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    "cluster.nnodes": "trainer.nnodes",
    "cluster.n_gpus_per_node": "trainer.n_gpus_per_node",
}
_ENGINE_SEQUENCES = RolloutConfig.model_fields["max_num_seqs"].default  # mrl's default, which is kept
# Files that the run reads. A text with an unset variable stands for them, and counts as a loss until it is replaced.
_FILES = {
    "model.path",
    "distillation.teacher_model.model_path",
    "data.train_files",
    "data.val_files",
    "reward.custom_reward_function.path",
}
_NO_LINE = re.compile(r"^line 0: | (?:in|from) line 0\b")  # what overrides without a script are said to be in
_NAMES = {"trainer.experiment_name", "trainer.project_name", "trainer.run_dir", "trainer.resume_from_path"}
_NEEDED = {"data.train_batch_size", "data.max_prompt_length", "data.max_response_length", "actor.ppo_mini_batch_size"}


def import_script(text: str, name: str, given: Mapping[str, str], extra: Sequence[str] = (), **options: Any) -> Import:
    """Imports a launch script; nothing of it runs.

    `given` are shell variables that the user sets, `extra` overrides behind the script. Options are those of
    `translate`. Raises ConfigError for a script that is not verl's, or that cannot be read.
    """
    script = read_script(text, name, given, extra)
    return translate(from_script(script, name), name, **options)


def import_overrides(words: Sequence[str], **options: Any) -> Import:
    """Imports a list of overrides (`key=value`). Raises ConfigError where there is none."""
    command = from_arguments([Value(word) for word in words])
    if not command.overrides:
        raise ConfigError(f"{' '.join(words)}: neither a script that can be read nor overrides (key=value)")
    return translate(command, "overrides", **options)


def translate(
    command: VerlCommand,
    name: str,
    as_written: bool = False,
    preset: str | None = None,
    chosen: Chosen | None = None,
    own: Sequence[str] = (),
) -> Import:
    """Translates a command of verl's.

    `as_written` keeps settings that are usually corrected, and that validation refuses. A script without a layout gets
    `chosen`, else that of `preset`, else that of the nearest preset for its model. Where none is found,
    `Import.lacks_layout` says so. `own` are mrl's keys that the user sets. A degree among them leaves the layout to the
    user.
    """
    out = Import(name, warnings=[*command.faults, *command.remarks], faults=command.faults)
    keys = {o.key: o for o in command.overrides}
    plain = VerlSettings(command, keys, None, {}, as_written)
    if not says_megatron(command, keys) and chosen is None and not any(key.startswith(LAYOUT) for key in own):
        model = plain.model_path or ""
        chosen = choose_layout(model, plain.device, plain.devices, preset, trains_adapters(plain))
        out.lacks_layout = chosen is None
    settings = _settings(plain, chosen, out)
    for override in command.overrides:
        _translate_override(override, out, settings)
    carry_schedule(out, settings)
    if trains_by_own_code(command.entry):
        out.leave("unsupported", "module", command.entry, _OWN_CODE)
    drop_unread_starts(out, settings)
    complete_distillation(out)
    _defaults(out, settings)
    critic_defaults(out, settings)
    epoch_defaults(out, settings)
    _devices(out, settings)
    _experts(out, settings)
    critic_layout(out, settings)
    _reference(out, settings)
    _optimizer(out)
    _engine(out, settings)
    _prefixes(out, settings)
    if out.values.get("rollout.quantization") and "algorithm.rollout_correction.level" not in out.values:
        why = "verl corrects nothing by default"
        out.put("implied", "", "algorithm.rollout_correction.level", None, why)
    _filters(out, settings)
    carry_images(out, settings)
    if "model.path" not in own:
        _family(out, settings)
    out.warnings = [_NO_LINE.sub("", warning) for warning in out.warnings]
    out.faults = tuple(_NO_LINE.sub("", fault) for fault in out.faults)
    return out


def _settings(plain: VerlSettings, chosen: Chosen | None, out: Import) -> VerlSettings:
    """Reads the layout from the script, or writes the chosen one."""
    model = _model(plain)
    if plain.megatron:
        return replace(plain, model=model, degrees=_script_degrees(plain))
    if out.lacks_layout:
        fitting = f"for {plain.model_path} " if plain.model_path else ""
        out.warnings.append(
            f"the script has no Megatron layout, and no preset {fitting}divides over its {plain.devices} "
            "devices: every degree is 1; set actor.layout.tensor_model_parallel_size and the other degrees by --set"
        )
    degrees = {}
    if chosen is not None:
        degrees = chosen.degrees
    for key, value in degrees.items():
        out.put("chosen", "", LAYOUT + key, value, f"the script has no Megatron layout; this is {chosen.source}")
    return replace(plain, model=model, degrees=degrees)


def _script_degrees(settings: VerlSettings) -> dict[str, Any]:
    """Returns the degrees that the script sets, under mrl's names."""
    degrees = {}
    for key, row in ROWS.items():
        if (
            row.to.startswith(LAYOUT)
            and key.startswith((MEGATRON, TRANSFORMER))
            and (value := settings.given(key)) is not None
        ):
            degrees[row.to.removeprefix(LAYOUT)] = value
    return degrees


def _model(settings: VerlSettings) -> ModelSpec | None:
    try:
        if settings.model_path:
            return planning_model_spec(settings.model_path)[0]
        return None
    except MrlError:
        return None


def _translate_override(o: Override, out: Import, settings: VerlSettings) -> None:
    row = row_of(o.key)
    if row is None:
        out.leave("unsupported", o.key, o.value, _no_row(o.key), o.line)
    elif o.value in (None, {}) and f"{o.key}." in ROWS:
        out.leave("implied", o.key, o.value, "an empty section", o.line)
    elif o.value not in (None, {}) and is_section(o.key):
        why = "it is a section: give its keys one by one (section.key=value), or as {key:value}"
        out.leave("unsupported", o.key, o.value, why, o.line)
    elif o.missing and row.kind in ("to", "special") and needs_value(o, settings):
        _unknown(o, out, row.to)
    elif o.value is None and o.key in SAY_NOTHING:
        out.leave("implied", o.key, o.value, "null says nothing", o.line)
    elif row.kind == "to":
        value = row.convert(o.value) if row.convert else o.value
        short = o.key.removeprefix("actor_rollout_ref.")
        out.put("carried" if short == row.to else "renamed", o.key, row.to, value, row.why, o.line)
    elif row.kind == "special":
        key = o.key
        if key not in HANDLERS:
            key = max((k for k in HANDLERS if k.endswith(".") and f"{o.key}.".startswith(k)), key=len)
        HANDLERS[key](o, out, settings)
    elif row.kind == "unsupported":
        kind = "unsupported"
        if o.value in row.neutral:
            kind = "implied"
        out.leave(kind, o.key, o.value, row.why, o.line)
    else:
        out.leave(row.kind, o.key, o.value, row.why, o.line)


def _no_row(key: str) -> str:
    if is_verls(key):
        return "nothing here does what this key of verl's asks for"
    meant = nearest(key)
    known = releases()
    return f"no such key here, nor in verl {known[0]} to {known[-1]}" + (f"; did you mean {meant}?" if meant else "")


def _unknown(o: Override, out: Import, to: str) -> None:
    names = ", ".join(sorted(o.missing))
    hint = " ".join(f"--set {name}=..." for name in sorted(o.missing) if not name.startswith("$"))
    why = f"{why_unknown(str(o.value), o.missing)}; give {hint or 'the value as an override'}"
    if to in _FILES:
        out.put("unknown", o.key, to, o.value, why, o.line)
        return
    out.leave("unknown", o.key, o.value, why, o.line)
    if to in _NAMES:
        out.names.add(o.key)
    if to in ("trainer.experiment_name", "trainer.project_name"):
        out.put(
            "chosen",
            "",
            to,
            known_part(str(o.value)).rstrip("-_/") or "default",
            "without the part that is not known",
            o.line,
        )
    elif to in _NEEDED:
        raise ConfigError(
            f"{out.name}:{o.line}: {o.key} depends on {names}, and nothing can be written without it; give {hint}"
        )


def _defaults(out: Import, settings: VerlSettings) -> None:
    loss = out.values.get("algorithm.policy_loss.loss_mode", VERL_DEFAULTS[A + "policy_loss.loss_mode"])
    defaults = {key: VERL_DEFAULTS[verls] for key, verls in _OTHER_DEFAULT.items()}
    for key, value in (defaults | {"cluster.device": settings.device}).items():
        if key in out.values or (key.endswith("clip_ratio_c") and loss != "vanilla"):
            continue
        if key.endswith("loss_agg_mode") and loss in SEQUENCE_MEANS:
            out.put("implied", "", key, "seq-mean-token-mean", f"what {loss} averages")
            continue
        out.put("implied", "", key, value, "verl's default")
    if out.values.get("algorithm.use_kl_loss") and "algorithm.kl_loss_coef" not in out.values:
        out.put("implied", "", "algorithm.kl_loss_coef", VERL_DEFAULTS[A + "kl_loss_coef"], "verl's default")
    if settings.value(A + "use_dynamic_bsz") and "actor.ppo_max_token_len_per_gpu" not in out.values:
        least = -(-settings.longest // settings.context_parallel)
        out.put(
            "implied",
            "",
            "actor.ppo_max_token_len_per_gpu",
            max(VERL_DEFAULTS[A + "ppo_max_token_len_per_gpu"], least),
            "verl's default, at least one longest sample",
        )
    if settings.value(A + "use_dynamic_bsz"):
        for key in (
            "actor.ppo_micro_batch_size_per_gpu",
            "actor.log_prob_micro_batch_size_per_gpu",
            "ref.log_prob_micro_batch_size_per_gpu",
        ):
            out.drop(key, "micro-batches are cut by tokens (use_dynamic_bsz)")


def _devices(out: Import, settings: VerlSettings) -> None:
    """Writes world size, placement and number of engines. verl's actor and engines use all devices of the trainer."""
    per_node = settings.value("trainer.n_gpus_per_node")
    engine = _engine_workers(out)
    nodes, own_per_node = _engine_nodes(settings)
    own = nodes * own_per_node
    world = settings.devices
    separate = own > 0
    out.put("implied", "", LAYOUT + "world_size", world, "all devices of the trainer")
    out.put("implied", "", "cluster.placement", "separate" if separate else "colocated", "how verl places engines")
    out.put(
        "implied",
        "",
        "rollout.num_engines",
        max(1, (own if separate else world) // engine),
        "as many as the devices hold",
    )
    if not separate and not settings.megatron and "actor.grad_offload" not in out.values:
        why = "FSDP frees gradients between steps; Megatron's buffers would stay beside the engine"
        out.put("chosen", "", "actor.grad_offload", True, why)
    if separate:
        _beside(out, settings, per_node)


def _engine_nodes(settings: VerlSettings) -> tuple[int, int]:
    """Returns the engines' own nodes and their devices, from newer or asynchronous keys. 0 nodes: the actor's."""
    return (
        settings.value(R + "nnodes", "rollout.nnodes"),
        settings.value(R + "n_gpus_per_node", "rollout.n_gpus_per_node", "trainer.n_gpus_per_node"),
    )


def _beside(out: Import, settings: VerlSettings, per_node: int) -> None:
    """Writes the cluster of separate actor and engines. They have nodes of their own where nodes are alike, else shared
    ones.
    """
    nodes = settings.value("trainer.nnodes")
    own_nodes, own_per_node = _engine_nodes(settings)
    if own_per_node == per_node:
        out.put("implied", "", "cluster.nnodes", nodes + own_nodes, "nodes of the actor and of the engines")
    else:
        out.put("implied", "", "cluster.nnodes", max(nodes, own_nodes), "actor and engines share nodes")
        out.put("implied", "", "cluster.n_gpus_per_node", per_node + own_per_node, "actor and engines share nodes")


def _filters(out: Import, settings: VerlSettings) -> None:
    """Keeps a filter of words where the loss reads only training's log-probs. Otherwise switches it off."""
    corrected = out.values.get("algorithm.rollout_correction.level") is not None
    for name, neutral in (("top_p", 1.0), ("top_k", -1)):
        to = f"rollout.{name}"
        value = out.values.get(to, neutral)
        if value == neutral:
            continue
        filtered = f"{to}={value} filters the words that training responses are drawn from"
        if settings.as_written or not (corrected or out.values.get("algorithm.anchor") == "rollout"):
            out.warnings.append(
                f"{filtered}, as in the script; its loss takes probabilities of all tokens, here as with verl"
            )
        else:
            why = (
                f"{value} in the script: the correction needs the probabilities that training computes, over all tokens"
            )
            out.drop(to, why)
            out.put("chosen", "", to, neutral, why)
            out.warnings.append(f"{filtered}, and the loss reads the engine's log-probs; {neutral} is written")


def _engine_workers(out: Import) -> int:
    sizes = [out.values.get(f"rollout.{name}_parallel_size", 1) for name in ("tensor_model", "data")]
    if all(isinstance(s, int) for s in sizes):
        return max(1, sizes[0] * sizes[1])
    return 1


def _experts(out: Import, settings: VerlSettings) -> None:
    """Writes Megatron's default: the expert tensor size is the tensor size. mrl's is 1, and a dense model has none."""
    to = LAYOUT + "expert_tensor_parallel_size"
    tp = out.values.get(LAYOUT + "tensor_model_parallel_size", 1)
    if settings.dense:
        for name in ("expert_tensor_parallel_size", "expert_model_parallel_size"):
            if out.values.get(LAYOUT + name) in (1, None):
                out.drop(LAYOUT + name, "the model is dense")
    elif settings.megatron and out.values.get(to) is None and tp != 1:
        out.drop(to, "Megatron's default")
        out.put("implied", "", to, tp, "Megatron takes the tensor size where nothing is set")


def _prefixes(out: Import, settings: VerlSettings) -> None:
    """Engines of gated delta attention have no prefix cache; verl's default is one, which vLLM then does without."""
    key = "rollout.enable_prefix_caching"
    if settings.model is not None and settings.model.is_hybrid and key not in out.values:
        out.put("chosen", "", key, False, "a state of gated delta attention has no prefix that could be found")


def _reference(out: Import, settings: VerlSettings) -> None:
    """Drops keys of a reference model that is not loaded, or that takes no memory."""
    used = out.values.get("algorithm.use_kl_loss") or out.values.get("algorithm.use_kl_in_reward")
    if not used:
        for key in [key for key in out.values if key.startswith("ref.")]:
            out.drop(key, "no reference model is loaded without a KL term")
    if out.values.get("actor.lora.rank") and "ref.path" not in out.values:
        out.drop("ref.param_offload", "the reference model is the actor without its adapters")


def _optimizer(out: Import) -> None:
    """Drops options that Megatron's Adam has only with its states on the host. They change no number."""
    optimizer = "actor.optim.override_optimizer_config."
    if out.values.get(optimizer + "optimizer_cpu_offload"):
        return
    for name in ("use_precision_aware_optimizer", "overlap_cpu_optimizer_d2h_h2d", "optimizer_offload_fraction"):
        out.drop(optimizer + name, "means nothing here without optimizer_cpu_offload")


def _engine(out: Import, settings: VerlSettings) -> None:
    """Drops or changes settings that would keep vLLM from starting."""
    tokens = out.values.get("rollout.max_num_batched_tokens")
    chunked = out.values.get("rollout.enable_chunked_prefill")
    lengths = [out.values["data.max_prompt_length"], out.values["data.max_response_length"]]
    if not all(isinstance(length, int | float) for length in lengths):
        return  # validation reports it
    longest = sum(lengths)
    if chunked is False and isinstance(tokens, int) and tokens < longest:
        out.warnings.append(
            f"enable_chunked_prefill=False with max_num_batched_tokens={tokens}: vLLM refuses to start with fewer than "
            f"{longest}; chunked prefill is left to the device"
        )
        out.drop("rollout.enable_chunked_prefill", "vLLM would refuse to start")
    if isinstance(tokens, int) and tokens < out.values.get("rollout.max_num_seqs", _ENGINE_SEQUENCES):
        out.put("chosen", "", "rollout.max_num_seqs", tokens, "vLLM wants at most max_num_batched_tokens sequences")


def _family(out: Import, settings: VerlSettings) -> None:
    if settings.model is not None or settings.model_path is None:
        return
    line = settings.keys[M + "path"].line
    if not settings.model_path.strip():
        why = "the script gives an empty path; give --set model.path=FOLDER, or the variable that it is read from"
        out.leave("unsupported", M + "path", settings.model_path, why, line)
        return
    if (family := unknown_family(settings.model_path, os.path.isdir(settings.model_path))) is not None:
        out.leave("unsupported", M + "path", settings.model_path, family, line)
