"""Parameters, gradients and optimizer of a rank: the shapes that the reshard source lists,
padded and sharded as Megatron does.
"""

from math import lcm, prod

import pytest
from test_memory_host import inputs_of

from mrl.model import known_spec, model_spec, parameter_count
from mrl.model.layout import TrainLayout
from mrl.model.megatron_shards import source_shards
from mrl.model.precision import FLOAT32, Precision
from mrl.plan.memory import actor_bytes
from mrl.plan.model_state import stage_state
from mrl.plan.plan_inputs import batch_plan

TP, PP, VPP, CP, EP, ETP = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip
TINY = {
    "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "vocab_size": 61,
    "intermediate_size": 40, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
MODELS = {
    "qwen2 tied": TINY | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": TINY | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen2_moe": TINY | EXPERTS | {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "shared_expert_intermediate_size": 28,
    },
    "qwen3_moe": TINY | EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
    "qwen3_moe, layer 1 dense": TINY | EXPERTS | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "mlp_only_layers": [1],
    },
}  # fmt: skip
LAYOUTS = (
    {"world_size": 1},
    {"world_size": 8, TP: 2},
    {"world_size": 8, PP: 2, CP: 2},
    {"world_size": 8, PP: 2, VPP: 2, TP: 2},
    {"world_size": 24, PP: 2, TP: 2, "pipeline_layers": [1, 3]},
    {"world_size": 8, TP: 4},
)


def expected(model, layout: TrainLayout, rank: int) -> tuple[int, int]:
    """(elements of the buffers, elements of this rank's optimizer shards), from the list of the rank's parameters."""
    whole = sharded = 0
    for is_expert, shards in ((False, layout.data * layout.context), (True, layout.expert_data)):
        sizes = [prod(s.local_shape) for s in source_shards(model, layout, rank) if s.is_expert == is_expert]
        aligned = sum((size + 63) // 64 * 64 for size in sizes)
        end = lcm(shards, 128)
        buffer = (aligned + end - 1) // end * end
        whole, sharded = whole + buffer, sharded + buffer // shards
    return whole, sharded


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_state_is_that_of_the_parameters_on_each_rank(name, degrees):
    model = model_spec(MODELS[name])
    more = ({}, {EP: 2}, {ETP: 2}, {EP: 2, ETP: 2}) if model.is_moe and degrees["world_size"] > 1 else ({},)
    for experts in more:
        layout = TrainLayout.build(degrees | experts, model)
        for rank in range(layout.world_size):
            whole, sharded = expected(model, layout, rank)
            state = stage_state(model, layout, layout.dense_coords(rank).pp)
            assert (state.parameters, state.gradients, state.optimizer) == (2 * whole, 4 * whole, 12 * sharded)


def test_float32_parameters_need_no_master_copy():
    model = model_spec(MODELS["qwen3"])
    layout = TrainLayout.build({"world_size": 1}, model)
    state = stage_state(model, layout, 0, FLOAT32)
    assert state.optimizer == 2 * state.parameters == 2 * state.gradients
    assert Precision(2).master == 4


# bytes per element: on the device the float32 weights and moments of what is not on the host, on the host a copy, its
# gradient and moments
@pytest.mark.parametrize(
    ("precision", "device", "host"),
    [
        (Precision(2, host_share=1.0, keeps_masters=False), 0, 16),
        (Precision(2, host_share=1.0), 4, 16),
        (Precision(2, host_share=0.5, keeps_masters=False), 6, 8),
        (Precision(2, host_share=0.5), 8, 8),
    ],
)
def test_an_adam_on_the_host_has_weights_gradients_and_moments_there(precision, device, host):
    model = model_spec(MODELS["qwen3"])
    layout = TrainLayout.build({"world_size": 1}, model)
    state = stage_state(model, layout, 0, precision)
    assert (2 * state.optimizer, 2 * state.optimizer_host) == (device * state.parameters, host * state.parameters)


@pytest.mark.parametrize(("name", "gigabytes"), [("Qwen3-30B-A3B", 61.06), ("Qwen3-235B-A22B", 470.19)])
def test_a_whole_model_on_one_rank_has_the_published_size(name, gigabytes):
    model = known_spec(name)
    state = stage_state(model, TrainLayout.build({"world_size": 1}, model), 0)
    assert state.parameters / 1e9 == pytest.approx(gigabytes, abs=0.01)
    assert state.parameters == pytest.approx(2 * parameter_count(model), rel=1e-4)
    assert state.optimizer == 6 * state.parameters  # master and two moments in float32


def test_a_plan_has_gradients_in_the_format_that_they_are_summed_in():
    """Of bfloat16 weights 2 bytes an element where grad_reduce_in_fp32 is false, and 4 elsewhere."""
    preset, key = "qwen3-30b-a3b/h100-4x8", "actor.override_ddp_config.grad_reduce_in_fp32"
    planned = {}
    for given in ([], [f"{key}=true"], [f"{key}=false"], [f"{key}=false", "model.dtype=float32"]):
        inputs = inputs_of(preset, *given)
        actor = actor_bytes(inputs, batch_plan(inputs.config, inputs.train), 0)
        planned[str(given)] = actor.gradients / actor.parameters
    assert list(planned.values()) == [2, 2, 1, 1]


def test_an_unsharded_optimizer_is_whole_on_every_rank():
    model = model_spec(MODELS["qwen3_moe"])
    layout = TrainLayout.build({"world_size": 8}, model)
    whole = stage_state(model, layout, 0, shard_optimizer=False).optimizer
    assert stage_state(model, layout, 0).optimizer * 8 == whole
