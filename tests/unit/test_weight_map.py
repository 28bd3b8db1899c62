"""The weight map: the example of its docstring, and that a family is one object which every view follows."""

from dataclasses import replace

import pytest
from reshard_cases import MODELS

from mrl.errors import ConfigError
from mrl.model import FAMILIES, ModelSpec, forward_flops_per_token, parameter_count, tensor_specs
from mrl.model.decoder_weights import attention, dense_layer, expert_layer, gated_mlp, layer_norms
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.megatron_shards import megatron_slice, source_shards
from mrl.model.registry import weight_map
from mrl.model.vllm_parameters import target_parameters, worker_slice
from mrl.model.weight_map import Family, Slice, Weight, WeightMap, copied
from mrl.plan.engine_memory import worker_weights
from mrl.plan.model_state import stage_state

# head size 1: a row of the fused projection is a head
EXAMPLE = replace(MODELS["qwen3"], num_attention_heads=4, num_key_value_heads=2, head_dim=1)


def qkv(model: ModelSpec) -> Weight:
    return next(weight for weight in attention(model) if weight.split == "heads")


def heads(part: Slice) -> str:
    """The rows of a slice by name, e.g. "q0 q1 k0 v0"."""
    rows = {}
    for block in part.blocks:
        letter, (first, _), (start, stop) = (
            block.part.name.split(".")[1][0],
            block.hf_box.ranges[0],
            block.local_box.ranges[0],
        )
        rows |= {row: f"{letter}{first + row - start}" for row in range(start, stop)}
    return " ".join(rows[row] for row in range(part.shape[0]))


@pytest.mark.parametrize(
    ("ranks", "megatron", "vllm"),
    [
        (1, ["q0 q1 k0 v0 q2 q3 k1 v1"], ["q0 q1 q2 q3 k0 k1 v0 v1"]),
        (2, ["q0 q1 k0 v0", "q2 q3 k1 v1"], ["q0 q1 k0 v0", "q2 q3 k1 v1"]),
        (4, ["q0 q1", "k0 v0", "q2 q3", "k1 v1"], ["q0 k0 v0", "q1 k0 v0", "q2 k1 v1", "q3 k1 v1"]),
    ],
)
def test_the_example_of_the_docstring(ranks, megatron, vllm):
    weight = qkv(EXAMPLE)
    assert [heads(megatron_slice(weight, ranks, 1, index)) for index in range(ranks)] == megatron
    assert [heads(worker_slice(weight, ranks, index)) for index in range(ranks)] == vllm


@pytest.mark.parametrize(
    ("ranks", "megatron", "vllm"),
    [
        (1, ["q0 q2 q1 q3 k0 v0 q4 q6 q5 q7 k1 v1"], ["q0 q1 q2 q3 q4 q5 q6 q7 k0 k1 v0 v1"]),
        (2, ["q0 q2 q1 q3 k0 v0", "q4 q6 q5 q7 k1 v1"], ["q0 q1 q2 q3 k0 v0", "q4 q5 q6 q7 k1 v1"]),
    ],
)
def test_a_gate_stands_behind_its_query_and_in_megatron_behind_the_queries_of_its_group(ranks, megatron, vllm):
    """Odd rows of the projection are gates."""
    weight = qkv(replace(EXAMPLE, attn_output_gate=True))
    assert [heads(megatron_slice(weight, ranks, 1, index)) for index in range(ranks)] == megatron
    assert [heads(worker_slice(weight, ranks, index)) for index in range(ranks)] == vllm


@pytest.mark.parametrize("name", MODELS)
def test_each_side_has_every_weight_of_a_layer_under_a_name_of_its_own(name):
    for layer, _ in weight_map(MODELS[name]).layers:
        assert set(layer.hf) == set(layer.megatron)
        parts = [part for weight in layer.hf for part in weight.parts]
        in_vllm = [part for weight in layer.vllm for part in weight.parts]
        assert set(parts) == set(in_vllm) and len(parts) == len(in_vllm) == len(set(parts))
        assert len({weight.megatron for weight in layer.hf}) == len(layer.hf)
        names_in_vllm = [weight.vllm for weight in layer.vllm]  # rows of one name are one parameter
        assert len(set(names_in_vllm)) == len(names_in_vllm) and set(names_in_vllm) == {w.vllm for w in layer.hf}


def test_a_model_type_of_no_family_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"model_type = 'granite' is not supported\..* Supported are Qwen2 to Qwen3\.6",
    ):
        weight_map(replace(MODELS["qwen3"], family="granite"))


def test_a_weight_that_an_order_leaves_out_is_a_mistake_of_the_family():
    model = MODELS["qwen3"]
    with pytest.raises(ValueError, match=r"mlp\.gate_proj\.weight has no place in the order"):
        WeightMap.of(
            model,
            replace(FAMILIES["Qwen3ForCausalLM"], vllm_order=("self_attn.", "input_layernorm.", "post_attention")),
        )


def with_shared_experts(m: ModelSpec) -> tuple[Weight, ...]:
    """Shared experts under another name than Qwen's and without a gate on their output."""
    return expert_layer(
        m, gated_mlp(m, m.shared_expert_intermediate_size, "mlp.shared_experts.", "mlp.shared_experts.")
    )


def with_norms_behind(m: ModelSpec) -> tuple[Weight, ...]:
    """Two norms more, as in layers that also normalise what a block gives."""
    extra = [copied(f"post_{x}_norm.weight", (m.hidden_size,), f"post_{x}_norm.weight") for x in ("attention", "mlp")]
    return (
        *layer_norms(m, "mlp.linear_fc1.layer_norm_weight"),
        *extra,
        *attention(m),
        *gated_mlp(m, m.intermediate_size),
    )


SHARED = Family("SharedForCausalLM", "shared", dict, dense_layer, with_shared_experts)
NORMS = Family(
    "NormsForCausalLM",
    "norms",
    dict,
    with_norms_behind,
    megatron_order=(
        "input_layernorm.",
        "self_attn.",
        "post_attention_norm.",
        "post_attention_layernorm.",
        "mlp.",
        "post_mlp_norm.",
    ),
    vllm_order=("self_attn.", "mlp.", ""),
)


@pytest.fixture
def new_families(monkeypatch):
    for family in (SHARED, NORMS):
        monkeypatch.setitem(FAMILIES, family.architecture, family)
    yield
    weight_map.cache_clear()
    tensor_specs.cache_clear()


def test_every_view_follows_a_new_familys_rows(new_families):
    model = replace(MODELS["qwen2_moe"], family="shared", moe_layers=(1, 2, 3))  # the first layer is dense
    gated = parameter_count(MODELS["qwen2_moe"]) - parameter_count(replace(MODELS["qwen2_moe"], family="shared"))
    assert gated == 4 * model.hidden_size  # the four scalar gates
    names = {spec.name for spec in tensor_specs(model)}
    assert "model.layers.1.mlp.shared_experts.up_proj.weight" in names and not any(
        "shared_expert_gate" in name for name in names
    )
    assert parameter_count(model) == sum(spec.numel for spec in tensor_specs(model))
    layout = TrainLayout.build({"world_size": 2, "tensor_model_parallel_size": 2}, model)
    shards = {shard.megatron_name: shard for shard in source_shards(model, layout, 0)}
    assert shards["decoder.layers.1.mlp.shared_experts.linear_fc1.weight"].local_shape == (8, 8)
    assert (
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in shards
        and "decoder.layers.1.pre_mlp_layernorm.weight" in shards
    )
    parameters = {p.name: p for p in target_parameters(model, RolloutLayout(1, 2), 0, "cuda", "bfloat16")}
    assert parameters["model.layers.1.mlp.shared_experts.gate_up_proj.weight"].local_shape == (8, 8)


def test_weights_that_no_other_family_has_count_everywhere(new_families):
    plain, model = MODELS["qwen3"], replace(MODELS["qwen3"], family="norms")
    more = 2 * model.num_layers * model.hidden_size
    assert parameter_count(model) - parameter_count(plain) == more
    assert worker_weights(model, RolloutLayout()) - worker_weights(plain, RolloutLayout()) == more
    assert forward_flops_per_token(model, 3) == forward_flops_per_token(plain, 3)  # a norm is no matrix product
    layout = TrainLayout.build({"world_size": 1}, model)
    assert stage_state(model, layout, 0).parameters > stage_state(plain, layout, 0).parameters
    names = [shard.megatron_name.removeprefix("decoder.layers.0.") for shard in source_shards(model, layout, 0)]
    assert names.index("post_attention_norm.weight") == names.index("self_attention.linear_proj.weight") + 1
    assert names.index("post_mlp_norm.weight") == names.index("mlp.linear_fc2.weight") + 1
