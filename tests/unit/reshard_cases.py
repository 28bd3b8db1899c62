"""Small models of all families, random layouts and pairs of them, and the two published models: for tests of the
reshard plan and of checkpoints.
"""

import random
from dataclasses import dataclass
from functools import cache

import numpy as np

from mrl.errors import ConfigError
from mrl.model import ModelSpec, tensor_specs
from mrl.model.device_grid import DeviceId
from mrl.model.layout import RolloutLayout, TrainLayout, check_train_layout
from mrl.model.megatron_shards import Shard
from mrl.model.rotation import Rotation
from mrl.model.vllm_parameters import target_parameters
from mrl.reshard.messages import Topology
from mrl.reshard.plan import ReshardPlan, plan_reshard

BASE = {
    "num_layers": 4,
    "hidden_size": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 22,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
    "rotation": Rotation(1e4),
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
EXPERTS = {"moe_layers": (0, 1, 2, 3), "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
DELTA = {
    "linear_layers": (0, 2),
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 2,
    "linear_value_head_dim": 3,
    "linear_conv_kernel_dim": 4,
    "attn_output_gate": True,
    "zero_centered_norm": True,
}
MODELS = {
    "qwen2": ModelSpec(**BASE | {"family": "qwen2", "qkv_bias": True, "qk_norm": False, "tie_word_embeddings": True}),
    "qwen3": ModelSpec(**BASE | {"family": "qwen3", "qkv_bias": False, "qk_norm": True}),
    "qwen2_moe": ModelSpec(
        **BASE
        | EXPERTS
        | {"family": "qwen2_moe", "qkv_bias": True, "qk_norm": False, "shared_expert_intermediate_size": 8}
    ),
    "qwen3_moe": ModelSpec(**BASE | EXPERTS | {"family": "qwen3_moe", "qkv_bias": False, "qk_norm": True}),
    "glm4_moe": ModelSpec(
        **BASE
        | EXPERTS
        | {
            "family": "glm4_moe",
            "qkv_bias": True,
            "qk_norm": False,
            "moe_layers": (1, 2, 3),
            "shared_expert_intermediate_size": 8,
        },
        router_score="sigmoid",
    ),
    "deepseek_v3": ModelSpec(
        **BASE
        | EXPERTS
        | {
            "family": "deepseek_v3",
            "qkv_bias": False,
            "qk_norm": False,
            "num_key_value_heads": 8,
            "moe_layers": (1, 2, 3),
            "shared_expert_intermediate_size": 8,
            "q_lora_rank": 6,
            "kv_lora_rank": 10,
            "qk_rope_head_dim": 2,
            "v_head_dim": 3,
        },
        router_score="sigmoid",
    ),
    "qwen3_next": ModelSpec(
        **BASE
        | EXPERTS
        | {"family": "qwen3_next", "qkv_bias": False, "qk_norm": True, "shared_expert_intermediate_size": 8},
        **DELTA,
    ),
    "qwen3_5_text": ModelSpec(
        **BASE | {"family": "qwen3_5_text", "qkv_bias": False, "qk_norm": True, "tie_word_embeddings": True},
        **DELTA,
        linear_by_kind=True,
    ),
    "qwen3_5_moe_text": ModelSpec(
        **BASE
        | EXPERTS
        | {"family": "qwen3_5_moe_text", "qkv_bias": False, "qk_norm": True, "shared_expert_intermediate_size": 8},
        **DELTA,
        linear_by_kind=True,
    ),
    "mixed": ModelSpec(
        **BASE
        | EXPERTS
        | {"family": "qwen3_moe", "qkv_bias": False, "qk_norm": True, "moe_layers": (1, 3), "num_key_value_heads": 8}
    ),
}
# uneven pipelines of four layers, in all notations
PIPELINES = [
    {},
    {"pipeline_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1},
    {
        "pipeline_model_parallel_size": 3,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    },
    {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "pipeline_layers": (0, 2, 1, 1)},
]


def random_layouts(seed: int, count: int) -> list[tuple[ModelSpec, TrainLayout]]:
    """Legal layouts of random models, at most 24 ranks."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        model = rng.choice(list(MODELS.values()))
        tp, cp, ep, etp = (
            rng.choice([1, 2, 4, 8]),
            rng.choice([1, 1, 2]),
            rng.choice([1, 2, 4, 8]),
            rng.choice([1, 2, 3]),
        )
        pipeline = rng.choice(PIPELINES)
        degrees = {
            "tensor_model_parallel_size": tp,
            "context_parallel_size": cp,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": etp,
            **pipeline,
            "world_size": rng.choice([1, 2, 3, 4, 6, 8, 12, 16, 24]),
        }
        if not check_train_layout(degrees, model):
            found.append((model, TrainLayout.build(degrees, model)))
    return found


def tagged(model: ModelSpec) -> dict[str, np.ndarray]:
    """A checkpoint in which every element is a number of its own, so that no mistake can cancel out;
    0 is kept for padding.
    """
    arrays, next_tag = {}, 1
    for t in tensor_specs(model):
        arrays[t.name] = np.arange(next_tag, next_tag + t.numel).reshape(t.shape)
        next_tag += t.numel
    return arrays


def assembled(shard: Shard, hf: dict[str, np.ndarray]) -> np.ndarray:
    local = np.zeros(shard.local_shape, dtype=np.int64)
    for piece in shard.pieces:
        local[piece.local_box.slices] = hf[piece.hf_name][piece.hf_box.slices]
    return local


_QWEN3_MOE = {
    "family": "qwen3_moe", "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rotation": Rotation(1e6), "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "qkv_bias": False, "qk_norm": True,
    "dtype": "bfloat16",
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip
QWEN3_30B = ModelSpec(
    num_layers=48, hidden_size=2048, num_attention_heads=32, intermediate_size=6144, moe_intermediate_size=768,
    moe_layers=tuple(range(48)), **_QWEN3_MOE,
)  # fmt: skip
QWEN3_235B = ModelSpec(
    num_layers=94, hidden_size=4096, num_attention_heads=64, intermediate_size=12288, moe_intermediate_size=1536,
    moe_layers=tuple(range(94)), **_QWEN3_MOE,
)  # fmt: skip
TRAIN_235B = TrainLayout.build(
    {
        "world_size": 128, "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 8,
        "expert_model_parallel_size": 16,
        "num_layers_in_first_pipeline_stage": 11, "num_layers_in_last_pipeline_stage": 11,
    },
    QWEN3_235B,
)  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Arguments of plan_reshard."""

    model: ModelSpec
    train: TrainLayout
    rollout: RolloutLayout
    dialect: str
    dtype: str
    topology: Topology | None
    budget: int

    def plan(self) -> ReshardPlan:
        return plan_reshard(
            self.model, self.train, self.rollout,
            dialect=self.dialect, dtype=self.dtype, topology=self.topology, budget_bytes=self.budget,
        )  # fmt: skip


def bytes_of_a_worker(model: ModelSpec, rollout: RolloutLayout) -> int:
    """R of the lower bounds, by its closed formula, for bf16 Qwen3-MoE: attention, experts, router and norms,
    embedding and head.
    """
    m, t, hidden, wide = model, rollout.tensor, model.hidden_size, model.num_attention_heads * model.head_dim
    layer = 2 * wide // t * hidden + 2 * max(m.num_key_value_heads // t, 1) * m.head_dim * hidden
    layer += 3 * m.num_experts * m.moe_intermediate_size * hidden // rollout.workers_per_engine
    layer += m.num_experts * hidden + 2 * hidden + 2 * m.head_dim
    return 2 * (m.num_layers * layer + 2 * m.vocab_size * hidden // t + hidden)


@cache
def random_pairs(seed: int, count: int) -> tuple[Pair, ...]:
    """Legal pairs: every family, dialect and number format, uneven experts, several engines, all kinds of placement,
    small budgets.
    """
    rng, found = random.Random(seed), []
    while len(found) < count:
        model, train = random_layouts(rng.randrange(1 << 30), 1)[0]
        rollout = random_rollout(rng, model)
        if rollout is not None:
            topology = random_topology(rng, train.world_size, rollout.world_size)
            dialect, dtype = rng.choice(["cpu", "cuda", "npu"]), rng.choice(["float32", "bfloat16"])
            found.append(Pair(model, train, rollout, dialect, dtype, topology, rng.choice([4096, 20_000, 1 << 20])))
    return tuple(found)


def random_rollout(rng: random.Random, model: ModelSpec) -> RolloutLayout | None:
    """A layout that vLLM could have for the model; None when the dice say one that it could not."""
    tensor, data = rng.choice([1, 2, 4, 8]), rng.choice([1, 1, 2, 3])
    expert = tensor * data if model.is_moe and rng.random() < 0.5 else 1
    rollout = RolloutLayout(rng.choice([1, 1, 2, 3]), tensor, data, expert)
    try:
        target_parameters(model, rollout, 0, "cpu", "float32")
    except ConfigError:
        return None
    return rollout


def random_topology(rng: random.Random, ranks: int, workers: int) -> Topology | None:
    """Nothing known; apart on nodes of some size; or on the same devices."""
    kind, per_node = rng.choice(["unknown", "separate", "colocated"]), rng.choice([1, 2, 4, 8])
    if kind == "unknown":
        return None
    first = 0 if kind == "colocated" else ranks
    places = [DeviceId(*divmod(device, per_node)) for device in range(ranks + workers)]
    return Topology(tuple(places[:ranks]), tuple(places[first : first + workers]))
