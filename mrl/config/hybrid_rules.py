"""Rules of hybrids of gated delta and gated attention (Qwen3-Next): what devices and engines cannot do with them."""

from collections.abc import Callable

from mrl.config.latent_rules import engine_is_old, on_device, replicates_shared_experts
from mrl.config.rule_row import RuleRow
from mrl.config.schema import RunConfig
from mrl.errors import nearest
from mrl.model import ModelSpec


def _hybrid(broken: Callable[[RunConfig, ModelSpec], bool]) -> Callable[[RunConfig, ModelSpec], bool]:
    return lambda config, model: model.is_hybrid and broken(config, model)


def _divided(config: RunConfig, model: ModelSpec) -> bool:
    return model.linear_num_key_heads % config.rollout.tensor_model_parallel_size == 0


def _dividing(config: RunConfig, model: ModelSpec) -> tuple[int, ...]:
    heads = model.linear_num_key_heads
    return nearest(config.rollout.tensor_model_parallel_size, heads, lambda v: heads % v == 0)


HYBRID_RULES = (
    RuleRow(
        "cluster.device",
        _hybrid(lambda c, m: on_device(c, "npu")),
        "must be cuda or cpu for gated delta attention",
        "vllm-ascend has layers of its own for it, which no dialect describes",
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
        _hybrid(lambda c, m: not _divided(c, m)),
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
            f"rollout.engine_kwargs.vllm.{name}",
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
        "a prefix is found by its keys, and vLLM keeps a state of it only at the ends of blocks, in a mode that was "
        "never tried here",
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
