"""The content of a Hugging Face config.json: ModelSpec, and how the families read its fields."""

import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import isfinite
from typing import Any, Literal, NamedTuple

from mrl.errors import ConfigError, shown
from mrl.model.int4 import int4_group
from mrl.model.rotation import Rotation, read_rotation
from mrl.model.rotation import settings as rotary_settings
from mrl.model.tower_sizes import VisionTower
from mrl.model.trained_tower import PROJECTOR, TRAINED, TrainedTower

HfConfig = Mapping[str, Any]
ANY: Any = object()  # as a plain value: the family reads the key by itself
# Keys that a class of transformers or vLLM reads, with the only values of which training computes the same model.
# tests/unit/test_config_keys.py finds them, and lists those of which every value means the same.
_PLAIN: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,  # vLLM attends within it, whatever the class of the model says
    "attention_chunk_size": None,
    "layer_types": None,
    "dual_chunk_attention_config": None,  # other rotations inside chunks (Qwen2.5-1M)
    "is_causal": True,
    "qk_norm": False,
    "partial_rotary_factor": 1.0,
    "alpha": None,  # of a dynamic rotation; Hunyuan's classes alone read it
    "mrope_section": None,
    "mrope_interleaved": False,
    "compression_config": None,
    "head_dtype": None,
    "block_configs": None,
    "attn_type_list": None,
    "per_layer_config": None,  # other sizes and norms in some layers
    "is_heterogeneous": False,
    "speculators_config": None,  # vLLM would take the folder for drafts of another model
    "is_encoder_decoder": False,
    "canvas_length": None,  # vLLM would generate by diffusion
    "rswa_window": None,
    "xdrope_section": None,  # vLLM's old name of mrope_section
}
# of vLLM's file of Llama, whose layers other families use, too
LLAMA_PLAIN: dict[str, Any] = {
    "mlp_bias": False,
    "bias": False,
    "qkv_bias": False,
    "logit_scale": 1.0,
    "target_layer_count": None,
}
# keys whose value transformers and vLLM take for the text model's config.json, in place of the file around it
TEXT_CONFIG = "text_config"
INNER_CONFIGS = (TEXT_CONFIG, "llm_config", "decoder", "generator", "text_encoder")
# spec field -> other keys in which transformers' or vLLM's readers look for it
_OTHER_NAMES = {
    "num_key_value_heads": ("n_head_kv", "num_kv_heads", "multi_query_group_num", "num_attention_groups"),
    "max_position_embeddings": (
        "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions", "max_sequence_length",
        "max_seq_length", "seq_len",
    ),
    "num_experts": ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k"),
    "head_dim": ("hidden_size_per_head",),
    "rope_theta": ("rotary_emb_base",),
    "partial_rotary_factor": ("rotary_pct", "rotary_emb_fraction"),
}  # fmt: skip
# names of the longest text, of which vLLM takes the smallest value
POSITION_NAMES = ("max_position_embeddings", *_OTHER_NAMES["max_position_embeddings"])
# For fields that came with later families: `described` leaves them out of models that do not need them.
_LATER = {"only_where_set": True}
FULL_ATTENTION = "full_attention"
QUANTIZATION = "quantization_config"  # how a checkpoint's weights are stored with fewer bits than they are trained in
_DTYPES = ("bfloat16", "float16", "float32")
_FP8_FORMATS = ("e4m3", "float8_e4m3fn")  # names of one format
# different names of the layers for multi-token prediction
MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


class LayerKind(NamedTuple):
    """The features that distinguish layers of a model: layers of one kind have the same weights."""

    has_experts: bool
    is_linear: bool = False  # gated delta attention: a state that passes from token to token, instead of keys
    predicts: bool = False  # a layer behind the model's own that predicts a further token


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of one model, with the names of Hugging Face configurations."""

    family: str  # the configuration's model_type
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    intermediate_size: int  # of dense MLP layers
    max_position_embeddings: int
    rotation: Rotation
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    dtype: str  # of the checkpoint, e.g. "bfloat16"
    moe_layers: tuple[int, ...] = ()  # numbers (from 0) of the layers with experts
    num_experts: int = 0  # 0: a dense model
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0  # 0: no shared expert
    norm_topk_prob: bool = False  # router weights of the chosen experts sum to one
    router_score: Literal["softmax", "sigmoid"] = field(default="softmax", metadata=_LATER)
    routed_scaling_factor: float = field(default=1.0, metadata=_LATER)  # of the routed experts' sum
    # for multi-token prediction, in the checkpoint's configuration
    left_out_layers: int = field(default=0, compare=False, metadata=_LATER)
    # of these, layers that ranks hold and weight syncs move (mrl/model/draft_layers.py); 0: they stay files
    predicting_layers: int = field(default=0, metadata=_LATER)
    # latent attention: keys and values are made from one latent vector of a token; head_dim is that of queries and keys
    kv_lora_rank: int = field(default=0, metadata=_LATER)  # size of the latent; 0: no latent attention
    q_lora_rank: int = field(default=0, metadata=_LATER)  # size of the queries' latent; 0: they are projected directly
    qk_rope_head_dim: int = field(default=0, metadata=_LATER)  # the rotated part of head_dim, shared by all heads
    v_head_dim: int = field(default=0, metadata=_LATER)
    expert_groups: int = field(default=1, metadata=_LATER)  # experts are chosen from the best groups only
    chosen_expert_groups: int = field(default=1, metadata=_LATER)
    # gated delta attention in some layers (Qwen3-Next, Qwen3.5): their numbers, heads and sizes
    linear_layers: tuple[int, ...] = field(default=(), metadata=_LATER)
    linear_num_key_heads: int = field(default=0, metadata=_LATER)
    linear_num_value_heads: int = field(default=0, metadata=_LATER)
    linear_key_head_dim: int = field(default=0, metadata=_LATER)
    linear_value_head_dim: int = field(default=0, metadata=_LATER)
    linear_conv_kernel_dim: int = field(default=0, metadata=_LATER)
    # its projections are ordered as queries, keys, values, gates of all heads, not by key heads
    linear_by_kind: bool = field(default=False, metadata=_LATER)
    linear_state_dtype: str | None = field(default=None, metadata=_LATER)  # in engines, if it is not the engine's dtype
    attn_output_gate: bool = field(default=False, metadata=_LATER)  # in the other layers, queries include a gate
    wide_qk_norm: bool = field(default=False, metadata=_LATER)  # one norm over the queries of all heads, one over keys
    # layers in which a token attends to the last `sliding_window` tokens, itself included
    window_layers: tuple[int, ...] = field(default=(), metadata=_LATER)
    sliding_window: int = field(default=0, metadata=_LATER)
    # each head has a learned logit beside those of the keys, which takes its share of the softmax (gpt-oss)
    attention_sinks: bool = field(default=False, metadata=_LATER)
    # gpt-oss' experts: rows of gate and up in turns, both clamped, gate x sigmoid(1.702 gate) x (up + 1); biases in
    # experts, router and attention's output projection
    clamped_experts: bool = field(default=False, metadata=_LATER)
    zero_centered_norm: bool = field(default=False, metadata=_LATER)  # norms multiply by 1 + weight
    # rows and columns of one scale of an FP8 checkpoint, which is read as bfloat16; exports have none
    fp8_block: tuple[int, int] | None = field(default=None, compare=False, metadata=_LATER)
    # columns of one scale of a checkpoint whose matrices are 4-bit integers, which is read as bfloat16; 0: they are not
    int4_group: int = field(default=0, compare=False, metadata=_LATER)
    # matrices of experts are 4-bit floating-point numbers (mrl/model/mxfp4.py), which are read as bfloat16
    is_mxfp4: bool = field(default=False, compare=False, metadata=_LATER)
    # the checkpoint belongs to a model that also reads images (mrl/model/wrapped.py), and this is its text model
    is_wrapped: bool = field(default=False, compare=False, metadata=_LATER)
    tower: VisionTower | None = field(default=None, compare=False, metadata=_LATER)  # of the whole model
    # the tower, if it or its projector is trained: then its weights are the model's, too
    trained_tower: TrainedTower | None = field(default=None, metadata=_LATER)
    # the embedding's lookup of this token has no gradient
    pad_token_id: int | None = field(default=None, compare=False, metadata=_LATER)

    def __hash__(self) -> int:
        """Hashes few fields: caches ask for it very often, and models that differ in others alone are rare."""
        return hash((self.family, self.num_layers, self.hidden_size, self.vocab_size, self.dtype))

    def with_trained_tower(self, vision: str | None) -> "ModelSpec":
        """Returns the model with its vision tower among its weights, if `vision`, as model.vision, trains it."""
        if self.tower is None or vision not in (TRAINED, PROJECTOR):
            return self
        return replace(self, trained_tower=TrainedTower(vision, self.tower))

    @property
    def trained_part(self) -> str | None:
        """How much of the vision tower is trained, as in model.vision; None: it is not part of the model."""
        return None if self.trained_tower is None else self.trained_tower.part

    @property
    def is_moe(self) -> bool:
        return bool(self.moe_layers)

    @property
    def is_latent(self) -> bool:
        """Tells whether keys and values are made from a latent vector (MLA)."""
        return self.kv_lora_rank > 0

    @property
    def is_hybrid(self) -> bool:
        """Tells whether some layers have gated delta attention."""
        return bool(self.linear_layers)

    def holding(self, predicting: bool) -> "ModelSpec":
        """Returns the model with its predicting layers, if ranks are to hold them."""
        return self.with_predicting(self.left_out_layers if predicting else 0)

    def with_predicting(self, layers: int) -> "ModelSpec":
        """Returns the model with this number of predicting layers; itself, which caches find soonest, if it has it."""
        if layers == self.predicting_layers:
            return self
        return replace(self, predicting_layers=layers)

    @property
    def all_layers(self) -> int:
        """The number of layers with those that predict further tokens and are held by ranks."""
        return self.num_layers + self.predicting_layers

    @property
    def attending_layers(self) -> int:
        """The number of layers with keys and values."""
        return self.num_layers - len(self.linear_layers)

    @property
    def linear_channels(self) -> int:
        """Number of channels of queries, keys and values of gated delta attention together."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim

    def layer_kind(self, layer: int) -> LayerKind:
        """Returns the kind of a layer by its number from 0. Predicting layers come last; they have experts if
        other layers do.
        """
        if layer >= self.num_layers:
            return LayerKind(self.is_moe, predicts=True)
        return LayerKind(layer in self.moe_layers, layer in self.linear_layers)

    @property
    def is_fp8(self) -> bool:
        """Tells whether the checkpoint's matrices are FP8. They are read as bfloat16, unlike by vLLM's own loader."""
        return self.fp8_block is not None

    @property
    def is_quantised(self) -> bool:
        """Tells whether the checkpoint's matrices are stored in fewer bits than they are trained in."""
        return self.is_fp8 or self.int4_group > 0 or self.is_mxfp4

    @property
    def loads_by_sync(self) -> bool:
        """Tells whether engines get weights only by a sync, because they cannot load the checkpoint as the trained
        model.
        """
        return self.is_quantised or self.is_wrapped

    @property
    def qk_nope_head_dim(self) -> int:
        """The part of head_dim that is not rotated, in latent attention."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def rotated_head_dim(self) -> int:
        """How many numbers of a head are turned by its position."""
        return self.rotation.rotated(self.qk_rope_head_dim or self.head_dim)

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest sample that trainer and engines compute alike."""
        return self.rotation.longest(self.max_position_embeddings)

    @property
    def value_head_dim(self) -> int:
        """Width of one head's values, which differs from that of keys in latent attention."""
        return self.v_head_dim or self.head_dim

    def described(self) -> dict[str, Any]:
        """Returns the fields as plain data, which do not change when later families add fields. Hashes are made of
        them.
        """
        left_out = {f.name for f in fields(self) if f.metadata and getattr(self, f.name) == f.default}
        # these change no weight's place, and published configurations may lack them
        left_out |= {"pad_token_id", "tower"}
        return {name: value for name, value in asdict(self).items() if name not in left_out}


def without_quantization(config: HfConfig) -> dict[str, Any]:
    """Returns the config.json of the same model in the form in which weights are trained and written."""
    return {key: value for key, value in config.items() if key != QUANTIZATION}


def required(config: HfConfig, *keys: str) -> Any:
    """Returns the value of the first existing key of `keys` (old and new spellings). Raises ConfigError."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise ConfigError(
        f"config.json of model_type {config.get('model_type')!r} has no {' or '.join(keys)}; is "
        "the checkpoint complete?"
    )


def refuse_unlike(config: HfConfig, plain: Mapping[str, Any]) -> None:
    """Raises ConfigError, with the key, for a value that training would not compute. `plain`: those that it does."""
    for key, supported in plain.items():
        value = config.get(key, supported)
        if supported is False:
            value = bool(value)
        if supported is not ANY:
            refuse_unless(key, value, supported)


def refuse_inner(config: HfConfig, names: Iterable[str] = INNER_CONFIGS) -> None:
    """Raises ConfigError for a configuration inside that of a text model, which engines would read in its place.

    Sources: PreTrainedConfig.get_text_config of transformers; _CONFIG_ATTRS_MAPPING of vLLM.
    """
    for name in names:
        if config.get(name) is not None:
            raise ConfigError(
                f"config.json: {name} = {shown(config[name])} is not supported here: transformers and vLLM would read "
                "it in place of the keys around it; remove it"
            )


def refuse_tied(config: HfConfig) -> None:
    """Raises ConfigError for tied embeddings, in families whose class in vLLM does not tie them."""
    if config.get("tie_word_embeddings"):
        raise ConfigError(
            f"config.json: tie_word_embeddings = True is not supported for {config.get('model_type')}: vLLM's class "
            "has an output layer of its own, which no tensor would fill; store a copy of model.embed_tokens.weight as "
            "lm_head.weight and set it to false"
        )


def refuse_other_names(config: HfConfig, spec: ModelSpec) -> None:
    """Raises ConfigError for a value under another name, where vLLM also looks, that differs from the model's."""
    for key, names in _OTHER_NAMES.items():
        own = {**vars(spec.rotation), **vars(spec)}[key]
        for name in names:
            value = config.get(name)
            # of all names of the longest text, vLLM takes the smallest value
            is_larger = key == "max_position_embeddings" and _is_number(value) and value > own
            if value is not None and value != own and not is_larger:
                raise ConfigError(
                    f"config.json: {name} = {shown(value)} is another name of {key}, which is {own}: transformers or "
                    "vLLM would take it; remove the wrong one"
                )


def refuse_router(spec: ModelSpec) -> None:
    """Raises ConfigError for a number of experts per token that Megatron's routers cannot choose."""
    chosen, experts = spec.num_experts_per_tok, spec.num_experts
    if not spec.is_moe:
        return
    if chosen > experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok = {chosen} must be at most {experts}, the number of experts of a layer"
        )
    if chosen == 1 and spec.norm_topk_prob and spec.router_score == "softmax":
        raise ConfigError(
            "config.json: num_experts_per_tok = 1 must be 2 or more, because the weights of a token's experts sum to "
            f"one here ({spec.family}): a single weight is constant, and Megatron refuses such a router"
        )


def refuse_quantised(config: HfConfig) -> None:
    """Raises ConfigError for weights in a format that the family is not read in."""
    if quantization := config.get(QUANTIZATION):
        raise ConfigError(
            f"config.json: quantization_config of quant_method {shown(quantization.get('quant_method'))} is not "
            "supported for this family; give the checkpoint that was not quantised, or convert this one's weights to "
            "bfloat16 and remove the key"
        )


def pad_token_id(config: HfConfig) -> int | None:
    """Returns the token whose row in the embedding has no gradient, counted from 0; None if there is none.

    Families of transformers pass it to torch.nn.Embedding, which counts negative numbers from the vocabulary's end.
    Raises ConfigError for a number outside of the vocabulary, with which transformers cannot make the model.
    """
    token, vocab_size = config.get("pad_token_id"), required(config, "vocab_size")
    if token is None:
        return None
    if type(token) is not int or not -vocab_size <= token < vocab_size:
        raise ConfigError(
            f"config.json: pad_token_id = {shown(token)}: must be null or a whole number from {-vocab_size} "
            f"to {vocab_size - 1} (vocab_size - 1), because transformers' embedding has no such row otherwise"
        )
    return token % vocab_size


# Largest allowed values of whole-number fields, far above those of any model.
_MOST = {
    "num_hidden_layers": 2000, "hidden_size": 2**18, "num_attention_heads": 2**13, "num_key_value_heads": 2**13,
    "head_dim": 2**13, "vocab_size": 2**24, "intermediate_size": 2**21, "max_position_embeddings": 2**30,
    "num_experts": 2**13, "num_local_experts": 2**13, "n_routed_experts": 2**13, "num_experts_per_tok": 2**13,
    "moe_intermediate_size": 2**20, "decoder_sparse_step": 2000, "full_attention_interval": 2000,
    "linear_num_key_heads": 2**13, "linear_num_value_heads": 2**13, "linear_key_head_dim": 2**13,
    "linear_value_head_dim": 2**13, "linear_conv_kernel_dim": 2**10, "kv_lora_rank": 2**18, "qk_rope_head_dim": 2**13,
    "qk_nope_head_dim": 2**13, "v_head_dim": 2**13, "original_max_position_embeddings": 2**30,
    "n_group": 2**13, "topk_group": 2**13,
}  # fmt: skip
_MOST_OR_NONE = {
    "shared_expert_intermediate_size": 2**20,
    "n_shared_experts": 2**10,
    "first_k_dense_replace": 2000,
    "q_lora_rank": 2**18,
    **dict.fromkeys(MTP_KEYS, 100),
}
_NUMBERS = (
    "rope_theta",
    "rms_norm_eps",
    "partial_rotary_factor",
    "routed_scaling_factor",
    "factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "alpha",
)
_NUMBERS_OR_ZERO = ("mscale", "mscale_all_dim")
_KINDS: dict[str, type] = {
    "model_type": str,
    "dtype": str,
    "torch_dtype": str,
    "rope_parameters": dict,
    "rope_scaling": dict,
    "text_config": dict,
    "vision_config": dict,
    "tie_word_embeddings": bool,
    "mlp_only_layers": list,
    "layer_types": list,
    "mlp_layer_types": list,
    "short_factor": list,
    "long_factor": list,
    "truncate": bool,
    QUANTIZATION: dict,
    "architectures": list,
}


def _not_finite(key: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yields each infinity and NaN of a value of JSON, with the dotted key under which it stands."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _not_finite(f"{key}.{name}", each)
    elif isinstance(value, list):
        for each in value:
            yield from _not_finite(key, each)
    elif isinstance(value, float) and not isfinite(value):
        yield key, value


def refuse_impossible(config: HfConfig) -> None:
    """Raises ConfigError for a field of a wrong type or an impossible size. Null is accepted."""
    for key, value in config.items():
        least = 0
        if key in _MOST:
            least = 1
        most = {**_MOST, **_MOST_OR_NONE}.get(key)
        if value is None:
            continue
        if most is not None and not (type(value) is int and least <= value <= most):
            raise ConfigError(f"config.json: {key} = {shown(value)}: must be a whole number from {least} to {most}")
        for where, wrong in _not_finite(key, value):
            raise ConfigError(f"config.json: {where} = {wrong}: must be a finite number")
        if key in _NUMBERS and not (_is_number(value) and value > 0):
            raise ConfigError(f"config.json: {key} = {shown(value)}: must be a number above 0")
        if key in _NUMBERS_OR_ZERO and not (_is_number(value) and value >= 0):
            raise ConfigError(f"config.json: {key} = {shown(value)}: must be a number from 0")
        if key in _KINDS and not isinstance(value, _KINDS[key]):
            raise ConfigError(f"config.json: {key} = {shown(value)}: must be a {_KINDS[key].__name__} of JSON")
    lists = [item for key in ("mlp_only_layers", "architectures", "layer_types") for item in config.get(key) or ()]
    if not all(isinstance(item, int | str) for item in lists):
        raise ConfigError("config.json: mlp_only_layers, architectures or layer_types hold more than numbers and names")
    factors = [item for key in ("short_factor", "long_factor") for item in config.get(key) or ()]
    if not all(map(_is_number, factors)):
        raise ConfigError("config.json: short_factor or long_factor hold more than numbers")
    for inner in ("rope_parameters", "rope_scaling", "text_config"):
        if isinstance(config.get(inner), dict):
            refuse_impossible(config[inner])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def common(
    config: HfConfig,
    *,
    head_dim: int | None = None,
    rotary_share: float | None = None,
    is_latent: bool = False,
    **plain: Any,
) -> dict[str, Any]:
    """Returns the fields of ModelSpec that all families read alike.

    `head_dim`: size of a head, of latent attention its rotated part; None: as `head_dim_from_hidden`.
    `rotary_share`: value of an absent partial_rotary_factor; None: the class turns whole heads. `plain`: values that
    this family computes in place of those in _PLAIN; ANY for keys that it reads itself.
    """
    stored = _quantised(config)
    refuse_inner(config)
    if rotary_share is not None:
        plain["partial_rotary_factor"] = ANY
    read = {**config, **rotary_settings(config), "layer_types": _layer_kinds(config), "sliding_window": _window(config)}
    refuse_unlike(read, {**_PLAIN, **plain})
    heads = required(config, "num_attention_heads")
    key_heads = required(config, "num_key_value_heads")
    if heads % key_heads:
        raise ConfigError(f"config.json: num_key_value_heads = {key_heads} must divide num_attention_heads = {heads}")
    return {
        "family": required(config, "model_type"),
        "num_layers": required(config, "num_hidden_layers"),
        "hidden_size": required(config, "hidden_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": required(config, "vocab_size"),
        "intermediate_size": required(config, "intermediate_size"),
        "max_position_embeddings": required(config, "max_position_embeddings"),
        "rotation": read_rotation(
            config,
            head_dim_from_hidden(config) if head_dim is None else head_dim,
            1.0 if rotary_share is None else rotary_share,
            is_latent,
        ),
        "rms_norm_eps": float(required(config, "rms_norm_eps")),
        "tie_word_embeddings": bool(or_default(config, "tie_word_embeddings", False)),
        "dtype": _dtype(config),
        **stored,
    }


def _window(config: HfConfig) -> int | None:
    """Returns the tokens to which attention is limited; None if the longest sample is no longer."""
    window = config.get("sliding_window")
    if type(window) is int and window >= required(config, "max_position_embeddings"):
        return None
    return window


def _dtype(config: HfConfig) -> str:
    """Returns the checkpoint's format. Raises ConfigError for a name of another one, or of none."""
    key = "dtype" if config.get("dtype") else "torch_dtype"
    name = config.get(key) or "float32"
    if name not in _DTYPES:
        raise ConfigError(
            f"config.json: {key} = {shown(name)}: must be one of {', '.join(_DTYPES)}; it says in which format the "
            "weights are stored"
        )
    return name


def _quantised(config: HfConfig) -> dict[str, Any]:
    """Returns the fields of ModelSpec of a checkpoint in FP8 or 4-bit integers, which is read as bfloat16.

    Which matrices are is told by the files. Raises ConfigError for another quantisation.
    """
    quantization = config.get(QUANTIZATION)
    if not quantization:
        return {}
    match quantization.get("quant_method"):
        case "fp8":
            return {"fp8_block": _fp8_block(quantization), "dtype": "bfloat16"}
        case "compressed-tensors":
            return {"int4_group": int4_group(quantization), "dtype": "bfloat16"}
    refuse_quantised(config)
    return {}


def _fp8_block(quantization: dict[str, Any]) -> tuple[int, int]:
    """Returns the rows and columns of one scale. Raises ConfigError for another format."""
    if quantization.get("fmt", _FP8_FORMATS[0]) not in _FP8_FORMATS:
        refuse_unless("quantization_config's fmt", quantization["fmt"], _FP8_FORMATS[0])
    block = quantization.get("weight_block_size")
    if block is None:
        raise ConfigError(
            "config.json: quantization_config of quant_method fp8 without weight_block_size is not read; give the "
            "checkpoint that was not quantised"
        )
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise ConfigError(f"config.json: weight_block_size = {shown(block)}: must be two whole numbers above 0")
    return block[0], block[1]


def or_default(config: HfConfig, key: str, default: Any) -> Any:
    """Returns the value of `key`, or that of a configuration without it: transformers' default, which vLLM reads too.

    Raises ConfigError for null, which neither reads as the default, and for an absent key without default.
    """
    return required({key: default, **config}, key)


def _layer_kinds(config: HfConfig) -> list[str] | None:
    """Returns the layers' kinds of attention; None if it is full attention everywhere."""
    kinds = config.get("layer_types")
    if not kinds or kinds == [FULL_ATTENTION] * required(config, "num_hidden_layers"):
        return None
    return kinds


def experts(config: HfConfig) -> dict[str, Any]:
    """Returns the fields of ModelSpec that mixture-of-experts families read alike."""
    num_experts = required(config, "num_experts", "num_local_experts")
    sparse_step = or_default(config, "decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers") or ())
    layers = range(required(config, "num_hidden_layers"))
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": required(config, "num_experts_per_tok"),
        "moe_intermediate_size": required(config, "moe_intermediate_size"),
        "moe_layers": tuple(n for n in layers if n not in dense and (n + 1) % sparse_step == 0),
        "norm_topk_prob": bool(or_default(config, "norm_topk_prob", False)),
    }


def head_dim_from_hidden(config: HfConfig) -> int:
    """Returns `head_dim`, or hidden size over heads if the configuration lacks it."""
    split = required(config, "hidden_size") // required(config, "num_attention_heads")
    return or_default(config, "head_dim", split)


def own_head_dim(config: HfConfig) -> int:
    """Returns `head_dim`, or hidden size over heads if it is absent or null, as in Llama's relatives."""
    if config.get("head_dim") is None:
        return required(config, "hidden_size") // required(config, "num_attention_heads")
    return config["head_dim"]


def derived_head_dim(config: HfConfig) -> int:
    """Returns hidden size over heads. Raises ConfigError for another `head_dim`: vLLM's class does not read it."""
    heads, hidden = required(config, "num_attention_heads"), required(config, "hidden_size")
    size = hidden // heads
    if or_default(config, "head_dim", size) != size:
        raise ConfigError(
            f"config.json: head_dim = {config['head_dim']} must be hidden_size / num_attention_heads = {hidden} / "
            f"{heads} = {size}, or left out: vLLM's class of {config.get('model_type')} does not read head_dim"
        )
    return size


def refuse_uneven_heads(config: HfConfig) -> None:
    """Raises ConfigError for heads that do not divide the hidden size, in classes that derive a head's size from it."""
    heads, size = required(config, "num_attention_heads"), required(config, "hidden_size")
    if size % heads:
        raise ConfigError(f"config.json: num_attention_heads = {heads} must divide hidden_size = {size} in this class")


def refuse_unless(key: str, value: Any, supported: Any) -> None:
    """Raises ConfigError for a value in config.json that training would not compute."""
    if value != supported:
        raise ConfigError(
            f"config.json: {key} = {reprlib.repr(value)} is not supported (only {supported!r}): training "
            "would not compute this model"
        )
