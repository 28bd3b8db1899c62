"""The names that vllm-ascend 0.23 accepts, as data. It ignores unknown names silently, and so would a run.

Read from the sources of release v0.23.0 (branch releases/v0.23.0, commit 50e87d63): `additional_config` in
vllm_ascend/ascend_config.py, vllm_ascend/utils.py (refresh, enable_dsa_cp) and attention/kvcomp_attn
(enable_hamming_sparse), and variables in vllm_ascend/envs.py. `rl_config`, which later releases document, is absent
there.
"""

ADDITIONAL_CONFIG = frozenset(
    (
        "SLO_limits_for_dynamic_batch", "ascend_compilation_config", "ascend_fusion_config", "ascend_log_path",
        "c8_enable_reshape_optim",
        "dp_allreduce_on_npu", "dump_config", "dump_config_path", "enable_async_exponential",
        "enable_balance_scheduling",
        "enable_cpu_binding", "enable_dsa_cp", "enable_flashcomm1", "enable_flashcomm2_parallel_size",
        "enable_fused_mc2",
        "enable_hamming_sparse", "enable_kv_nz", "enable_matmul_allreduce", "enable_mc2_hierarchy_comm", "enable_mlapo",
        "enable_prefill_mc2", "enable_reduce_sample", "enable_shared_expert_dp", "enable_sleep_mode_extra_cleanup",
        "enable_sparse_li_c8", "enable_sparse_sfa_c8", "enable_transpose_kv_cache_by_block", "eplb_config",
        "finegrained_tp_config",
        "hamming_sparse", "layer_sharding", "mega_moe_max_tokens", "mix_placement", "msmonitor_use_daemon",
        "multistream_dsv4_dsa_overlap", "multistream_overlap_gate", "multistream_overlap_shared_expert",
        "pa_shape_list",
        "profiling_chunk_config", "recompute_scheduler_enable", "refresh", "rejection_sampler_config", "weight_nz_mode",
        "weight_prefetch_config", "xlite_graph_config",
    )
)  # fmt: skip

VARIABLES = frozenset(
    (
        "DYNAMIC_EPLB", "MSMONITOR_USE_DAEMON", "VLLM_ASCEND_BALANCE_SCHEDULING", "VLLM_ASCEND_ENABLE_BATCH_MEMCPY",
        "VLLM_ASCEND_ENABLE_FLASHCOMM1", "VLLM_ASCEND_ENABLE_FUSED_MC2", "VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE",
        "VLLM_ASCEND_ENABLE_MLAPO", "VLLM_ASCEND_ENABLE_NZ", "VLLM_ASCEND_FLASHCOMM2_PARALLEL_SIZE",
        "VLLM_ASCEND_FUSION_OP_TRANSPOSE_KV_CACHE_BY_BLOCK",
    )
)  # fmt: skip
