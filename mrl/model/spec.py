"""What a model is, apart from its weights: sizes, and the list of its tensors under their Hugging Face names."""

from dataclasses import dataclass
from math import prod
from typing import Literal

Kind = Literal[
    "embedding",
    "lm_head",
    "norm",  # of the hidden states: before attention, before the MLP, final
    "qk_norm",
    "q_weight",
    "k_weight",
    "v_weight",
    "q_bias",
    "k_bias",
    "v_bias",
    "attention_out",
    "mlp_gate",
    "mlp_up",
    "mlp_down",
    "router",
    "expert_gate",
    "expert_up",
    "expert_down",
    "shared_gate",
    "shared_up",
    "shared_down",
    "shared_router",  # the scalar gate on the shared expert's output
]


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of one model, under the names that Hugging Face configurations use."""

    family: str  # the configuration's model_type
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    intermediate_size: int  # of dense MLP layers
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    dtype: str  # of the checkpoint, e.g. "bfloat16"
    moe_layers: tuple[int, ...] = ()  # numbers (from 0) of the layers that have experts
    num_experts: int = 0  # 0: a dense model
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0  # 0: no shared expert
    norm_topk_prob: bool = False  # router weights of the chosen experts sum to one

    @property
    def is_moe(self) -> bool:
        return bool(self.moe_layers)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    layer: int | None = None  # from 0; None outside the layers
    expert: int | None = None  # global number, from 0

    @property
    def numel(self) -> int:
        return prod(self.shape)
