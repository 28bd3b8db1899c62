"""Qwen3.5 and Qwen3.6 as dense text models: Qwen3-Next's layers with one MLP instead of experts. Projections of gated
delta attention are separate by kind.

Their checkpoints belong to models that also read images (mrl/model/wrapped.py). Those give an image's tokens three
positions each. A text's three positions are equal, so multimodal rotation becomes the plain one for any sections.
"""

from collections.abc import Callable
from typing import Any

from mrl.model.decoder_weights import dense_layer
from mrl.model.delta_attention import MEGATRON_DELTA_ATTENTION, VLLM_DELTA_ATTENTION
from mrl.model.hf_config import ANY, HfConfig, ModelSpec, refuse_unless
from mrl.model.qwen3_next import PREDICTING_NAMES, hybrid
from mrl.model.qwen3_next import is_left_out as is_of_unheld_layer
from mrl.model.weight_map import MEGATRON_ORDER, VLLM_ATTENTION, VLLM_NORMS, Family
from mrl.model.wrapped import VISION_TOWER, inner_tensors

FLOAT32 = "float32"
_ARCHITECTURE = "Qwen3_5ForCausalLM"


def read(config: HfConfig) -> ModelSpec:
    return ModelSpec(**of_kinds(config, FAMILY.model_type))


def of_kinds(config: HfConfig, model_type: str) -> dict[str, Any]:
    """Returns the fields of ModelSpec that dense models and those with experts read alike.

    vLLM keeps states in `mamba_ssm_dtype`, whatever its own dtype.
    """
    refuse_unless("model_type", config.get("model_type"), model_type)
    refuse_unless("mamba_ssm_dtype", config.get("mamba_ssm_dtype", FLOAT32), FLOAT32)
    return {
        **hybrid(config, mrope_section=ANY, mrope_interleaved=ANY),
        "linear_by_kind": True,
        "linear_state_dtype": config.get("mamba_ssm_dtype"),
        "left_out_layers": config.get("mtp_num_hidden_layers") or 0,
    }


def is_left_out(name: str, m: ModelSpec) -> bool:
    """Tells whether a tensor belongs to the vision tower, or to the layer for multi-token prediction where ranks do not
    hold it.
    """
    return name.startswith(VISION_TOWER) or is_of_unheld_layer(name, m)


def engines_of(architecture: str) -> Callable[[ModelSpec], dict[str, Any]]:
    """Returns settings for engines: they get the text model alone, whose architecture this is."""
    return lambda m: {"architectures": [architecture]} if m.is_wrapped else {}


# official folders of Qwen3.5 have these in float32, but not those of Qwen3.6
PRECISE = (".linear_attn.A_log", ".linear_attn.norm.weight")

FAMILY = Family(
    _ARCHITECTURE,
    "qwen3_5_text",
    read,
    dense_layer,
    linear_layer=lambda m: dense_layer(m, is_linear=True),
    megatron_order=("input_layernorm.", *MEGATRON_DELTA_ATTENTION, *MEGATRON_ORDER),
    vllm_order=(*VLLM_DELTA_ATTENTION, *VLLM_ATTENTION, "mlp.", *VLLM_NORMS),
    predicting=PREDICTING_NAMES,
    is_left_out=is_left_out,
    engine_keys=engines_of(_ARCHITECTURE),
    wrapper="Qwen3_5ForConditionalGeneration",
    seeing="SeeingQwen3_5",
    inside=inner_tensors,
    rounded=PRECISE,
)
