"""Lists the fields of Megatron's configuration classes, and MindSpeed's, that a user may set, with their values.

Any other field is refused. Engines compute the model as its config.json describes it. So a field that changes the
actor's function may only have the model's own value.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mrl.model import ModelSpec
from mrl.platforms.npu_mindspeed import MINDSPEED_FIELDS

# arguments of vLLM that may differ between two engines whose responses are equally likely: what they change is when a
# token is computed and beside which others, where weights and cache lie, and what is logged. Whatever chooses kernels
# or formats, caches less exactly, or is not known here changes responses
VLLM_SPEED = frozenset(
    """
    aggregate_engine_logging async_scheduling collect_detailed_traces cpu_distributed_timeout_seconds cpu_offload_gb
    cpu_offload_params cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets dbo_decode_token_threshold
    dbo_prefill_token_threshold disable_log_stats disable_nccl_for_dp_synchronization distributed_timeout_seconds
    download_dir dp_sync_interval enable_dbo enable_layerwise_nvtx_tracing enable_log_requests
    enable_logging_iteration_details enable_mfu_metrics enable_mm_processor_stats enable_nccl_comm_suspend
    enable_shm_tensor_arena fail_on_environ_validation hf_token jit_monitor_mode jit_monitor_verbose
    kv_cache_memory_bytes kv_cache_metrics kv_cache_metrics_sample log_config_file log_level logging_config
    long_prefill_token_threshold long_prefill_token_threshold_adaptive max_cudagraph_capture_size
    max_long_partial_prefills max_num_active_seqs max_num_partial_prefills max_num_scheduled_tokens
    max_parallel_loading_workers num_gpu_blocks_override numa_bind numa_bind_cpus numa_bind_nodes offload_backend
    offload_group_size offload_num_in_group offload_params offload_prefetch_step otlp_traces_endpoint
    per_request_spec_decode_metrics prefill_schedule_interval profiler_config ray_workers_use_nsight
    renderer_num_workers safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads
    scheduler_reserve_full_isl scheduling_policy served_model_name show_hidden_metrics_for_version shutdown_timeout
    sleep_mode_offload_cudagraph stream_interval ubatch_size use_tqdm_on_load watermark
    """.split()  # noqa: SIM905 - as in upstream_fields.py
)

Values = tuple[Any, ...] | Callable[[ModelSpec], tuple[Any, ...]]


class Effect(Enum):
    """The effect of another value of a field, and whether such a value is accepted."""

    FREE = "speed, memory, what is logged, or how gradients change weights: taken"
    ROUNDING = "how numbers are rounded: taken, and noted"
    LOSS = "a term of the training loss alone: taken, and noted"
    FUNCTION = "what the actor computes: taken with the model's own value"
    BARRED = "what mrl cannot run: taken with the value that switches it off"
    OURS = "what a key of mrl's says, or mrl itself: refused"


@dataclass(frozen=True)
class Field:
    """One field and the values that it may have.

    `why` says what follows from another value; for OURS it says what decides the field. `values` holds the default and
    other values that mean the same.
    """

    effect: Effect
    why: str = ""
    values: Values = ()

    def usual(self, model: ModelSpec | None) -> tuple[Any, ...]:
        """Returns `values` for a model, or () where they depend on an unknown model.

        Raises UnknownValue where the part of the model that they depend on is unknown.
        """
        if not callable(self.values):
            return self.values
        if model is None:
            return ()
        return self.values(model)


def _each(effect: Effect, names: str, why: str = "") -> dict[str, Field]:
    return {name: Field(effect, why) for name in names.split()}


def _ours(decides: str, names: str) -> dict[str, Field]:
    return _each(Effect.OURS, names, decides)


def _with(effect: Effect, why: str, values: Mapping[str, Any] | None = None, /, **more: Any) -> dict[str, Field]:
    """Builds fields from their usual values: one value, a tuple of values, or a function of the model."""
    given = {**(values or {}), **more}
    return {name: Field(effect, why, v if callable(v) or isinstance(v, tuple) else (v,)) for name, v in given.items()}


def _same_names(section: str, names: Iterable[str]) -> dict[str, Field]:
    return {name: Field(Effect.OURS, section + name) for name in names}


_LAYOUT = "actor.layout."
_CHECKPOINT = "the checkpoint's config.json (model.path)"
_ITSELF = "mrl itself"
_SHARDED = "mrl itself, which always shards the optimizer"

_ENGINE = "engines compute the model as its config.json describes it, and the actor would compute another"
_DROPPED = "engines have no dropout, and the actor would be trained as another model than the one that generated"
_ROUTES = "engines route as the checkpoint says, by constants that stay as they are"
_GROUPED = (
    "checkpoints and the weight sync name the weights of experts as grouped layers have them; Megatron's other experts "
    "have other names and shapes"
)
_CAPACITY = "tokens over an expert's capacity are dropped in training and not in generation: the log-probs would differ"
_DELAYED = "nothing in the actor's schedule runs the delayed weight gradients, so they would be lost"
_PLANNED = (
    "Megatron then asks the forward step for a plan of its layers' parts (core/pipeline_parallel/combined_1f1b.py, "
    "return_schedule_plan), which log-probs without logits and replayed routes do not have"
)
_SHAPES = (
    "a captured graph asserts that every tensor has the shape that it was captured with (core/transformer/"
    "cuda_graphs.py), and a micro-batch has as many tokens as its samples have; graphs of Transformer Engine also "
    "refuse packed sequences (core/transformer/transformer_layer.py)"
)
_ALIGNED = "the pipeline schedule would have to start the gathers, and mrl does not tell it to"
_WHOLE = (
    "checkpoints and the weight sync read parameters and optimizer shards as the plain "
    "distributed optimizer lays them out"
)
_NOT_RUN = "mrl runs no other: the schedule, checkpoints or engines would not fit it"
_STATES = "Megatron's Adam, on the device and on the host, keeps gradients and states in float32"
_GATHER = "Megatron reads it from actor.override_ddp_config, which has a key of the same name"
_GATHER_IN_STEP = "Megatron's own optimizer step starts its gathers; mrl's step skips updates that are not finite"
_SCALE = "gradients would be divided by a scale that the loss was never multiplied with"

_LOW_ROUTER = "a router below fp32 picks other experts than the engine's in about one token of ten"
_FP8 = "products in 8 bits: log-probs differ from the engine's by more than those of bfloat16 do"
_ROUNDS = "activations are rounded in other places than the engine's, and log-probs differ a little more"
_SUMS = "gradients of micro-batches and replicas are summed in the weights' own format, and small ones are lost"
_MEANS = "gradients are summed over replicas in another order or format"


def _scaling(model: ModelSpec) -> tuple[Any, ...]:
    """Returns the scaling factors that keep a router's scores as the model has them. None and 1 are the same."""
    factor = model.routed_scaling_factor
    if factor == 1.0:
        return (None, 1.0)
    return (factor,)


def _groups(model: ModelSpec, number: int) -> tuple[Any, ...]:
    if model.expert_groups > 1:
        return (number,)
    return (None,)


def _linear_layers(model: ModelSpec) -> tuple[Any, ...]:
    """Returns the list that tells Megatron which layers have gated delta attention."""
    if not model.is_hybrid:
        return (None,)
    return ([int(layer in model.linear_layers) for layer in range(model.num_layers)],)


_MODEL = (
    _with(
        Effect.FUNCTION, _DROPPED, hidden_dropout=0.0, attention_dropout=0.0, moe_input_jitter_eps=None,
    )
    | _with(
        Effect.FUNCTION, _ROUTES,
        moe_router_score_function=lambda m: (m.router_score,),
        moe_router_topk_scaling_factor=_scaling,
        moe_router_enable_expert_bias=lambda m: (m.router_score == "sigmoid",),
        moe_router_bias_update_rate=0.0,
        moe_router_pre_softmax=lambda m: (not m.norm_topk_prob,),
        moe_router_force_load_balancing=False,
        moe_router_num_groups=lambda m: _groups(m, m.expert_groups),
        moe_router_group_topk=lambda m: _groups(m, m.chosen_expert_groups),
        moe_router_topk_limited_devices=None,
    )
    | _with(Effect.FUNCTION, _CAPACITY, moe_expert_capacity_factor=None, moe_token_dropping=False)
    | _with(
        Effect.FUNCTION, _ENGINE,
        layernorm_epsilon=lambda m: (m.rms_norm_eps,),
        add_qkv_bias=lambda m: (m.qkv_bias,),
        qk_layernorm=lambda m: (m.qk_norm or m.is_latent,),
        softmax_scale=lambda m: (None,) if m.is_latent else (None, m.head_dim**-0.5),
        normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=lambda m: (m.clamped_experts,),
        activation_func_clamp_value=None, glu_linear_offset=0.0,
        apply_residual_connection_post_layernorm=False,
        layernorm_zero_centered_gamma=lambda m: (m.zero_centered_norm,),
        rotary_interleaved=False, no_rope_freq=None, mrope_section=None,
        window_size=None, window_attn_skip_freq=None, softmax_type="vanilla",
        qk_l2_norm=False, qk_clip=False, attention_output_gate=lambda m: (m.attn_output_gate,),
        moe_apply_probs_on_input=False,
    )
)  # fmt: skip

_NEVER = (
    _with(
        Effect.BARRED, _NOT_RUN,
        multi_latent_attention=lambda m: (m.is_latent,),
        experimental_attention_variant=lambda m: ("gated_delta_net" if m.is_hybrid else None,),
        linear_attention_freq=_linear_layers,
        transformer_impl="transformer_engine", mtp_num_layers=(None, 0), variable_seq_lengths=True,
        cpu_offloading=False,
        fp32_residual_connection=False, enable_autocast=False, fp8_param=False, fp4=None, tp_comm_overlap=False,
        moe_layer_recompute=False, moe_enable_routing_replay=False,
    )
    | _with(Effect.BARRED, _GROUPED, moe_grouped_gemm=True, moe_use_legacy_grouped_gemm=False)
    | _with(
        Effect.BARRED, "it belongs to a capacity of experts, which would drop tokens",
        moe_pad_expert_input_to_capacity=False, moe_token_drop_policy="probs",
    )
    | _with(
        Effect.BARRED, "gradients would no longer be divided by the data-parallel size, for which the loss makes up",
        calculate_per_token_loss=False,
    )
    | _with(Effect.BARRED, _DELAYED, delay_wgrad_compute=False)
    | _with(
        Effect.BARRED, _PLANNED,
        overlap_moe_expert_parallel_comm=False, ep_overlap_early_attn_memory_release=False,
    )
    | _with(
        Effect.BARRED, _SHAPES,
        cuda_graph_impl="none", enable_cuda_graph=False, external_cuda_graph=False, cuda_graph_scope=(None, [], "full"),
    )
)  # fmt: skip

_ROUNDED = (
    _with(Effect.ROUNDING, _LOW_ROUTER, moe_router_dtype=("fp32", "fp64"))
    | _with(
        Effect.ROUNDING, _FP8,
        fp8=(None, False), fp8_recipe="delayed", fp8_quantizer_factory=None, fp8_margin=0, fp8_interval=1,
        fp8_amax_history_len=1, fp8_amax_compute_algo="most_recent", fp8_wgrad=True, fp8_dot_product_attention=False,
        fp8_multi_head_attention=False, tp_only_amax_red=False, first_last_layers_bf16=False,
        num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1, activation_func_fp8_input_store=False,
    )
    | _with(
        Effect.ROUNDING, _ROUNDS,
        attention_softmax_in_fp32=True, disable_bf16_reduced_precision_matmul=False, batch_invariant_mode=False,
    )
)  # fmt: skip

TRANSFORMER: Mapping[str, Field] = (
    _same_names(
        _LAYOUT,
        (
            "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
            "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel",
            "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
            "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
        ),
    )
    | _ours(_LAYOUT + "pipeline_layers", "pipeline_model_parallel_layout")
    | _ours("model.dtype", "params_dtype pipeline_dtype bf16 fp16")
    | _ours("trainer.deterministic", "deterministic_mode")
    | _ours(
        _CHECKPOINT,
        """
        num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size moe_ffn_hidden_size
        num_moe_experts moe_router_topk moe_layer_freq moe_shared_expert_intermediate_size moe_shared_expert_gate
        activation_func
        """,
    )
    | _ours(
        _ITSELF, "finalize_model_grads_func grad_scale_func grad_sync_func no_sync_func param_sync_func timers"
    )
    | _MODEL
    | _NEVER
    | _ROUNDED
    | _each(Effect.LOSS, "moe_aux_loss_coeff moe_z_loss_coeff moe_router_load_balancing_type")
    | _each(
        Effect.FREE,
        """
        apply_rope_fusion async_tensor_model_parallel_allreduce attention_backend barrier_with_L1_time batch_p2p_comm
        batch_p2p_sync bias_activation_fusion bias_dropout_fusion clone_scatter_output_in_embedding config_logger_dir
        cp_comm_type cross_entropy_fusion_impl cross_entropy_loss_fusion cuda_graph_retain_backward_graph
        cuda_graph_use_single_mempool cuda_graph_warmup_steps deallocate_pipeline_outputs
        disable_parameter_transpose_cache distribute_saved_activations embedding_init_method_std
        fine_grained_activation_offloading fused_single_qkv_rope gradient_accumulation_fusion init_method_std
        log_max_attention_logit masked_softmax_fusion
        memory_efficient_layer_norm min_offloaded_tensor_size moe_deepep_num_sms moe_enable_deepep
        moe_extended_tp moe_flex_dispatcher_backend moe_hybridep_num_sms moe_per_layer_logging moe_permute_fusion
        moe_router_fusion moe_router_padding_for_fp8 moe_router_padding_for_quantization moe_shared_expert_overlap
        moe_token_dispatcher_type offload_modules overlap_p2p_comm overlap_p2p_comm_warmup_flush perform_initialization
        persist_layer_norm recompute_granularity recompute_method recompute_modules recompute_num_layers
        symmetric_ar_type tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bootstrap_backend tp_comm_bulk_dgrad
        tp_comm_bulk_wgrad tp_comm_overlap_ag tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs use_cpu_initialization use_te_activation_func
        use_te_rng_tracker
        """,
    )
    | {name: Field(Effect.FREE) for name in MINDSPEED_FIELDS}
)  # fmt: skip

OPTIMIZER: Mapping[str, Field] = (
    _same_names("actor.optim.", ("lr", "min_lr", "weight_decay", "clip_grad"))
    | _ours("actor.optim.betas", "adam_beta1 adam_beta2")
    | _ours("actor.optim.eps", "adam_eps")
    | _ours("model.dtype", "params_dtype bf16 fp16")
    | _ours("mrl itself, which trains with Adam", "optimizer")
    | _ours(_SHARDED, "use_distributed_optimizer")
    | _ours(_ITSELF, "timers")
    | _each(Effect.FREE, "apply_wd_to_qk_layernorm decoupled_lr decoupled_min_lr decoupled_weight_decay")
    | _with(
        Effect.BARRED,
        _STATES,
        dict.fromkeys(
            ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), ("float32", "fp32")
        ),
    )
    | _with(Effect.BARRED, _GATHER, overlap_param_gather=False)
    | _with(Effect.BARRED, _GATHER_IN_STEP, overlap_param_gather_with_optimizer_step=False)
    | _with(Effect.BARRED, _SCALE, loss_scale=None)
    | _each(
        Effect.FREE,
        """
        barrier_with_L1_time config_logger_dir fp8_recipe log_num_zeros_in_grad optimizer_cpu_offload
        optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params store_param_remainders
        use_precision_aware_optimizer use_torch_optimizer_for_cpu_offload
        """,
    )
)

DDP: Mapping[str, Field] = (
    _ours(_SHARDED, "use_distributed_optimizer")
    | _with(Effect.ROUNDING, _SUMS, grad_reduce_in_fp32=True)
    | _with(Effect.ROUNDING, _MEANS, average_in_collective=False, reduce_scatter_with_fp32_accumulation=False)
    | _with(Effect.BARRED, _ALIGNED, align_param_gather=False)
    | _with(
        Effect.BARRED,
        _WHOLE,
        num_distributed_optimizer_instances=1,
        use_megatron_fsdp=False,
        use_custom_fsdp=False,
        data_parallel_sharding_strategy="no_shard",
        outer_dp_sharding_strategy="no_shard",
    )
    | _with(Effect.BARRED, _DELAYED, delay_wgrad_compute=False)
    | _each(
        Effect.FREE,
        """
        bucket_size check_for_large_grads check_for_nan_in_grad disable_symmetric_registration fsdp_double_buffer
        fsdp_manual_registration gradient_reduce_div_fusion keep_fp8_transpose_cache nccl_ub overlap_grad_reduce
        overlap_param_gather pad_buckets_for_high_nccl_busbw preserve_fp32_weights suggested_communication_unit_size
        """,
    )
)
