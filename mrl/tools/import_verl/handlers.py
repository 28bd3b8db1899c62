"""Handlers of verl's keys that need more than a row. Each reads one override, and sets, drops or refuses its meaning.

Handlers of loss, correction and filter stand in handlers_algorithm.py.
"""

from collections.abc import Sequence
from typing import Any

from mrl.config.override_rules import MINDSPEED_FIELDS, decided_by, override_faults
from mrl.config.rollout_rules import FREE_OF_LENGTH
from mrl.record.sinks import VIEWS
from mrl.tools.import_verl.handlers_algorithm import ALGORITHM_HANDLERS, Handler
from mrl.tools.import_verl.handlers_critic import CRITIC_HANDLERS, remote_code
from mrl.tools.import_verl.handlers_distillation import DISTILLATION_HANDLERS
from mrl.tools.import_verl.handlers_drafts import DRAFT_HANDLERS, SPECULATION, speculation
from mrl.tools.import_verl.handlers_engines import ENGINE_HANDLERS, sets_nothing
from mrl.tools.import_verl.handlers_images import IMAGE_HANDLERS
from mrl.tools.import_verl.handlers_lora import LORA_HANDLERS
from mrl.tools.import_verl.handlers_optimizer import gradient_clip, least_rate, schedule_length
from mrl.tools.import_verl.handlers_schedule import SCHEDULE_HANDLERS
from mrl.tools.import_verl.handlers_turns import TURN_HANDLERS
from mrl.tools.import_verl.keys import LAYOUT, MEGATRON, TRANSFORMER, A, F, M, R
from mrl.tools.import_verl.report import Import
from mrl.tools.import_verl.verl_command import Override, VerlSettings
from mrl.tools.import_verl.verl_defaults import ALL_CHECKPOINTS

OVERRIDE_TRANSFORMER = "model.override_transformer_config"
OVERRIDE_OPTIMIZER = "actor.optim.override_optimizer_config"
OVERRIDE_DDP = "actor.override_ddp_config"
ENGINE = "rollout.engine_kwargs.vllm"

# Fields with the value that every model of mrl has anyway.
_OF_THE_MODELS = {"position_embedding_type": "rope"}


def _gen_batch(o: Override, out: Import, settings: VerlSettings) -> None:
    if settings.value("algorithm.filter_groups.enable"):
        out.put("carried", o.key, "data.gen_batch_size", o.value, line=o.line)
    else:
        out.leave("implied", o.key, o.value, "without dynamic sampling a step generates what it trains on", o.line)


def _dtype(o: Override, out: Import, settings: VerlSettings) -> None:
    to = "model.dtype"
    if o.key.startswith(R):
        to = "rollout.dtype"
    if o.value in ("bfloat16", "float32"):
        out.put("carried" if to == "rollout.dtype" else "renamed", o.key, to, o.value, line=o.line)
    else:
        out.leave("unsupported", o.key, o.value, "training and generation are in bfloat16 or float32", o.line)


def _greedy(o: Override, out: Import, settings: VerlSettings) -> None:
    if o.value:  # verl asks Python for its truth, so a text such as `yes` or `no` samples
        out.leave("implied", o.key, o.value, "temperature says it", o.line)
    else:
        out.put("renamed", o.key, "rollout.val_kwargs.temperature", 0.0, "do_sample: false is greedy", o.line)


def _longest(o: Override, out: Import, settings: VerlSettings) -> None:
    """Handles max_model_len. A response ends there, even if its own limit has not been reached."""
    if o.value in (None, -1) or (isinstance(o.value, int) and o.value >= settings.sample_limit):  # -1: vLLM finds it
        out.leave("implied", o.key, o.value, "prompt and response limits together", o.line)
    else:
        why = "responses end where data.max_response_length says; take it down, or data.max_prompt_length"
        out.leave("unsupported", o.key, o.value, why, o.line)


def _response_length(o: Override, out: Import, settings: VerlSettings) -> None:
    to = "data.max_prompt_length"
    if o.key.endswith("response_length"):
        to = "data.max_response_length"
    out.put("renamed", o.key, to, o.value, line=o.line)


def _dynamic(o: Override, out: Import, settings: VerlSettings) -> None:
    if o.value == settings.value(A + "use_dynamic_bsz"):
        out.leave("implied", o.key, o.value, "log-probs are cut as updates are (actor.use_dynamic_bsz)", o.line)
    else:
        why = "log-probs and updates are cut alike (actor.use_dynamic_bsz), so that they compute the same numbers"
        out.leave("not_applicable", o.key, o.value, why, o.line)


def _budget(o: Override, out: Import, settings: VerlSettings) -> None:
    """Carries token budgets of one device over. Each must hold the longest sample, cut by the layout."""
    to = {
        A: "actor.ppo_max_token_len_per_gpu",
        R: "actor.log_prob_max_token_len_per_gpu",
        F: "ref.log_prob_max_token_len_per_gpu",
    }[next(prefix for prefix in (A, R, F) if o.key.startswith(prefix))]
    least = -(-settings.longest // settings.context_parallel)
    if not settings.value(A + "use_dynamic_bsz"):
        out.leave(
            "not_applicable", o.key, o.value, "micro-batches are cut by samples (use_dynamic_bsz is false)", o.line
        )
    elif isinstance(o.value, int) and o.value < least:
        out.warnings.append(
            f"line {o.line}: {o.key}={o.value} cannot hold a sample of {settings.longest} tokens; {least} is written"
        )
        why = (
            f"the script says {o.value}; a sample of {settings.longest} tokens lies on "
            f"{settings.context_parallel} devices of this layout"
        )
        out.put("chosen", o.key, to, least, why, o.line)
    else:
        out.put("carried" if to == "actor.ppo_max_token_len_per_gpu" else "renamed", o.key, to, o.value, line=o.line)


def _micro_batch(o: Override, out: Import, settings: VerlSettings) -> None:
    """Converts the micro-batch over all replicas, which verl divides by their number, to that of a device."""
    if o.value is None or settings.given(f"{o.key}_per_gpu") is not None:
        out.leave("implied", o.key, o.value, "ppo_micro_batch_size_per_gpu says it", o.line)
    elif settings.value(A + "use_dynamic_bsz"):
        out.leave("implied", o.key, o.value, "micro-batches are cut by tokens (use_dynamic_bsz)", o.line)
    elif not isinstance(o.value, int):
        out.leave("unsupported", o.key, o.value, "a number of samples", o.line)
    else:
        replicas = settings.replicas
        why = f"{o.value} over the {replicas} replicas of the script; no number depends on it"
        to = "actor.ppo_micro_batch_size_per_gpu"
        out.put("renamed", o.key, to, max(1, o.value // replicas), why, o.line)


def _warmup(o: Override, out: Import, settings: VerlSettings) -> None:
    """Converts training steps, which verl's schedule counts, to optimizer updates, which mrl's counts."""
    name = o.key.rpartition(".")[2]
    to = "actor.optim.lr_warmup_steps"
    if name == "lr_warmup_steps_ratio":
        _warmup_ratio(o, out, settings)
    elif not isinstance(o.value, int) or o.value <= 0:
        out.leave(
            "implied", o.key, o.value, "no warm-up" if name == "lr_warmup_steps" else "as long as the run", o.line
        )
    else:
        to = f"actor.optim.{name}"
        why = ""
        if settings.updates > 1:
            why = f"{o.value} training steps of {settings.updates} updates each: a schedule counts updates here"
        out.put("renamed" if why else "carried", o.key, to, o.value * settings.updates, why, o.line)


def _warmup_ratio(o: Override, out: Import, settings: VerlSettings) -> None:
    steps = schedule_length(o, settings)
    explicit = settings.value(A + "optim.lr_warmup_steps")
    if not o.value or (isinstance(explicit, int) and explicit > 0):
        out.leave("implied", o.key, o.value, "no warm-up by share", o.line)
    elif steps is None:
        out.put("carried", o.key, "actor.optim.lr_warmup_steps_ratio", o.value, line=o.line)
    else:
        updates = int(o.value * steps) * settings.updates
        why = f"{o.value:g} of {steps} training steps of {settings.updates} updates each"
        out.put("renamed", o.key, "actor.optim.lr_warmup_steps", updates, why, o.line)


_PROFILE = "record.profile."
_TOOLS = ("torch", "nsys")


def _profile(o: Override, out: Import, settings: VerlSettings) -> None:
    """Carries profiles of the actor over: verl makes them where a tool, steps and the actor's `enable` are given."""
    name = o.key.rpartition(".")[2]
    tool = settings.given("global_profiler.tool")
    steps = settings.given("global_profiler.steps")
    if tool is None or not steps or settings.given(A + "profiler.enable") is not True:
        out.leave("implied", o.key, o.value, "the actor is not profiled", o.line)
    elif tool not in _TOOLS:
        out.leave("not_applicable", o.key, o.value, f"profiles are of {' and '.join(_TOOLS)} here", o.line)
    elif name in ("steps", "tool", "ranks"):
        if name != "ranks" or not settings.given(A + "profiler.all_ranks"):
            out.put("renamed", o.key, _PROFILE + name, o.value, line=o.line)
    elif name == "all_ranks" and o.value:
        out.put("renamed", o.key, _PROFILE + "ranks", [], line=o.line)
    else:
        out.leave("implied", o.key, o.value, f"{_PROFILE}steps and ranks say it", o.line)


def _of_checkpoint(o: Override, out: Import, settings: VerlSettings) -> None:
    """Handles the place of a tokenizer or a configuration, which are the checkpoint's here."""
    same = o.value is None or (settings.model_path is not None and o.value == settings.model_path)
    why = "tokenizer and config.json are those of model.path"
    out.leave("implied" if same else "unsupported", o.key, o.value, why, o.line)


def _positions(o: Override, out: Import, settings: VerlSettings) -> None:
    """Carries the number of positions over. Where the checkpoint has it anyway, nothing is to set."""
    model = settings.model
    if o.value is None or (model is not None and model.max_position_embeddings == o.value):
        out.leave("implied", o.key, o.value, "it is the checkpoint's own", o.line)
    elif (
        model is not None
        and model.rotation.kind in FREE_OF_LENGTH
        and isinstance(o.value, int)
        and settings.longest <= o.value < model.max_position_embeddings
    ):
        out.leave("implied", o.key, o.value, "no sample is longer, and the checkpoint has more", o.line)
    elif model is not None and (model.rotation.kind not in FREE_OF_LENGTH or model.is_wrapped):
        why = f"this model's angles depend on it (rope_type {model.rotation.kind}): write it into its config.json"
        if model.is_wrapped:
            why = "the text model of one that also reads images has the number of its config.json: write it there"
        out.leave("unsupported", o.key, o.value, why, o.line)
    else:
        out.put("renamed", o.key, "model.max_position_embeddings", o.value, line=o.line)


def _padding(o: Override, out: Import, settings: VerlSettings) -> None:
    if o.value in (True, None):
        out.leave("implied", o.key, o.value, "padding is removed unless actor.use_remove_padding is false", o.line)
    else:
        kind = "renamed"
        if o.key == A + "use_remove_padding":
            kind = "carried"
        out.put(kind, o.key, "actor.use_remove_padding", o.value, line=o.line)


def _strategy(o: Override, out: Import, settings: VerlSettings) -> None:
    if settings.megatron:
        out.leave("implied", o.key, o.value, "the actor is Megatron's", o.line)
    else:
        out.leave("not_applicable", o.key, o.value, "FSDP; the actor here is Megatron's", o.line)


def _checkpointing(o: Override, out: Import, settings: VerlSettings) -> None:
    if settings.megatron:
        out.leave(
            "not_applicable",
            o.key,
            o.value,
            "FSDP only; with Megatron override_transformer_config.recompute_* decide",
            o.line,
        )
    elif o.value:
        out.put(
            "renamed",
            o.key,
            f"{OVERRIDE_TRANSFORMER}.recompute_granularity",
            "full",
            "gradient checkpointing of every layer",
            o.line,
        )
        out.put(
            "implied",
            "",
            f"{OVERRIDE_TRANSFORMER}.recompute_method",
            "uniform",
            "gradient checkpointing of every layer",
            o.line,
        )
        out.put(
            "implied",
            "",
            f"{OVERRIDE_TRANSFORMER}.recompute_num_layers",
            1,
            "gradient checkpointing of every layer",
            o.line,
        )
    else:
        out.leave("implied", o.key, o.value, "nothing is recomputed unless asked for", o.line)


def _sequence_parallel(o: Override, out: Import, settings: VerlSettings) -> None:
    if o.value is True:
        out.leave("implied", o.key, o.value, "on with tensor parallelism", o.line)
    else:
        out.put("renamed", o.key, LAYOUT + "sequence_parallel", o.value, line=o.line)


def _transformer(o: Override, out: Import, settings: VerlSettings) -> None:
    name = o.key.removeprefix(TRANSFORMER)
    decider = decided_by(OVERRIDE_TRANSFORMER, name) or ""
    if name == "recompute_modules" and settings.value(TRANSFORMER + "recompute_granularity") != "selective":
        out.leave("implied", o.key, o.value, "only selective recompute has modules", o.line)
    elif decider.startswith(LAYOUT):
        same = o.value == settings.given(MEGATRON + name) or (name == "sequence_parallel" and o.value is True)
        out.leave("implied" if same else "unsupported", o.key, o.value, f"is {decider}", o.line)
    elif name in _OF_THE_MODELS and o.value == _OF_THE_MODELS[name]:
        out.leave("implied", o.key, o.value, "as the checkpoint's config.json has it", o.line)
    elif name in MINDSPEED_FIELDS and settings.device != "npu":
        out.leave("not_applicable", o.key, o.value, "MindSpeed only, which runs on NPUs", o.line)
    elif name.startswith("moe_") and settings.dense:
        out.leave("not_applicable", o.key, o.value, "the model is dense", o.line)
    elif o.value is None:
        out.leave("implied", o.key, o.value, "as it is without the key", o.line)
    else:
        _upstream(o, out, OVERRIDE_TRANSFORMER, name, settings)


def _optimizer(o: Override, out: Import, settings: VerlSettings) -> None:
    _upstream(o, out, OVERRIDE_OPTIMIZER, o.key.removeprefix(A + "optim.override_optimizer_config."), settings)


def _ddp(o: Override, out: Import, settings: VerlSettings) -> None:
    _upstream(o, out, OVERRIDE_DDP, o.key.removeprefix(MEGATRON + "override_ddp_config."), settings)


def _engine(o: Override, out: Import, settings: VerlSettings) -> None:
    name = o.key.removeprefix(R).removeprefix("engine_kwargs.vllm.")
    decider = decided_by(ENGINE, name) or ""
    if o.key.startswith(SPECULATION):
        speculation(o, out, settings)
    elif name == "enable_expert_parallel":
        value = 1
        if o.value:
            value = settings.value(R + "tensor_model_parallel_size") * settings.value(R + "data_parallel_size")
        out.put(
            "renamed",
            o.key,
            "rollout.expert_parallel_size",
            value,
            "experts are spread over all workers of an engine",
            o.line,
        )
    elif decider.startswith("rollout."):
        out.put("renamed", o.key, decider, o.value, line=o.line)
    elif name == "max_model_len":
        _longest(o, out, settings)
    else:
        _upstream(o, out, ENGINE, name, settings)


def _engine_setting(o: Override, out: Import, settings: VerlSettings) -> None:
    if not sets_nothing(o, out, settings):
        _engine(o, out, settings)


def _upstream(o: Override, out: Import, target: str, name: str, settings: VerlSettings) -> None:
    """Carries a field of Megatron or vLLM over where it exists and the user decides it. Otherwise refuses it with the
    reason.
    """
    field, *inside = name.split(".")
    value = o.value
    if inside:
        value = _with(out.values.get(f"{target}.{field}"), inside, o.value)
    if faults := override_faults(target, {field: value}, settings.device):
        out.leave(
            "unsupported", o.key, o.value, "; ".join(part for part in (faults[0].rule, faults[0].why) if part), o.line
        )
        return
    why = f"a value inside {target}.{field}" if inside else ""
    out.put("carried", o.key, f"{target}.{field}", value, why, o.line)


def _with(mapping: Any, names: Sequence[str], value: Any) -> dict[str, Any]:
    """Returns a mapping with one value more, behind the names that lead to it."""
    name, *inside = names
    before = mapping if isinstance(mapping, dict) else {}
    return before | {name: _with(before.get(name), inside, value) if inside else value}


def _reference(o: Override, out: Import, settings: VerlSettings) -> None:
    name = o.key.removeprefix(F + "megatron.")
    actor = MEGATRON + name
    if name == "param_offload":
        out.put("carried", o.key, "ref.param_offload", o.value, line=o.line)
    elif name.endswith("parallel_size") and o.value != settings.value(actor):
        why = "the reference model lies as the actor does: the same numbers, another use of memory"
        out.leave("not_applicable", o.key, o.value, why, o.line)
    else:
        out.leave("implied", o.key, o.value, "the reference model is built and lies as the actor", o.line)


def _chat_template(o: Override, out: Import, settings: VerlSettings) -> None:
    name = o.key.removeprefix("data.apply_chat_template_kwargs.")
    to = "data.enable_thinking"
    if name != "enable_thinking":
        to = f"data.apply_chat_template_kwargs.{name}"
    if name == "data.apply_chat_template_kwargs":
        out.put("carried", o.key, name, o.value or {}, line=o.line)
    else:
        out.put("renamed" if name == "enable_thinking" else "carried", o.key, to, o.value, line=o.line)


def _own_template(o: Override, out: Import, settings: VerlSettings) -> None:
    if o.value is None:
        out.leave("implied", o.key, o.value, "the checkpoint's own", o.line)
    else:
        out.put("renamed", o.key, "data.apply_chat_template_kwargs.chat_template", o.value, line=o.line)


def _reward_manager(o: Override, out: Import, settings: VerlSettings) -> None:
    if o.value == "gdpo":
        out.leave(
            "implied",
            o.key,
            o.value,
            "the parts of a reward are always kept; algorithm.gdpo_reward_keys names them",
            o.line,
        )
    elif o.value in ("naive", "dapo"):
        out.put("renamed", o.key, "reward.reward_manager", o.value, line=o.line)
    elif o.value == "prime":
        why = "verl's prime scores by the same function as naive, in processes, as all are here"
        out.put("renamed", o.key, "reward.reward_manager", "naive", why, o.line)
    else:
        out.leave("unsupported", o.key, o.value, "reward managers here are naive and dapo", o.line)


def _overlong(o: Override, out: Import, settings: VerlSettings) -> None:
    name = o.key.rpartition(".")[2]
    to = f"algorithm.overlong_buffer.{name}"
    if name == "len" and o.value == 0 and not settings.given(f"{o.key.removesuffix(name)}enable"):
        out.leave("implied", o.key, o.value, "there is no penalty", o.line)
    elif name in ("enable", "len", "penalty_factor"):
        out.put("renamed", o.key, to, o.value, line=o.line)
    elif name == "max_resp_len":
        same = o.value == settings.value("data.max_response_length")
        out.leave("implied" if same else "unsupported", o.key, o.value, "is data.max_response_length", o.line)
    elif name == "log":
        out.leave("implied", o.key, o.value, "the penalty is always recorded", o.line)
    else:
        out.leave("unsupported", o.key, o.value, "no such setting of a built-in reward", o.line)


def _reward_argument(o: Override, out: Import, settings: VerlSettings) -> None:
    name = o.key.partition("reward_kwargs.")[2]
    out.put("carried", o.key, f"reward.custom_reward_function.reward_kwargs.{name}", o.value, line=o.line)


def _val_only(o: Override, out: Import, settings: VerlSettings) -> None:
    """Carries val_only over. verl looks at it after the validation before training, and otherwise trains."""
    if settings.given("trainer.val_before_train") is False:
        out.leave("implied", o.key, o.value, "without val_before_train verl does not read it", o.line)
    else:
        out.put("carried", o.key, o.key, o.value, line=o.line)


def _keep(o: Override, out: Import, settings: VerlSettings) -> None:
    if isinstance(o.value, int) and o.value >= 1:
        out.put("carried", o.key, "trainer.max_actor_ckpt_to_keep", o.value, line=o.line)
    else:
        out.put("carried", o.key, "trainer.max_actor_ckpt_to_keep", ALL_CHECKPOINTS, "all are kept", o.line)


def _resume_from(o: Override, out: Import, settings: VerlSettings) -> None:
    if settings.value("trainer.resume_mode") != "resume_path" or o.value is None:
        out.leave("implied", o.key, o.value, "verl reads it with resume_mode=resume_path only", o.line)
        return
    out.put("carried", o.key, "trainer.resume_from_path", o.value, line=o.line)
    out.warnings.append(
        f"line {o.line}: {o.value} is a checkpoint of verl's: convert it (mrl convert megatron-to-hf), put the result "
        "at model.path and take resume_mode and resume_from_path out, or name a checkpoint of ours"
    )


def _logger(o: Override, out: Import, settings: VerlSettings) -> None:
    names = o.value if isinstance(o.value, list) else [o.value]
    known = [name for name in names if name in VIEWS]
    out.put("carried", o.key, "trainer.logger", known, line=o.line)
    if other := [name for name in names if name not in VIEWS]:
        out.warnings.append(
            f"line {o.line}: no logger here is called {', '.join(map(str, other))}; metrics.jsonl "
            "has everything in any case"
        )


def _replay(o: Override, out: Import, settings: VerlSettings) -> None:
    if o.value:
        out.put("renamed", o.key, "actor.router_replay", "R3", line=o.line)
    else:
        out.leave("implied", o.key, o.value, "no routes are asked of the engine", o.line)


def _separate(o: Override, out: Import, settings: VerlSettings) -> None:
    """Reports keys of engines on separate devices. translate.py writes the devices that they give."""
    out.leave("implied", o.key, o.value, "decides cluster.placement and rollout.num_engines", o.line)


HANDLERS: dict[str, Handler] = (
    ALGORITHM_HANDLERS
    | SCHEDULE_HANDLERS
    | TURN_HANDLERS
    | LORA_HANDLERS
    | CRITIC_HANDLERS
    | DISTILLATION_HANDLERS
    | DRAFT_HANDLERS
    | ENGINE_HANDLERS
    | IMAGE_HANDLERS
    | {
        "data.gen_batch_size": _gen_batch,
        "data.trust_remote_code": remote_code,
        M + "trust_remote_code": remote_code,
        "data.apply_chat_template_kwargs.": _chat_template,
        M + "enable_gradient_checkpointing": _checkpointing,
        M + "use_remove_padding": _padding,
        A + "use_remove_padding": _padding,
        MEGATRON + "use_remove_padding": _padding,
        A + "strategy": _strategy,
        "model_engine": _strategy,
        A + "ppo_micro_batch_size": _micro_batch,
        A + "ppo_max_token_len_per_gpu": _budget,
        R + "log_prob_max_token_len_per_gpu": _budget,
        F + "log_prob_max_token_len_per_gpu": _budget,
        R + "log_prob_use_dynamic_bsz": _dynamic,
        A + "optim.lr_warmup_steps": _warmup,
        A + "optim.lr_warmup_steps_ratio": _warmup,
        A + "optim.lr_decay_steps": _warmup,
        A + "optim.override_optimizer_config.": _optimizer,
        A + "optim.grad_clip": gradient_clip,
        A + "optim.clip_grad": gradient_clip,
        **{f"global_profiler.{name}": _profile for name in ("steps", "tool")},
        **{A + f"profiler.{name}": _profile for name in ("enable", "ranks", "all_ranks")},
        A + "optim.min_lr_ratio": least_rate,
        A + "optim.min_lr_factor": least_rate,
        M + "tokenizer_path": _of_checkpoint,
        M + "custom_chat_template": _own_template,
        **{M + f"override_config.{inner}max_position_embeddings": _positions for inner in ("", "model_config.")},
        M + "hf_config_path": _of_checkpoint,
        "data.tokenizer": _of_checkpoint,
        TRANSFORMER: _transformer,
        MEGATRON + "override_ddp_config.": _ddp,
        MEGATRON + "sequence_parallel": _sequence_parallel,
        MEGATRON + "dtype": _dtype,
        R + "dtype": _dtype,
        F + "megatron.": _reference,
        R + "max_model_len": _longest,
        R + "response_length": _response_length,
        R + "prompt_length": _response_length,
        R + "enable_expert_parallel": _engine,
        R + "engine_kwargs.vllm.": _engine_setting,
        R + "val_kwargs.do_sample": _greedy,
        R + "enable_rollout_routing_replay": _replay,
        R + "nnodes": _separate,
        R + "n_gpus_per_node": _separate,
        "rollout.nnodes": _separate,
        "rollout.n_gpus_per_node": _separate,
        "actor_rollout_ref.hybrid_engine": _separate,
        "reward_model.reward_manager": _reward_manager,
        "reward.reward_manager.name": _reward_manager,
        "reward_manager.name": _reward_manager,
        "reward_model.overlong_buffer.": _overlong,
        "reward_model.reward_kwargs.": _overlong,
        "reward.reward_kwargs.": _overlong,
        "custom_reward_function.reward_kwargs.": _reward_argument,
        "reward.custom_reward_function.reward_kwargs.": _reward_argument,
        "trainer.max_actor_ckpt_to_keep": _keep,
        "trainer.logger": _logger,
        "trainer.val_only": _val_only,
        "trainer.resume_from_path": _resume_from,
    }
)
