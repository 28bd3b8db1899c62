"""Activation terms by hand on small numbers, the schedule's micro-batches in flight,
and what must not change whatever the sizes.
"""

from dataclasses import replace

import pytest
from test_memory_host import inputs_of

from mrl.model import known_spec, model_spec
from mrl.model.adapters import MERGED_BYTES, Lora
from mrl.model.hf_config import LayerKind
from mrl.model.layout import TrainLayout
from mrl.plan.activations import Activations, MicroBatchShape, Recompute, in_flight
from mrl.plan.memory import actor_bytes
from mrl.plan.model_state import largest_parameter
from mrl.plan.plan_inputs import batch_plan

TP, PP, VPP, CP, EP, ETP = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip
DENSE = model_spec(
    {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 100, "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 1000, "intermediate_size": 300,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    }
)  # fmt: skip
MICRO = MicroBatchShape(rows=2, length=16, response=8)
BIG = MicroBatchShape(1, 8192, 6144)


def activations(model, micro=MICRO, **degrees) -> Activations:
    dense = degrees.get(TP, 1) * degrees.get(PP, 1) * degrees.get(CP, 1)
    sparse = degrees.get(ETP, 1) * degrees.get(EP, 1) * degrees.get(PP, 1)
    world = degrees.pop("world_size", dense * sparse)
    return Activations(model, TrainLayout.build({"world_size": world} | degrees, model), micro)


def test_a_dense_layer_by_hand():
    """32 tokens, hidden 100, 4 query and 2 key/value heads of 10, MLP 300, bf16 with fused kernels."""
    terms = activations(DENSE).layer(LayerKind(False))
    # input and scale, then what the projection reads
    assert terms["attention norm"] == 32 * (100 * 2 + 4) + 32 * 100 * 2
    projection, norms, rotary = 32 * 80 * 2, 32 * (60 * 2 + 6 * 4), 4 * 32 * 10 * 2
    assert terms["query, key, value"] == projection + norms + rotary
    assert terms["core attention"] == 32 * (40 + 20 + 40) * 2  # rotated queries and keys, output
    assert terms["attention internals"] == 32 * 4 * 4  # of flash attention, one float32 a head and token
    assert terms["mlp"] == 32 * (600 + 300) * 2  # gate and up, then the product


def test_an_expert_layer_by_hand():
    """8,192 tokens of the 30B model on TP4 with sequence parallelism and EP8: 2,048 tokens a rank,
    each to 8 experts.
    """
    terms = activations(known_spec("Qwen3-30B-A3B"), BIG, world_size=8, **{TP: 4, EP: 8}).layer(LayerKind(True))
    assert terms["expert input"] == 2048 * 8 * 2048 * 2
    assert terms["expert projection"] == 2048 * 8 * 2 * 768 * 2
    assert terms["expert activation"] == 2048 * 8 * 768 * 2
    assert terms["expert probabilities"] == 2048 * 8 * 4
    assert terms["router"] == 2048 * 8 * (8 + 4)
    assert terms["dispatch"] == 2048 * (128 * 5 + 8 * 8)
    assert terms["shared experts"] == 0


def test_slices_of_an_expert_all_see_its_tokens():
    whole, sliced = (activations(known_spec("Qwen3-30B-A3B"), BIG, world_size=8, **{EP: 2, ETP: etp}) for etp in (1, 2))
    assert sliced.layer(LayerKind(True))["expert input"] == 2 * whole.layer(LayerKind(True))["expert input"]
    assert sliced.expert_tokens == 2 * whole.expert_tokens


@pytest.mark.parametrize(
    ("degrees", "stage", "micro_batches", "chunks"),
    [
        ({PP: 4}, 0, 8, [0, 0, 0, 0]),
        ({PP: 4}, 3, 8, [0]),
        ({PP: 4}, 0, 2, [0, 0]),  # no more than there are
        ({PP: 2, VPP: 2}, 0, 4, [0, 0, 1, 1, 0]),  # 2 x 1 + 1 x 2 passes of warm-up, and one more
        ({PP: 2, VPP: 2}, 1, 4, [0, 0, 1]),
        ({}, 0, 8, [0]),
    ],
)
def test_micro_batches_in_flight_are_those_of_the_schedule(degrees, stage, micro_batches, chunks):
    layout = TrainLayout.build({"world_size": degrees.get(PP, 1)} | degrees, DENSE)
    counts = [chunks.count(chunk) for chunk in range(layout.virtual_pipeline)]
    assert in_flight(layout, stage, micro_batches) == counts


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Qwen3-8B"])
def test_recomputing_more_keeps_less(name):
    none = activations(known_spec(name), BIG)
    selective = replace(none, recompute=Recompute("selective"))
    most = replace(none, recompute=Recompute("selective", modules=("core_attn", "mlp", "moe")))
    full = replace(none, recompute=Recompute("full"))
    kept = [a.chunk((LayerKind(a.model.is_moe),) * a.model.num_layers)[0] for a in (none, selective, most, full)]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 4
    assert kept[-1] == none.model.num_layers * 8192 * none.model.hidden_size * 2  # the input of every layer


def test_norms_are_computed_again_where_they_are_no_part_of_a_projection():
    """Megatron's own condition; those of dense layers are. Of a norm its input alone is kept then."""

    def spared(name: str) -> int:
        none = activations(known_spec(name), BIG)
        norms = replace(none, recompute=Recompute("selective", modules=("layernorm",)))
        kinds = (LayerKind(none.model.is_moe),)
        return none.chunk(kinds)[0] - norms.chunk(kinds)[0]

    assert spared("Qwen3-8B") == 0
    assert spared("Qwen3-30B-A3B") == 8192 * (known_spec("Qwen3-30B-A3B").hidden_size * 2 + 4)


def test_recomputing_in_larger_groups_keeps_fewer_inputs_and_brings_more_back():
    one, four = (replace(activations(DENSE), recompute=Recompute("full", num_layers=n)) for n in (1, 4))
    assert one.chunk((LayerKind(False),) * 8)[0] == 4 * four.chunk((LayerKind(False),) * 8)[0]
    assert four.chunk((LayerKind(False),) * 8)[1] == 4 * one.chunk((LayerKind(False),) * 8)[1] > 0


def test_a_plan_holds_the_inputs_of_layers_of_all_micro_batches_in_flight():
    """With full recomputation a layer leaves its input of 2 bytes an element (Korthikanti et al., arXiv:2205.05198,
    section 5). Stage p of 4 has 4 - p micro-batches in flight under 1F1B (Narayanan et al., arXiv:2104.04473).
    """
    full = "{recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"
    given = ("actor.layout.pipeline_model_parallel_size=4", f"model.override_transformer_config={full}")
    inputs = inputs_of("qwen3-30b-a3b/h100-4x8", *given)
    batch = batch_plan(inputs.config, inputs.train)
    second, third = (actor_bytes(inputs, batch, pp).activations for pp in (1, 2))
    assert second - third == 12 * 10240 * 2048 * 2  # layers of a stage, tokens of a micro-batch, hidden


@pytest.mark.parametrize("axis", [TP, CP])
def test_cutting_the_sequence_over_ranks_divides_a_layer(axis):
    model = known_spec("Qwen3-30B-A3B")
    whole, halved = activations(model, BIG), activations(model, BIG, **{axis: 2})
    ratio = sum(whole.layer(LayerKind(True)).values()) / sum(halved.layer(LayerKind(True)).values())
    assert ratio == pytest.approx(2, rel=0.01)
    assert halved.embedding() <= whole.embedding() * (9 / 8 if axis == TP else 1 / 2)


def test_the_fused_kernels_keep_less_than_plain_torch():
    fused = activations(known_spec("Qwen3-30B-A3B"), BIG)
    plain = replace(fused, kernels="torch")
    terms = fused.layer(LayerKind(True))
    assert all(terms[name] <= size for name, size in plain.layer(LayerKind(True)).items())
    assert sum(terms.values()) < 0.8 * sum(plain.layer(LayerKind(True)).values())


def test_with_more_tensor_ranks_than_key_value_heads_each_gathers_the_whole_projection():
    model = known_spec("Qwen3-30B-A3B")  # 32 query heads, 4 key/value heads of 128
    four, eight = (
        activations(model, BIG, world_size=8, **{TP: tp}).layer(LayerKind(True))["query, key, value"] for tp in (4, 8)
    )
    gathered = 8192 * 40 * 128 * 2
    assert eight > gathered > four


def test_the_last_stage_keeps_hidden_states_of_predicted_tokens_and_no_logits():
    both = activations(known_spec("Qwen3-8B"), BIG, **{PP: 2})  # hidden 4,096
    assert both.head() == 8192 * (4096 * 2 + 4) + 6144 * (4096 * 2 + 78)
    assert both.head() < 8192 * 151936 * 2 / 10


def test_logits_are_alive_a_chunk_at_a_time():
    both = activations(known_spec("Qwen3-8B"), BIG, **{PP: 2})
    tokens = 256 * 1024**2 // (4 * 151936)  # of one chunk: 441
    chunks = tokens * 151936 * (4 + 4 + 2)
    assert both.head_temporaries() == chunks + (2 * 8192 + 6144) * 4096 * 2 + 151936 * 4096 * 2
    sixteen = replace(both, gradient_bytes=2)  # the weight's gradient is summed in float32 beside the buffers
    assert sixteen.head_temporaries() == both.head_temporaries() + 151936 * 4096 * 4
    few = replace(both, micro=MicroBatchShape(1, 64, 10))
    assert few.head_temporaries() < both.head_temporaries() - 200 * 151936 * 10


def test_plain_attention_orders_its_outputs_and_under_context_parallelism_gathers_keys_and_values():
    """32 tokens in 2 sequences of 16, 4 query and 2 key/value heads of 10, bf16."""
    one, two = (replace(activations(DENSE, **degrees), kernels="torch") for degrees in ({}, {CP: 2}))
    # outputs, and a copy of the values
    assert one.layer(LayerKind(False))["attention internals"] == 32 * 4 * 4 + 32 * 40 * 2 + 32 * 20 * 2
    mask = 8 * 16 * 2  # own positions x all positions of a sequence; the two are alike and share it
    assert (
        two.layer(LayerKind(False))["attention internals"]
        == 16 * 4 * 4 + 16 * 40 * 2 + (2 * 32 - 16) * 20 * 2 + mask + 2 * 32 * 8
    )


def test_plain_attention_counts_the_pads_of_short_sequences():
    """2 sequences of 20 tokens are padded to 24 each: queries, keys, values, outputs and their sums,
    but not the ordered outputs.
    """
    layer = replace(activations(DENSE), kernels="torch", micro=replace(MICRO, length=20)).layer(LayerKind(False))
    assert layer["core attention"] == (48 * (40 + 20) + 40 * 40) * 2
    assert layer["attention internals"] == 48 * 4 * 4 + (48 * 40 + 48 * 20) * 2


def test_padded_rows_share_their_rotary_factors():
    packed, padded = (
        activations(DENSE, replace(MICRO, packed=packed)).layer(LayerKind(False))["query, key, value"]
        for packed in (True, False)
    )
    assert packed - padded == 4 * (32 - 16) * 10 * 2


def test_an_activation_that_is_made_again_keeps_what_it_is_made_from():
    """moe_act of Megatron (core/transformer/moe/experts.py): of a gated expert's 3 widths the first 2 stay."""
    model = known_spec("Qwen3-30B-A3B")
    none = activations(model, BIG)
    again = replace(none, recompute=Recompute("selective", modules=("moe_act",)))
    routed = 8192 * model.num_experts_per_tok
    dropped = none.chunk((LayerKind(True),))[0] - again.chunk((LayerKind(True),))[0]
    assert dropped == routed * model.moe_intermediate_size * 2


def with_adapters(kept: Activations, *targets: str, **more) -> Activations:
    return replace(kept, lora=Lora.of(4, 8.0, targets), **more)


def test_adapters_of_a_dense_layer_by_hand():
    """32 tokens, rank 4: A x, the factors A of what shares x, the norm again; o_proj and down_proj by themselves."""
    plain = activations(DENSE)
    kept = with_adapters(plain, "all-linear").layer(LayerKind(False))
    assert "attention adapters" not in plain.layer(LayerKind(False))
    again, alone = 32 * (100 * 2 + 4), 32 * 4 * 2
    assert kept["attention adapters"] == (32 * 12 + 12 * 100) * 2 + again + alone
    assert kept["mlp adapters"] == (32 * 8 + 8 * 100) * 2 + again + alone
    few = with_adapters(plain, "q_proj").layer(LayerKind(False))
    assert few["attention adapters"] == 32 * 4 * 2 + again and few["mlp adapters"] == 0


def test_adapters_of_experts_by_hand():
    """16,384 rows of a rank's 16 experts, each with factors A of its own; they are sent again with their experts."""
    kept = with_adapters(activations(known_spec("Qwen3-30B-A3B"), BIG, world_size=8, **{TP: 4, EP: 8}), "all-linear")
    terms, rows = kept.layer(LayerKind(True)), 2048 * 8
    assert terms["expert adapters"] == (rows * 8 + 16 * 8 * 2048) * 2 + rows * 4 * 2
    again = replace(kept, recompute=Recompute("selective", modules=("moe",))).chunk((LayerKind(True),))
    plain = replace(kept, lora=None, recompute=Recompute("selective", modules=("moe",))).chunk((LayerKind(True),))
    assert again[0] - plain[0] == terms["attention adapters"]


@pytest.mark.parametrize(("kernels", "mask"), [("transformer_engine", 1), ("torch", 2)])
def test_dropout_keeps_a_mask_and_what_it_leaves_of_each_input(kernels, mask):
    plain = with_adapters(replace(activations(DENSE), kernels=kernels), "all-linear")
    more = {
        name: size - plain.layer(LayerKind(False))[name]
        for name, size in replace(plain, dropout=True).layer(LayerKind(False)).items()
    }
    assert more["attention adapters"] == 32 * (100 + 40) * (2 + mask)
    assert more["mlp adapters"] == 32 * (100 + 300) * (2 + mask)
    assert sum(more.values()) == more["attention adapters"] + more["mlp adapters"]


@pytest.mark.parametrize("path", ["fast", "slow"])
def test_a_sync_of_adapters_holds_what_it_makes_of_one_block_or_tensor_and_no_more(path):
    given = [f"reshard.path={path}"]
    staging = {}
    for lora in ([], ["actor.lora.rank=8"]):
        inputs = inputs_of("qwen3-30b-a3b/h100-4x8", *given, *lora)
        staging[len(lora)] = actor_bytes(inputs, batch_plan(inputs.config, inputs.train), 0).sync_staging
    own = largest_parameter(inputs.model, inputs.train, 0) * 2
    assert staging[1] - staging[0] == {"fast": MERGED_BYTES, "slow": own + MERGED_BYTES}[path]
