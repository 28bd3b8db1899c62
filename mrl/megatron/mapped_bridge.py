"""Bridges of mrl's own in mbridge's registry, for families that mbridge lacks or has wrong (mrl.platforms.versions).

mbridge moves the weights; what it is told of a family here comes from ModelSpec and the weight map.
"""

import re
from types import SimpleNamespace
from typing import Any

from mbridge.core import LLMBridge, register_model
from mbridge.core.safetensor_io import SafeTensorIO
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mrl.megatron.fp8_files import Bfloat16Files
from mrl.model import ModelSpec, load_model_spec
from mrl.model.hf_config import Yarn
from mrl.model.registry import weight_map
from mrl.model.weight_map import MEGATRON_LAYER
from mrl.platforms.versions import OWN_BRIDGES

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(\.mlp\.experts\.linear_fc[12]\.weight)(\d+)$")
_NO_YARN = Yarn(1.0, 4096, 32.0, 1.0, 1.0, 0.0)  # factor 1: nothing is stretched


def bridge_config(model: ModelSpec) -> SimpleNamespace:
    """What mbridge asks of a Hugging Face configuration, made from the model alone."""
    return SimpleNamespace(
        model_spec=model,
        model_type=model.family,
        num_hidden_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        intermediate_size=model.intermediate_size,
        attention_dropout=0.0,
        rms_norm_eps=model.rms_norm_eps,
        vocab_size=model.vocab_size,
        max_position_embeddings=model.max_position_embeddings,
        rope_theta=model.rope_theta,
        tie_word_embeddings=model.tie_word_embeddings,
    )


@register_model(list(OWN_BRIDGES))
class MappedBridge(LLMBridge):
    """A family as the weight map has it. Its configuration is that of `bridge_config`."""

    @property
    def model(self) -> ModelSpec:
        """The model that is bridged."""
        return self.hf_config.model_spec

    @property
    def TransformerConfigClass(self) -> type:
        """Megatron's class of transformer configuration for this model."""
        if self.model.is_latent:
            return MLATransformerConfig
        return TransformerConfig

    def _build_config(self) -> TransformerConfig:
        m = self.model
        experts = {}
        if m.is_moe:
            experts = _experts(m)
        latent = {}
        if m.is_latent:
            latent = _latent(m)
        return self._build_base_config(
            qk_layernorm=m.qk_norm or m.is_latent,
            add_qkv_bias=m.qkv_bias,
            persist_layer_norm=True,
            bias_activation_fusion=True,
            bias_dropout_fusion=True,
            **experts,
            **latent,
        )

    def _get_gptmodel_args(self) -> dict[str, Any]:
        return super()._get_gptmodel_args() | {"rotary_percent": self.model.partial_rotary_factor}

    def _get_safetensor_io(self, weights_path: str) -> SafeTensorIO:
        """What reads a folder, which may be a reference's: the same model, perhaps in another dtype."""
        block = load_model_spec(weights_path).fp8_block
        if block is None:
            return super()._get_safetensor_io(weights_path)
        return Bfloat16Files(weights_path, block)

    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]:
        """Names of the checkpoint for a parameter's, whose layer and expert are numbers of the whole model."""
        weights = weight_map(self.model)
        layer = _LAYER.match(mcore_weights_name)
        if layer is None:
            rows = (weights.embedding, weights.final_norm, weights.output)
            return [row.parts[0].name for row in rows if row.megatron == mcore_weights_name]
        expert = _EXPERT.search(mcore_weights_name)
        plain = _EXPERT.sub(r"\1{expert}", mcore_weights_name)
        wanted = MEGATRON_LAYER + plain[layer.end() :]
        row = next(row for row in weights.layer(int(layer[1])).megatron if row.megatron == wanted)
        return [part.name.format(layer=layer[1], expert=expert and expert[2]) for part in row.parts]


def _experts(m: ModelSpec) -> dict[str, Any]:
    has_groups = m.expert_groups > 1
    return {
        "num_moe_experts": m.num_experts,
        "moe_ffn_hidden_size": m.moe_intermediate_size,
        "moe_router_topk": m.num_experts_per_tok,
        "moe_router_score_function": m.router_score,
        "moe_router_enable_expert_bias": m.router_score == "sigmoid",
        "moe_router_topk_scaling_factor": m.routed_scaling_factor,
        "moe_router_num_groups": m.expert_groups if has_groups else None,
        "moe_router_group_topk": m.chosen_expert_groups if has_groups else None,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
        "moe_shared_expert_overlap": True,
    }


def _latent(m: ModelSpec) -> dict[str, Any]:
    yarn = m.yarn or _NO_YARN
    return {
        "q_lora_rank": m.q_lora_rank or None,
        "kv_lora_rank": m.kv_lora_rank,
        "qk_head_dim": m.qk_nope_head_dim,
        "qk_pos_emb_head_dim": m.qk_rope_head_dim,
        "v_head_dim": m.v_head_dim,
        "rope_type": "yarn" if m.yarn else "rope",
        "rotary_base": m.rope_theta,
        "rotary_scaling_factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_position_embeddings,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }
