"""Table of verl's keys: where a value goes here, or why it goes nowhere.

Keys whose value is taken unchanged are named at mrl's fields (`verl=` in mrl/config/schema_*.py). `ROWS` adds all
others, each with a reason or a conversion. A row ending in a dot covers all keys of verl's below it (verl_keys.py says
which there are). The longest row that fits wins. Keys that need more than a row are in handlers.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from mrl.config.schema import verl_names
from mrl.tools.import_verl.verl_keys import is_verls

Kind = Literal["to", "implied", "not_applicable", "unsupported", "special"]

A = "actor_rollout_ref.actor."
R = "actor_rollout_ref.rollout."
F = "actor_rollout_ref.ref."
M = "actor_rollout_ref.model."
MEGATRON = A + "megatron."
TRANSFORMER = A + "megatron.override_transformer_config."
LAYOUT = "actor.layout."


@dataclass(frozen=True)
class KeyRow:
    """The fate of one key of verl's. `to` is mrl's key.

    `why` says why a key goes nowhere, or has a slightly different meaning here; of a special key whose handler names no
    key of mrl's, what becomes of which values. `neutral` lists values of an unsupported key that describe what mrl does
    anyway.
    """

    kind: Kind
    to: str = ""
    why: str = ""
    neutral: tuple[Any, ...] = ()
    convert: Callable[[Any], Any] | None = None

    @property
    def said(self) -> tuple[Any, ...]:
        """Values of an unsupported key that say something, and are what mrl does: neither null nor an empty section."""
        return tuple(value for value in self.neutral if value is not None and value != {})


def _to(key: str, convert: Callable[[Any], Any] | None = None, why: str = "") -> KeyRow:
    return KeyRow("to", to=key, convert=convert, why=why)


def _by_value(why: str) -> KeyRow:
    return KeyRow("special", why=why)


def _implied(why: str) -> KeyRow:
    return KeyRow("implied", why=why)


def _nothing(why: str) -> KeyRow:
    return KeyRow("not_applicable", why=why)


def _missing(why: str, *neutral: Any) -> KeyRow:
    return KeyRow("unsupported", why=why, neutral=neutral)


_SPECIAL = KeyRow("special")
_REMOTE_CODE = _by_value(
    "a loss if true for a family that mrl lacks; otherwise implied. Code of a checkpoint never runs"
)
_OF_CHECKPOINT = _by_value("implied where it is null or the model's folder; another folder is a loss")
_DEVICES = _by_value("decides `cluster.placement` and `rollout.num_engines`, with the other keys of devices")


def _lora(name: str) -> KeyRow:
    return _by_value(f"`actor.lora.{name}` where the script trains adapters; otherwise not applicable")


_FSDP = "FSDP only"
_NO_SERVICE = "no sandbox service is called: programs run on the engine's node (docs/tools.md)"
_OTHER_BACKEND = "of another training backend; the actor here is Megatron's"
_SAMPLE = "as many prompts as in verl, other ones: drawn after unusable rows are out, of each file its share"
_SERVERS = "no reward model runs here; rewards are functions"
_PROFILER = "profiles are of the actor's ranks (record.profile)"
_IMAGES = "the model's own processor reads images (model.vision)"
_OTHER_THAN_IMAGES = "prompts are texts, with images where model.vision says so: rows with videos or sound are refused"
_CODE = "code of verl's users that is loaded by class or path has no counterpart for this"
_AHEAD = (
    "generation ahead of training is trainer.schedule here: one_step_off, or bounded with trainer.max_staleness "
    "(docs/asynchronous.md); give it by --set trainer.schedule=..."
)
_ADAM = "only Adam here: Megatron's distributed optimizer has no Muon, and shards no other optimizer's states"
_GENERATED = "responses are always generated: those of another run are not read in their place"
_BRIDGE = "weights are always read from model.path through the bridge"


def every(steps: Any) -> Any:
    """Converts a frequency in steps: verl switches off with anything below 1."""
    if not isinstance(steps, int) or steps >= 1:
        return steps
    return -1


def _at_least(least: int) -> Callable[[Any], Any]:
    return lambda value: max(value, least) if isinstance(value, int) else value


def _filter(count: Any) -> Any:
    """Converts a number of likeliest tokens: 0 and -1 both mean all in vLLM."""
    if count == 0:
        return -1
    return count


def _limit(count: Any) -> Any:
    """Converts a number of prompts: verl takes all with anything below 1."""
    if count is None or (isinstance(count, int) and count < 1):
        return None
    return count


# Keys of sections that are passed on unchanged; no field of mrl names them.
_HANDED_ON: dict[str, str] = {
    **{
        f"{A}optim.{name}": f"actor.optim.override_optimizer_config.{name}"
        for name in ("use_precision_aware_optimizer", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    },
    R + "cudagraph_capture_sizes": "rollout.engine_kwargs.vllm.cudagraph_capture_sizes",
}

ROWS: dict[str, KeyRow] = {
    **{key: _to(ours) for key, ours in (verl_names() | _HANDED_ON).items()},
    # --- data
    "data.val_max_samples": _to("data.val_max_samples", _limit, _SAMPLE),
    "data.train_max_samples": _to("data.train_max_samples", _limit, _SAMPLE),
    "data.apply_chat_template_kwargs.": _SPECIAL,
    "data.seed": _to("trainer.seed", lambda seed: 0 if seed is None else seed),
    "data.gen_batch_size": _SPECIAL,
    "data.return_raw_chat": _implied("prompts are kept as chats and as token ids"),
    "data.return_raw_input_ids": _implied("prompts are kept as chats and as token ids"),
    "data.return_full_prompt": _implied("prompts are kept as chats and as token ids"),
    "data.custom_cls.": _missing("data sets are parquet or JSONL in verl's schema", None),
    "data.trust_remote_code": _REMOTE_CODE,
    "data.sampler.": _missing("prompts are drawn in the order of the data, or shuffled by data.shuffle", None),
    "data.datagen.": _missing("the rows are those of the files: none is made while a run goes on", None),
    "data.chat_template_func": _nothing("verl keeps the value and calls nothing by it"),
    "data.tokenizer": _OF_CHECKPOINT,
    "data.continuous_token.": _implied("a conversation's tokens are kept as they were sampled and given"),
    "data.tool_config_path": _SPECIAL,
    "data.function_tool_path": _SPECIAL,
    "data.image_key": _SPECIAL,
    **{f"data.{name}": _missing(_OTHER_THAN_IMAGES, None) for name in ("video_key", "audio_key")},
    **{f"data.{name}": _nothing(_IMAGES) for name in ("image_patch_size", "return_multi_modal_inputs")},
    "data.mm_processor_kwargs.": _missing(
        "how images are cut is set in the model's preprocessor_config.json: write it there (size, in pixels)", None, {}
    ),
    "data.": _nothing("a matter of how verl loads data"),
    # --- model
    M + "use_remove_padding": _SPECIAL,
    M + "enable_gradient_checkpointing": _SPECIAL,
    M + "use_fused_kernels": _implied("log-probs are always computed without the full logits"),
    M + "fused_kernel_options.": _implied("log-probs are always computed without the full logits"),
    M + "enable_activation_offload": _nothing(_FSDP),
    M + "use_liger": _nothing(_FSDP),
    M + "use_shm": _nothing("a matter of how verl reads weights"),
    M + "tokenizer_path": _OF_CHECKPOINT,
    M + "hf_config_path": _OF_CHECKPOINT,
    M + "trust_remote_code": _REMOTE_CODE,
    M + "external_lib": _missing("of the user's code rewards, losses, advantages and tools are read by a path", None),
    M + "custom_chat_template": _by_value(
        "a template goes to `data.apply_chat_template_kwargs.chat_template`; null is implied"
    ),
    **{
        M + f"override_config.{name}": _missing("no dropout here", 0, 0.0)
        for name in ("attention_dropout", "embd_pdrop", "resid_pdrop")
    },
    M + "override_config.attn_implementation": _nothing("attention is Megatron's"),
    **{M + f"override_config.{inner}max_position_embeddings": _SPECIAL for inner in ("", "model_config.")},
    M + "override_config.": _missing("the model is what the checkpoint's config.json says", None, {}),
    **{M + name: _SPECIAL for name in ("lora_rank", "target_modules")},
    **{M + name: _lora("alpha") for name in ("lora_alpha", "lora.alpha")},
    **{M + name: _lora("path") for name in ("lora_adapter_path", "lora.adapter_path")},
    M + "lora.dropout": _lora("dropout"),
    M + "exclude_modules": _by_value(
        "with adapters a loss where it names modules of the text model; otherwise implied or not applicable"
    ),
    **{M + f"lora.{name}": _SPECIAL for name in ("rank", "target_modules")},
    M + "lora.": _by_value(
        "with adapters a loss where verl's would compute something else (type, dropout_position, "
        "share_expert_adapters, exclude_modules); other keys are implied or not applicable"
    ),
    M + "mtp.": _SPECIAL,
    M + "tiled_mlp.": _nothing(_FSDP),
    # --- actor
    A + "strategy": _by_value(
        "megatron is implied; with another trainer of verl's the actor is trained on Megatron here"
    ),
    A + "ppo_micro_batch_size": _SPECIAL,
    A + "ppo_max_token_len_per_gpu": _SPECIAL,
    A + "shuffle": _to("actor.shuffle", why="rows of the whole step are drawn, in verl those of each replica"),
    A + "data_loader_seed": _nothing("all seeds follow from trainer.seed"),
    A + "clip_ratio": _SPECIAL,
    A + "loss_agg_mode": _SPECIAL,
    A + "policy_loss.loss_mode": _SPECIAL,
    A + "tis_imp_ratio_cap": _SPECIAL,
    A + "calculate_entropy": _implied("entropy is always measured"),
    **{
        A + name: _nothing("for advantage estimators that are not here")
        for name in ("calculate_sum_pi_squared", "sum_pi_squared_checkpointing")
    },
    A + "entropy_checkpointing": _implied("entropy is computed in chunks"),
    A + "entropy_from_logits_with_chunking": _implied("entropy is computed in chunks"),
    A + "entropy_from_logits_chunk_size": _implied("entropy is computed in chunks"),
    A + "use_fused_kernels": _implied("log-probs are always computed without the full logits"),
    A + "use_torch_compile": _nothing(_FSDP),
    A + "ulysses_sequence_parallel_size": _nothing(_FSDP),
    A + "fsdp_config.": _nothing(_FSDP),
    **{f"{A}{backend}.": _nothing(_OTHER_BACKEND) for backend in ("veomni", "torchtitan")},
    **{
        f"{A}{backend}.{name}": _to(f"actor.{name}")
        for backend in ("veomni", "torchtitan")
        for name in ("param_offload", "optimizer_offload")
    },
    A + "use_prefix_grouper": _nothing("a matter of verl's attention"),
    A + "freeze_vision_tower": _SPECIAL,
    A + "checkpoint.": _nothing("checkpoints always hold weights, optimizer, random state and place in the data"),
    A + "load_weight": _implied(_BRIDGE),
    A + "rollout_n": _implied("is rollout.n"),
    A + "use_remove_padding": _SPECIAL,
    A + "pad_to_length": _nothing("padding is always removed"),
    A + "router_replay.": _nothing("routes are kept with the samples"),
    A + "qat.enable": _missing("no quantised training here", False),
    A + "qat.": _nothing("no quantised training here"),
    # --- optimizer
    A + "optim.lr_warmup_steps": _SPECIAL,
    A + "optim.lr_warmup_steps_ratio": _SPECIAL,
    A + "optim.lr_decay_steps": _SPECIAL,
    A + "optim.total_training_steps": _nothing("follows from the length of the run"),
    A + "optim.optimizer": _missing(_ADAM, "adam", "AdamW", "adamw"),
    A + "optim.name": _missing(_ADAM, "adam", "AdamW", "adamw"),
    A + "optim.optimizer_impl": _missing("only torch's and Megatron's Adam here", "torch.optim"),
    A + "optim.grad_clip": _SPECIAL,
    A + "optim.clip_grad": _SPECIAL,
    A + "optim.min_lr_ratio": _SPECIAL,
    A + "optim.min_lr_factor": _SPECIAL,
    A + "optim.num_cycles": _missing("a cosine falls once, which is half a cycle", None, 0.5),
    A + "optim.weight_decay_incr_style": _implied("weight decay is constant: verl begins and ends with the same"),
    A + "optim.override_optimizer_config.": _SPECIAL,
    A + "optim.": _nothing("of schedules and optimizers that are not used"),
    # --- Megatron
    TRANSFORMER: _SPECIAL,
    MEGATRON + "override_ddp_config.": _SPECIAL,
    MEGATRON + "sequence_parallel": _SPECIAL,
    MEGATRON + "dtype": _SPECIAL,
    **{
        megatron + name: _implied(_BRIDGE)
        for megatron in (MEGATRON, F + "megatron.")
        for name in (
            "use_mbridge",
            "vanilla_mbridge",
            "use_dist_checkpointing",
            "dist_checkpointing_path",
            "load_weight",
        )
    },
    MEGATRON + "use_distributed_optimizer": _implied("the optimizer is always sharded over the data-parallel ranks"),
    MEGATRON + "use_remove_padding": _SPECIAL,
    MEGATRON + "seed": _implied("all seeds follow from trainer.seed"),
    MEGATRON + "router_replay.": _nothing("routes are kept with the samples"),
    MEGATRON + "use_megatron_fsdp": _missing("the optimizer is sharded, parameters are not", False),
    MEGATRON + "dynamic_context_parallel": _missing("one context-parallel size for the whole run", False),
    MEGATRON + "override_mcore_model_config.": _missing(
        "the model is what the checkpoint's config.json says", None, {}
    ),
    MEGATRON + "qat.enable": _missing("no quantised training here", False),
    MEGATRON: _nothing("a matter of verl's Megatron worker"),
    **{A + f"profiler.{name}": _SPECIAL for name in ("enable", "ranks", "all_ranks")},
    A + "profiler.": _nothing(_PROFILER),
    # --- reference model
    F + "megatron.": _SPECIAL,
    F + "log_prob_max_token_len_per_gpu": _SPECIAL,
    F + "log_prob_micro_batch_size": _nothing("deprecated by verl; no number depends on it"),
    F + "entropy_from_logits_with_chunking": _implied("entropy is computed in chunks"),
    F + "entropy_from_logits_chunk_size": _implied("entropy is computed in chunks"),
    F + "profiler.": _nothing(_PROFILER),
    F + "rollout_n": _implied("is rollout.n"),
    F: _nothing(_FSDP),
    # --- rollout
    R + "name": _by_value("vllm is implied; vLLM generates in place of sglang and trtllm; any other engine is a loss"),
    R + "mode": _implied("vLLM's asynchronous engine is always used"),
    R + "top_k": _to("rollout.top_k", _filter),
    R + "val_kwargs.top_k": _to("rollout.val_kwargs.top_k", _filter),
    R + "rollout_world_size": _nothing("follows from the devices"),
    R + "pipeline_model_parallel_size": _missing("engines are cut by tensor, data and expert parallelism", 1),
    R + "infer_mode": _nothing("a matter of verl's engine"),
    R + "dtype": _SPECIAL,
    R + "response_length": _SPECIAL,
    R + "prompt_length": _SPECIAL,
    R + "max_model_len": _by_value("implied where a sample fits; otherwise a loss: mrl has no limit of both together"),
    R + "calculate_log_probs": _implied("the engine's log-probs are always taken"),
    R + "do_sample": _by_value(
        "implied with vLLM, which does not read it; with another engine a loss, unless it is the default"
    ),
    R + "ignore_eos": _missing("a response ends at the end of its sequence", False),
    R + "log_prob_micro_batch_size": _nothing("deprecated by verl; no number depends on it"),
    R + "engine_kwargs.vllm.disable_mm_preprocessor_cache": _nothing(_IMAGES),
    R + "limit_images": _implied("a prompt may have any number of images that fit data.max_prompt_length"),
    R + "log_prob_use_dynamic_bsz": _by_value(
        "implied where it equals the actor's; otherwise not applicable: `actor.use_dynamic_bsz` decides for both"
    ),
    R + "log_prob_max_token_len_per_gpu": _SPECIAL,
    R + "enable_expert_parallel": _SPECIAL,
    R + "engine_kwargs.vllm.": _by_value(
        "an argument of vLLM that is the user's goes to `rollout.engine_kwargs.vllm.*`; one that a key of mrl's "
        "decides goes to that key (`rollout.*`), and `speculative_config` to `rollout.speculation.*`; one that mrl "
        "sets itself, or vLLM 0.32 lacks, is a loss; null, or another engine's section, sets nothing"
    ),
    R + "engine_kwargs.": _by_value(
        "settings of SGLang and TensorRT-LLM: those of speed or memory are dropped; one that may change what is "
        "sampled is a loss; null, or a section of an engine that the script does not use, sets nothing"
    ),
    R + "val_kwargs.do_sample": _SPECIAL,
    R + "enable_rollout_routing_replay": _SPECIAL,
    R + "free_cache_engine": _implied("follows from cluster.placement"),
    R + "multi_stage_wake_up": _implied("follows from cluster.placement"),
    R + "logprobs_mode": _missing("training needs log-probs as sampled", "processed_logprobs"),
    R + "multi_turn.enable": _SPECIAL,
    R + "multi_turn.": _SPECIAL,
    R + "agent.default_agent_loop": _missing("agent loops of verl's classes", "single_turn_agent", "tool_agent"),
    R + "agent.agent_loop_config_path": _missing("agent loops of verl's classes", None),
    R + "agent.": _nothing("tools are called beside each engine (rollout.turns.num_workers)"),
    R + "checkpoint_engine.": _nothing("weights go from shard to shard"),
    R + "update_weights_bucket_megabytes": _nothing("weights go from shard to shard"),
    R + "disaggregation.enabled": _missing("an engine prefills and decodes", False),
    R + "mtp.": _implied("verl fills it from model.mtp"),
    R + "over_sample_rate": _by_value(
        "implied with vLLM, which does not read it; with another engine a loss, unless it is the default"
    ),
    R + "profiler.": _nothing(_PROFILER),
    R + "nnodes": _DEVICES,
    R + "n_gpus_per_node": _DEVICES,
    R + "skip_rollout": _missing(_GENERATED, False),
    R + "skip.enable": _missing(_GENERATED, False),
    R + "repetition_penalty": _missing(
        "tokens are drawn as the model gives them: with a penalty log-probs are those of another policy", 1, 1.0, None
    ),
    R + "use_fire_sampling": _missing("the temperature is one for the whole response", False),
    R + "custom": _missing(_CODE, None, {}),
    R + "checkpoint_manager_class": _missing(_CODE, None),
    R + "qat": _missing("no quantised training here", None, {}),
    R + "quantization_config_file": _missing("FP8 engines take their form from rollout.quantization", None),
    R + "agent.agent_loop_manager_class": _missing("agent loops of verl's classes", None),
    R + "agent.custom_async_server.": _missing(_CODE, None),
    R: _nothing("a matter of verl's engine"),
    # --- algorithm
    "algorithm.filter_groups.max_num_gen_batches": _to("algorithm.filter_groups.max_num_gen_batches", _at_least(0)),
    "algorithm.filter_groups.metric": _SPECIAL,
    "algorithm.gamma": _by_value(
        "with a critic `algorithm.gamma`; without, 1 is implied, and another value is a loss with "
        "reinforce_plus_plus alone"
    ),
    **{f"algorithm.kl_ctrl.{name}": _SPECIAL for name in ("type", "target_kl", "horizon")},
    "algorithm.lam": _by_value("with a critic `algorithm.lam`; other estimators do not read it"),
    "algorithm.rollout_correction.": _SPECIAL,
    "algorithm.rollout_is": _SPECIAL,
    "algorithm.rollout_is_threshold": _SPECIAL,
    "algorithm.use_pf_ppo": _missing("samples are not drawn again by their score", False),
    "algorithm.": _nothing("it goes with estimators, corrections or filters that are off here"),
    # --- reward
    "reward_model.reward_manager": _SPECIAL,
    "reward.reward_manager.name": _SPECIAL,
    "reward_manager.name": _SPECIAL,
    "reward_model.overlong_buffer.": _SPECIAL,
    "reward_model.reward_kwargs.": _SPECIAL,
    "reward.reward_kwargs.": _SPECIAL,
    "reward_model.enable": _missing(_SERVERS, False, None),
    "reward.reward_model.enable": _missing(_SERVERS, False, None),
    "reward_model.sandbox_fusion.url": _missing(_NO_SERVICE, None),
    "reward.sandbox_fusion.url": _missing(_NO_SERVICE, None),
    "sandbox_fusion.": _nothing(_NO_SERVICE),
    "sandbox_fusion.url": _missing(_NO_SERVICE, None),
    **{
        key: _missing("reward managers here are naive and dapo; a reward is a function of its own file", *neutral)
        for key, neutral in {
            **{
                f"{section}reward_manager.{name}": neutral
                for section in ("", "reward.")
                for name, neutral in (("source", ("register",)), ("module.path", (None,)))
            },
            "reward_model.reward_loop_source": (None, "register"),
            "reward_model.reward_loop_module_path": (None,),
            "reward_model.reward_loop_class_name": (None,),
        }.items()
    },
    "reward_model.launch_reward_fn_async": _implied("scoring runs beside generation"),
    **{
        f"{section}custom_reward_function.reward_kwargs.": _by_value(
            "carried to `reward.custom_reward_function.reward_kwargs.*`"
        )
        for section in ("", "reward.")
    },
    "reward_model.": _nothing(_SERVERS),
    "reward.": _nothing(_SERVERS),
    # --- trainer
    "trainer.save_freq": _to("trainer.save_freq", every),
    "trainer.test_freq": _to("trainer.test_freq", every),
    "trainer.log_val_generations": _to("trainer.log_val_generations", _at_least(0)),
    "trainer.max_actor_ckpt_to_keep": _SPECIAL,
    "trainer.logger": _SPECIAL,
    "trainer.resume_from_path": _SPECIAL,
    "trainer.balance_batch": _implied("samples are spread by length"),
    "trainer.critic_warmup": _by_value(
        "with a critic `trainer.critic_warmup`; without, 0 and 1 are implied and any other value is a loss"
    ),
    "trainer.val_only": _SPECIAL,
    "trainer.default_hdfs_dir": _missing("checkpoints stay in the run directory", None),
    "trainer.rollout_data_dir": _implied("samples are always recorded in the run directory"),
    "trainer.validation_data_dir": _implied("samples are always recorded in the run directory"),
    "trainer.v1.trainer_mode": _missing(_AHEAD, "sync"),
    "trainer.v1.sampler.custom_sampler.": _missing(_CODE, None),
    "trainer.v1.": _nothing("only trainer_mode sync is imported, which does not read it"),
    "trainer.checkpoint_callback_class": _missing(_CODE, None),
    "trainer.": _nothing("a matter of verl's trainer"),
    # --- the rest
    "actor_rollout_ref.hybrid_engine": _DEVICES,
    "actor_rollout_ref.nccl_timeout": _nothing("cluster.step_timeout_s bounds whole calls, not single collectives"),
    "model_engine": _by_value(
        "megatron is implied; with another trainer of verl's the actor is trained on Megatron here"
    ),
    "critic.": _SPECIAL,
    "actor_rollout_ref.critic.": _nothing("verl reads the critic's keys from critic."),
    **{f"global_profiler.{name}": _SPECIAL for name in ("steps", "tool")},
    "global_profiler.": _nothing(_PROFILER),
    "profiler.": _nothing(_PROFILER),
    "transfer_queue.": _nothing("a matter of verl's trainer"),
    "ray_kwargs.": _nothing("a matter of verl's start-up"),
    "ray_init.": _nothing("a matter of verl's start-up"),
    "hydra.": _nothing("a matter of verl's start-up"),
    **{f"skip.{kind}.enable": _missing(_GENERATED, False) for kind in ("rollout", "rollout_tq", "async_rollout")},
    "skip.": _nothing("a matter of verl's debugging"),
    "distillation.enabled": _SPECIAL,
    **{
        f"distillation.distillation_loss.{name}": _SPECIAL
        for name in ("loss_mode", "use_policy_gradient", "use_task_rewards", "distillation_loss_coef", "loss_max_clamp")
    },
    "distillation.distillation_loss.topk": _SPECIAL,
    "distillation.distillation_loss.log_prob_min_clamp": _SPECIAL,
    "distillation.distillation_loss.": _nothing(
        "rewards and teacher go through one policy loss (algorithm.policy_loss)"
    ),
    "distillation.teacher_models.": _SPECIAL,
    "distillation.teacher_model.": _SPECIAL,
    "distillation.teacher_key": _implied("a run has one teacher, to which verl too sends every sample"),
    "distillation.": _nothing("the teacher computes on the actor's ranks"),
    "async_training.": _SPECIAL,
    "rollout.nnodes": _DEVICES,
    "rollout.n_gpus_per_node": _DEVICES,
    "rollout.n": _implied("is actor_rollout_ref.rollout.n"),
    "rollout.total_rollout_steps": _SPECIAL,
    "rollout.test_freq": _SPECIAL,
    "rollout.total_epochs": _SPECIAL,
}


def row_of(key: str) -> KeyRow | None:
    """Returns the row of a key. None for a key that has none, among them all that verl does not have either."""
    if key in ROWS:
        return ROWS[key]
    if f"{key}." in ROWS:  # a whole section as one value
        return ROWS[f"{key}."]
    parts = key.split(".")
    above = (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))
    section = next((section for section in above if f"{section}." in ROWS), None)
    if section is None or (is_verls(section) and not is_verls(key)):
        return None
    return ROWS[f"{section}."]
