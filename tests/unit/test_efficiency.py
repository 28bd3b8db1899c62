"""Switches that make an update faster: what refuses each."""

from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.config.rules import violations
from mrl.model import planning_model_spec

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "parallel_configs"
MOE, DENSE = PRESETS / "qwen3-30b-a3b" / "h100-4x8.yaml", PRESETS / "qwen3-8b" / "h100-1x8.yaml"
A2 = PRESETS / "qwen3-30b-a3b" / "a2-4x8.yaml"
TRANSFORMER = "model.override_transformer_config."
DISPATCHER = TRANSFORMER + "moe_token_dispatcher_type=flex"


def refused(preset: Path, *overrides: str) -> dict[str, str]:
    """Field, without what all have before it -> the rule that it breaks."""
    resolved = load_config(preset, None, overrides)
    model = planning_model_spec(resolved.config.model.path)[0]
    return {v.field.removeprefix(TRANSFORMER): v.rule for v in violations(resolved, model)}


@pytest.mark.parametrize(
    ("preset", "overrides", "field", "said"),
    [
        (A2, [DISPATCHER], "moe_token_dispatcher_type", "alltoall on npu"),
        (MOE, [DISPATCHER, "actor.layout.expert_model_parallel_size=1"], "moe_token_dispatcher_type", "several ranks"),
        (MOE, [TRANSFORMER + "moe_flex_dispatcher_backend=deepep"], "moe_flex_dispatcher_backend", "type: flex"),
        (MOE, [DISPATCHER, TRANSFORMER + "moe_flex_dispatcher_backend=nvshmem"], "moe_flex_dispatcher_backend",
         "unknown"),
        (MOE, [DISPATCHER, TRANSFORMER + "moe_flex_dispatcher_backend=hybridep",
               TRANSFORMER + "moe_enable_deepep=true"], "moe_flex_dispatcher_backend", "must be deepep"),
        (A2, [TRANSFORMER + "moe_router_fusion=true"], "moe_router_fusion", "false on npu"),
        (MOE, [TRANSFORMER + "cuda_graph_impl=local"], "cuda_graph_impl", "must be none"),
        (MOE, [TRANSFORMER + "cuda_graph_scope=[attn]"], "cuda_graph_scope", "left out"),
        (MOE, [TRANSFORMER + "enable_cuda_graph=true"], "enable_cuda_graph", "must be false"),
        (MOE, [TRANSFORMER + "overlap_moe_expert_parallel_comm=true"], "overlap_moe_expert_parallel_comm",
         "must be false"),
    ],
)  # fmt: skip
def test_a_switch_that_would_fail_or_do_nothing_is_refused_before_the_run(preset, overrides, field, said):
    found = refused(preset, *overrides)
    assert said in found[field] and len(found) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        [DISPATCHER, TRANSFORMER + "moe_flex_dispatcher_backend=hybridep"],
        [DISPATCHER, TRANSFORMER + "moe_enable_deepep=true"],
        [TRANSFORMER + "moe_router_fusion=true"],
        [TRANSFORMER + "cuda_graph_impl=none"],
    ],
)
def test_what_the_device_can_do_is_taken(overrides):
    assert refused(MOE, *overrides) == {}


def test_kernels_of_transformer_engine_are_refused_where_there_is_none():
    tiny = PRESETS / "tiny-moe" / "cpu.yaml"
    from test_config_rules import TINY_MODEL

    for name in ("moe_permute_fusion", "moe_router_fusion"):
        found = violations(load_config(tiny, None, [f"{TRANSFORMER}{name}=true"]), TINY_MODEL)
        assert [v.rule for v in found] == ["must be false on cpu"]
