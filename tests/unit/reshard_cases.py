"""Random pairs of training and rollout layouts, and the two published models, for the tests of the reshard plan."""

import random
from dataclasses import dataclass
from functools import cache

from test_reshard_source import random_layouts

from mrl.errors import ConfigError
from mrl.model import ModelSpec
from mrl.model.device_grid import DeviceId
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.rotation import Rotation
from mrl.model.vllm_parameters import target_parameters
from mrl.reshard.messages import Topology
from mrl.reshard.plan import ReshardPlan, plan_reshard

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
