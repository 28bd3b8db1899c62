"""What a Hugging Face config.json says of a model: ModelSpec, and how the families read its fields."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from mrl.errors import ConfigError

HfConfig = Mapping[str, Any]
# Of fields that came with a later family: `described` leaves them out of models that do not need them.
_LATER = {"only_where_set": True}
MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")  # one thing: layers for multi-token prediction


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
    router_score: Literal["softmax", "sigmoid"] = field(default="softmax", metadata=_LATER)
    routed_scaling_factor: float = field(default=1.0, metadata=_LATER)  # of the routed experts' sum
    partial_rotary_factor: float = field(default=1.0, metadata=_LATER)  # share of a head that turns with the position
    # for multi-token prediction; neither trained nor exported, so an export is of the same model without them
    left_out_layers: int = field(default=0, compare=False, metadata=_LATER)

    @property
    def is_moe(self) -> bool:
        return bool(self.moe_layers)

    def described(self) -> dict[str, Any]:
        """The fields as plain data, the same for a model whatever families came after its own:
        hashes are made of it.
        """
        left_out = {f.name for f in fields(self) if f.metadata and getattr(self, f.name) == f.default}
        return {name: value for name, value in asdict(self).items() if name not in left_out}


def required(config: HfConfig, *keys: str) -> Any:
    """The value of the first of `keys` (old and new spellings of one thing) that is there. Raises ConfigError."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise ConfigError(
        f"config.json of model_type {config.get('model_type')!r} has no {' or '.join(keys)}; is "
        "the checkpoint complete?"
    )


def rope_theta(config: HfConfig) -> float:
    """The rotary base: a key of its own, or inside `rope_parameters` as transformers 5 writes it."""
    return float(required({**config, **(config.get("rope_parameters") or {})}, "rope_theta"))


def partial_rotary_factor(config: HfConfig, default: float) -> float:
    """A key of its own, or inside `rope_parameters`, as `rope_theta`."""
    return float({**config, **(config.get("rope_parameters") or {})}.get("partial_rotary_factor", default))


def refuse_unlike_megatron(config: HfConfig) -> None:
    """Refuses what Megatron's model would silently compute differently from the checkpoint's own definition.

    Raises ConfigError.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    refuse_unless("rope scaling", rope.get("rope_type", rope.get("type", "default")), "default")
    refuse_unless("hidden_act", config.get("hidden_act", "silu"), "silu")
    refuse_unless("use_sliding_window", bool(config.get("use_sliding_window", False)), False)
    refuse_unless("attention_bias", bool(config.get("attention_bias", False)), False)


def common(config: HfConfig) -> dict[str, Any]:
    """The fields of ModelSpec that all families read alike."""
    refuse_unlike_megatron(config)
    heads = required(config, "num_attention_heads")
    return {
        "family": required(config, "model_type"),
        "num_layers": required(config, "num_hidden_layers"),
        "hidden_size": required(config, "hidden_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "vocab_size": required(config, "vocab_size"),
        "intermediate_size": required(config, "intermediate_size"),
        "max_position_embeddings": required(config, "max_position_embeddings"),
        "rope_theta": rope_theta(config),
        "rms_norm_eps": float(required(config, "rms_norm_eps")),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "dtype": config.get("dtype") or config.get("torch_dtype") or "float32",
    }


def experts(config: HfConfig) -> dict[str, Any]:
    """The fields of ModelSpec that the mixture-of-experts families read alike."""
    num_experts = required(config, "num_experts", "num_local_experts")
    sparse_step = config.get("decoder_sparse_step") or 1
    dense = set(config.get("mlp_only_layers") or ())
    layers = range(required(config, "num_hidden_layers"))
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": required(config, "num_experts_per_tok"),
        "moe_intermediate_size": required(config, "moe_intermediate_size"),
        "moe_layers": tuple(n for n in layers if n not in dense and (n + 1) % sparse_step == 0),
        "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
    }


def head_dim_from_hidden(config: HfConfig) -> int:
    """`head_dim`, which is hidden size over heads where the configuration has no such key."""
    return config.get("head_dim") or required(config, "hidden_size") // required(config, "num_attention_heads")


def refuse_unless(key: str, value: Any, supported: Any) -> None:
    """Raises ConfigError for a value of config.json that training would not compute."""
    if value != supported:
        raise ConfigError(
            f"config.json: {key} = {value!r} is not supported (only {supported!r}): training "
            "would not compute this model"
        )
