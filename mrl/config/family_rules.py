"""Rules of rotations, of latent attention (DeepSeek-V3 and its relatives), and of hybrids of gated delta and gated
attention.

They say what devices and engines cannot do with such families.
"""

from collections.abc import Callable

from mrl.config.rule_row import RuleRow
from mrl.config.schema import RunConfig, leaf
from mrl.errors import nearest
from mrl.model import ModelSpec
from mrl.model.registry import family_of
from mrl.model.rotation import DEFAULT
from mrl.platforms.versions import row_of, vllm_generation, vllm_package

_VLLM = "rollout.engine_kwargs.vllm"
_KERNEL = (512, 64)  # latent size and rotary size that vLLM's CPU kernel is compiled for
_GENERATION = (0, 32)


def _latent(broken: Callable[[RunConfig, ModelSpec], bool]) -> Callable[[RunConfig, ModelSpec], bool]:
    return lambda config, model: model.is_latent and broken(config, model)


def on_device(config: RunConfig, device: str) -> bool:
    """Whether a run is for that device. False where its device is not known."""
    return leaf(config, "cluster.device") == device


def engine_is_old(config: RunConfig, _: ModelSpec) -> bool:
    """Whether engines are too old for the weight sync of latent and gated delta attention."""
    if leaf(config, "cluster.device") not in ("cpu", "cuda"):
        return False
    _, version = vllm_package(row_of(config.cluster.device).packages | config.cluster.versions)
    generation = vllm_generation(version)
    return generation is not None and generation.release != _GENERATION


def replicates_shared_experts(config: RunConfig) -> bool:
    """Whether vLLM holds shared experts whole on every worker of an engine, and cuts their tokens."""
    rollout = config.rollout
    degrees = (rollout.tensor_model_parallel_size, rollout.data_parallel_size, rollout.expert_parallel_size)
    return min(degrees) > 1


_OVERRIDES = "model.override_transformer_config"
ROTATION_RULES = (
    RuleRow(
        "cluster.device",
        lambda c, m: not m.is_latent and m.rotation.kind != DEFAULT and on_device(c, "npu"),
        "must be cuda or cpu for rope_type {m.rotation.kind}",
        "MindSpeed's and vllm-ascend's rotations were never compared with it",
        ("cuda", "cpu"),
    ),
    *(
        RuleRow(
            f"{_OVERRIDES}.{name}",
            lambda c, m, name=name: (
                not m.is_latent and m.rotation.magnitude != 1.0 and c.model.override_transformer_config.get(name)
            ),
            "must be false with rope_type {m.rotation.kind}",
            "the fused kernel would not multiply queries and keys by its magnitude, {m.rotation.magnitude:.4f}",
            (False,),
        )
        for name in ("apply_rope_fusion", "fused_single_qkv_rope")
    ),
)


def cuts_context(model: ModelSpec, device: str) -> bool:
    """Tells whether there are kernels of context parallelism for a model's attention on a kind of device."""
    return device == "cpu" or not (model.attention_sinks or model.is_latent)


def _cuts_in_vain(config: RunConfig, model: ModelSpec) -> bool:
    cut = config.actor.layout.context_parallel_size > 1
    return cut and not cuts_context(model, config.cluster.device)


SINK_RULES = (
    RuleRow(
        "cluster.device",
        lambda c, m: m.attention_sinks and on_device(c, "npu"),
        "must be cuda or cpu for attention with sinks",
        "vllm-ascend's kernels for it, and for experts with biases, were never tried",
        ("cuda", "cpu"),
    ),
    RuleRow(
        "cluster.versions",
        lambda c, m: m.attention_sinks and engine_is_old(c, m),
        "attention with sinks needs vLLM 0.32",
        "the weight sync knows its parameters as that release has them",
    ),
    RuleRow(
        "reshard.path",
        lambda c, m: m.attention_sinks and c.reshard.path == "slow",
        "must be fast for attention with sinks",
        "vLLM's loader copies sinks without the call by which its reload would notice them, and keeps the old ones",
        ("fast",),
    ),
    RuleRow(
        "actor.layout.context_parallel_size",
        lambda c, m: m.attention_sinks and _cuts_in_vain(c, m),
        "must be 1 for attention with sinks outside cpu",
        "no kernel of Transformer Engine 2.11 has sinks in a pack, and torch's would need a mask of all tokens of a "
        "sequence by all of its tokens",
        (1,),
    ),
    *(
        RuleRow(
            f"{_OVERRIDES}.{name}",
            lambda c, m, name=name, wanted=wanted: (
                m.clamped_experts and c.model.override_transformer_config.get(name, wanted) != wanted
            ),
            f"must be {str(wanted).lower()} for experts with biases and a clamp",
            why,
            (wanted,),
        )
        for name, wanted, why in (
            ("bias_activation_fusion", False, "the fused kernel takes gate and up as halves"),
            ("use_te_activation_func", True, "it is how Megatron calls the product of gate and up"),
            ("bias_dropout_fusion", False, "Megatron refuses it beside experts with biases"),
        )
    ),
)

# families that vLLM's CPU build cannot generate with -> why
NOT_ON_CPU = {"minimax_m2": "vLLM's CPU router chooses by a sigmoid among groups of experts alone, and it has none"}

LATENT_RULES = (
    RuleRow(
        "cluster.device",
        lambda c, m: m.family in NOT_ON_CPU and on_device(c, "cpu"),
        f"cannot be cpu for the family {' or '.join(NOT_ON_CPU)}",
        "vLLM's CPU router chooses by a sigmoid among groups of experts alone, and this family has none",
        ("cuda",),
    ),
    RuleRow(
        f"{_VLLM}.load_format",
        lambda c, m: m.loads_by_sync and "load_format" in c.rollout.vllm_kwargs,
        "must be left out for a checkpoint in FP8 or with a vision tower",
        "its engines get the trained weights in the first sync, and vLLM would load another model",
    ),
    RuleRow(
        "cluster.device",
        _latent(lambda c, m: on_device(c, "npu")),
        "must be cuda or cpu for latent attention",
        "vllm-ascend stores its projections in a form that the weight sync does not know",
        ("cuda", "cpu"),
    ),
    RuleRow(
        "cluster.versions",
        _latent(engine_is_old),
        "latent attention needs vLLM 0.32",
        "older engines keep copies for decoding that a sync would leave as they were",
    ),
    RuleRow(
        "actor.layout.context_parallel_size",
        _latent(_cuts_in_vain),
        "must be 1 with latent attention outside cpu",
        "values are narrower than keys, which Transformer Engine's kernels for context parallelism were never tried "
        "with in a pack",
        (1,),
    ),
    RuleRow(
        f"{_OVERRIDES}.apply_rope_fusion",
        lambda c, m: (
            m.is_latent and m.rotation.kind == DEFAULT and c.model.override_transformer_config.get("apply_rope_fusion")
        ),
        "must be false for latent attention without yarn",
        "Megatron refuses to build it: its fused rotation of latent attention knows yarn alone",
        (False,),
    ),
    RuleRow(
        "rollout.data_parallel_size",
        _latent(lambda c, m: m.family == "deepseek_v3" and replicates_shared_experts(c)),
        "must be 1 with tensor_model_parallel_size and expert_parallel_size above 1 for this model",
        "vLLM then has shared experts whole on every worker, and the plan of the weight sync has them cut",
        (1,),
    ),
    RuleRow(
        f"{_VLLM}.hf_overrides",
        lambda c, m: bool(family_of(m).engine_keys(m) and c.rollout.vllm_kwargs.get("hf_overrides")),
        "must be left out for this model",
        "mrl itself sets there what config.json may lack for vLLM's class, or that only the text model is used",
    ),
    RuleRow(
        f"{_VLLM}.attention_backend",
        lambda c, m: m.family == "hy_v3" and c.rollout.vllm_kwargs.get("attention_backend") == "HPC_ATTN",
        "cannot be HPC_ATTN for this model",
        "vLLM then has norms of queries and keys in float32, and the plan of the weight sync has them in rollout.dtype",
    ),
    RuleRow(
        f"{_VLLM}.attention_backend",
        _latent(
            lambda c, m: on_device(c, "cpu") and c.rollout.vllm_kwargs.get("attention_backend", "CPU_MLA") != "CPU_MLA"
        ),
        "must be CPU_MLA or left out for latent attention on cpu",
        "the other kernel keeps weights in a form of its own, which cannot be read back after a sync",
        ("CPU_MLA",),
    ),
    RuleRow(
        "model.path",
        _latent(lambda c, m: on_device(c, "cpu") and (m.kv_lora_rank, m.qk_rope_head_dim) != _KERNEL),
        "has kv_lora_rank = {m.kv_lora_rank} and qk_rope_head_dim = {m.qk_rope_head_dim}, which must be 512 and 64 on "
        "cpu",
        "vLLM's CPU kernel of latent attention is compiled for no other sizes",
    ),
    RuleRow(
        "rollout.enable_prefix_caching",
        _latent(lambda c, m: on_device(c, "cpu") and c.rollout.enable_prefix_caching),
        "must be false for latent attention on cpu",
        "vLLM's CPU kernel of it has no prefix cache, and vLLM switches it off by itself",
        (False,),
    ),
)


def _hybrid(broken: Callable[[RunConfig, ModelSpec], bool]) -> Callable[[RunConfig, ModelSpec], bool]:
    return lambda config, model: model.is_hybrid and broken(config, model)


def _dividing(config: RunConfig, model: ModelSpec) -> tuple[int, ...]:
    heads = model.linear_num_key_heads
    return nearest(config.rollout.tensor_model_parallel_size, heads, lambda v: heads % v == 0)


HYBRID_RULES = (
    RuleRow(
        "cluster.device",
        lambda c, m: m.is_wrapped and not m.is_hybrid and on_device(c, "npu"),
        "must be cuda or cpu for the text part of a model that reads images",
        "vLLM's class of it is mrl's own (mrl/engine/inner_texts.py), which was made for vLLM 0.32",
        ("cuda", "cpu"),
    ),
    RuleRow(
        "cluster.versions",
        lambda c, m: m.is_wrapped and not m.is_hybrid and engine_is_old(c, m),
        "the text part of a model that reads images needs vLLM 0.32",
        "vLLM's class of it is mrl's own (mrl/engine/inner_texts.py), which was made for that release",
    ),
    RuleRow(
        "cluster.device",
        _hybrid(lambda c, m: on_device(c, "npu")),
        "must be cuda or cpu for gated delta attention",
        "vllm-ascend has its own layers for it, which the weight sync does not know",
        ("cuda", "cpu"),
    ),
    RuleRow(
        "cluster.versions",
        _hybrid(engine_is_old),
        "gated delta attention needs vLLM 0.32",
        "the weight sync knows its parameters as that release has them",
    ),
    RuleRow(
        "rollout.tensor_model_parallel_size",
        _hybrid(lambda c, m: m.linear_num_key_heads % c.rollout.tensor_model_parallel_size != 0),
        "must divide linear_num_key_heads = {m.linear_num_key_heads}",
        "each worker has whole heads of gated delta attention with their states",
        _dividing,
    ),
    RuleRow(
        "rollout.data_parallel_size",
        _hybrid(lambda c, m: replicates_shared_experts(c)),
        "must be 1 with tensor_model_parallel_size and expert_parallel_size above 1 for this model",
        "vLLM then has shared experts whole on every worker, and the plan of the weight sync has them cut",
        (1,),
    ),
    RuleRow(
        "rollout.dtype",
        _hybrid(lambda c, m: on_device(c, "cpu") and c.rollout_dtype != "float32"),
        "must be float32 for gated delta attention on cpu",
        "mrl computes it there in the place of vLLM's kernel, in float32 alone",
        ("float32",),
    ),
    *(
        RuleRow(
            f"{_VLLM}.{name}",
            _hybrid(lambda c, m, name=name: name in c.rollout.vllm_kwargs),
            "must be left out for gated delta attention",
            "the plan counts its states in the engine's dtype",
        )
        for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype")
    ),
    RuleRow(
        "rollout.enable_prefix_caching",
        _hybrid(lambda c, m: c.rollout.enable_prefix_caching),
        "must be false for gated delta attention",
        "vLLM keeps the state only at the ends of blocks, which was never tried here",
        (False,),
    ),
    RuleRow(
        "actor.router_replay",
        _hybrid(lambda c, m: c.actor.router_replay == "R3" and not on_device(c, "cpu")),
        "cannot be R3 for gated delta attention outside cpu",
        "vLLM keeps routes by the blocks of its prefix cache, which such models run without",
        ("disabled", "R2"),
    ),
)
