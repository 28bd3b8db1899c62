"""The bridge of all families. mbridge moves the weights. Its facts about a family come from ModelSpec and the weight
map.

Its own bridges are not used. Some lack a family, some compute another model without an error: that of Llama scales
angles linearly, that of DeepSeek-V3 never sets groups of experts. Checkpoints that mbridge cannot read by itself are
read here: in FP8, and of models that also read images.
"""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from mbridge.core import LLMBridge
from mbridge.core.safetensor_io import SafeTensorIO
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from safetensors import safe_open
from torch import Tensor

from mrl.model import ModelSpec, load_model_spec
from mrl.model.fp8 import bfloat16_bits
from mrl.model.hf_files import int4_scale_of, read_safetensors_header, scale_of, weight_files
from mrl.model.int4 import PACKED, bfloat16_rows
from mrl.model.megatron_shards import megatron_slice
from mrl.model.mxfp4 import BLOCKS, SCALES, mxfp4_rows
from mrl.model.registry import family_of, inner_tensors, weight_map
from mrl.model.rotation import Yarn
from mrl.model.trained_tower import MODULE
from mrl.model.weight_map import MEGATRON_LAYER, Inner, Weight

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(\.mlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$")
# mbridge finds the number of an expert behind ".weight", so that biases are called "linear_fc1.bias.weight3" in it
_EXPERT_BIAS = re.compile(r"(\.mlp\.experts\.linear_fc[12]\.bias)\.weight(\d+)$")
_NO_YARN = Yarn(1.0, 4096)  # factor 1: angles are not stretched


def bridge_config(model: ModelSpec) -> SimpleNamespace:
    """Returns the fields of a Hugging Face configuration that mbridge reads, made from the model alone."""
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
        rope_theta=model.rotation.rope_theta,
        tie_word_embeddings=model.tie_word_embeddings,
    )


class MappedBridge(LLMBridge):
    """Bridges a family by its weight map, with the configuration of `bridge_config`."""

    @property
    def model(self) -> ModelSpec:
        """The bridged model."""
        return self.hf_config.model_spec

    @property
    def TransformerConfigClass(self) -> type:
        """Returns the class of this model's transformer configuration in Megatron."""
        if self.model.is_latent:
            return MLATransformerConfig
        return TransformerConfig

    def _build_config(self) -> TransformerConfig:
        m = self.model
        experts = {}
        if m.is_moe:
            experts = _experts(m)
        of_attention = {}
        if m.is_latent:
            of_attention = _latent(m)
        if m.is_hybrid:
            of_attention = _gated_delta(m)
        return self._build_base_config(
            qk_layernorm=m.qk_norm or m.is_latent,
            add_qkv_bias=m.qkv_bias,
            add_bias_linear=m.clamped_experts,
            attention_output_gate=m.attn_output_gate,
            layernorm_zero_centered_gamma=m.zero_centered_norm,
            persist_layer_norm=True,
            bias_activation_fusion=not m.clamped_experts,
            use_te_activation_func=m.clamped_experts,  # takes gate and up together: torch_spec.ClampedGate
            bias_dropout_fusion=not m.clamped_experts,
            **experts,
            **of_attention,
        )

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        """Returns Megatron's layer spec with Transformer Engine's modules, and mrl's where Megatron has none."""
        from mrl.rank.torch_spec import with_clamped_experts, with_gated_delta, with_sinks, with_wide_norms

        block = super()._get_transformer_layer_spec(vp_stage)
        if self.model.is_hybrid:
            block = with_gated_delta(block, self.config, vp_stage, self.model.linear_by_kind)
        if self.model.wide_qk_norm:
            block = with_wide_norms(block)
        if self.model.attention_sinks:
            block = with_sinks(block, self.model)
        if self.model.clamped_experts:
            block = with_clamped_experts(block)
        return block

    def _get_safetensor_io(self, weights_path: str) -> SafeTensorIO:
        """Returns a reader of a folder, which may be a reference's: the same model, possibly in another dtype."""
        if family_of(self.model).inside is not None:
            return JoinedFiles(weights_path, self.model)
        stored = load_model_spec(weights_path)
        if stored.int4_group:
            return Int4Files(weights_path)
        if stored.fp8_block is None:
            return super()._get_safetensor_io(weights_path)
        return Bfloat16Files(weights_path, stored.fp8_block)

    def _weight_to_mcore_format(self, mcore_weights_name: str, hf_weights: list[Tensor]) -> Tensor:
        """Converts as mbridge does, except for projections that mbridge would join in another way."""
        row = self._joined(mcore_weights_name)
        if row is None:
            return super()._weight_to_mcore_format(mcore_weights_name, hf_weights)
        parts = dict(zip(row.parts, hf_weights, strict=True))
        layout = megatron_slice(row, 1, 1)
        whole = hf_weights[0].new_empty(layout.shape, dtype=self.dtype)
        for block in layout.blocks:
            whole[block.local_box.slices] = parts[block.part][block.hf_box.slices]
        return whole

    def _weight_to_hf_format(self, mcore_weights_name: str, mcore_weights: Tensor) -> tuple[list[str], list[Tensor]]:
        """Converts as mbridge does, except for projections that mbridge would join in another way."""
        row = self._joined(mcore_weights_name)
        if row is None:
            return super()._weight_to_hf_format(mcore_weights_name, mcore_weights)
        parts = {part: mcore_weights.new_empty(part.shape) for part in row.parts}
        for block in megatron_slice(row, 1, 1).blocks:
            parts[block.part][block.hf_box.slices] = mcore_weights[block.local_box.slices]
        return self._weight_name_mapping_mcore_to_hf(mcore_weights_name), list(parts.values())

    def _weight_name_mapping_mcore_local_to_global(
        self, model: torch.nn.Module, consider_ep: bool = True
    ) -> dict[str, str]:
        """Returns a chunk's parameter names with global numbers of layers and, if `consider_ep`, of experts."""
        names = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep=False)
        first = 0
        if consider_ep and self.model.is_moe:
            first = self.mpu.ep_rank * (self.model.num_experts // self.mpu.ep_size)
        return {
            local: _EXPERT.sub(lambda m: _of_expert(m[1], int(m[2]) + first), name) for local, name in names.items()
        }

    def _weight_split_across_tp(
        self, mcore_weights_name: str, mcore_weights: Tensor, param: Tensor, tp_split_size: int
    ) -> list[Tensor]:
        """Splits as mbridge does, except that sections are cut separately and a vision tower is on every rank."""
        if mcore_weights_name.startswith(MODULE):
            return [mcore_weights] * tp_split_size
        sections = self._sections(mcore_weights_name)
        if not sections:
            return super()._weight_split_across_tp(mcore_weights_name, mcore_weights, param, tp_split_size)
        cut = [section.chunk(tp_split_size) for section in mcore_weights.split(sections)]
        return [torch.cat(parts) for parts in zip(*cut, strict=True)]

    def _weight_merge_across_tp(self, mcore_weights_name: str, mcore_weights: list[Tensor], param: Tensor) -> Tensor:
        """Merges as mbridge does, except that sections are merged separately."""
        if len(mcore_weights) == 1:
            return mcore_weights[0]
        sections = self._sections(mcore_weights_name)
        if not sections:
            return super()._weight_merge_across_tp(mcore_weights_name, mcore_weights, param)
        sizes = [size // len(mcore_weights) for size in sections]
        cut = [weight.split(sizes) for weight in mcore_weights]
        return torch.cat([torch.cat(parts) for parts in zip(*cut, strict=True)])

    def _sections(self, mcore_weights_name: str) -> list[int]:
        """Returns the rows of each section of a weight; empty for weights without sections."""
        row = self._row(mcore_weights_name)
        if row is None or row.split != "sections":
            return []
        return list(row.sections)

    def _joined(self, mcore_weights_name: str) -> Weight | None:
        """Returns the map's row of a projection with gates among its queries, with parts joined by section, or whose
        queries, keys and values are one tensor of the checkpoint.
        """
        row = self._row(mcore_weights_name)
        if row is None:
            return None
        has_one_part = len(row.parts) == 1
        is_fused_in_files = row.split == "heads" and has_one_part
        is_joined_by_section = bool(row.sections) and not has_one_part
        if row.is_gated or is_fused_in_files or is_joined_by_section:
            return row
        return None

    def _row(self, mcore_weights_name: str) -> Weight | None:
        """Returns the map's row of a layer's parameter.

        mbridge counts layers from the first of a stage here, so the number does not tell the layer's kind.
        """
        wanted = _in_any_layer(mcore_weights_name)
        rows = (row for kind, _ in weight_map(self.model).layers for row in kind.megatron)
        return next((row for row in rows if row.megatron == wanted), None)

    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]:
        """Returns the checkpoint's names for a parameter. Its layer and expert are global numbers."""
        weights = weight_map(self.model)
        mcore_weights_name = _EXPERT_BIAS.sub(r"\1\2", mcore_weights_name)
        layer = _LAYER.match(mcore_weights_name)
        if layer is None:
            rows = (weights.embedding, weights.final_norm, weights.output, *weights.tower)
            return [row.parts[0].name for row in rows if row.megatron == mcore_weights_name]
        expert = _EXPERT.search(mcore_weights_name)
        wanted = _in_any_layer(mcore_weights_name)
        row = next(row for row in weights.layer(int(layer[1])).megatron if row.megatron == wanted)
        return [part.name.format(layer=layer[1], expert=expert and expert[2]) for part in row.parts]


def _in_any_layer(mcore_weights_name: str) -> str:
    """Returns a parameter's name as the weight map has it."""
    name = _EXPERT_BIAS.sub(r"\1\2", mcore_weights_name)
    return _LAYER.sub(MEGATRON_LAYER, _EXPERT.sub(r"\1{expert}", name), count=1)


def _of_expert(prefix: str, expert: int) -> str:
    """Returns the name of an expert's parameter as mbridge takes it apart."""
    if prefix.endswith("bias"):
        return f"{prefix}.weight{expert}"
    return f"{prefix}{expert}"


def _gated_delta(m: ModelSpec) -> dict[str, Any]:
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(layer in m.linear_layers) for layer in range(m.num_layers)],
        "linear_conv_kernel_dim": m.linear_conv_kernel_dim,
        "linear_key_head_dim": m.linear_key_head_dim,
        "linear_value_head_dim": m.linear_value_head_dim,
        "linear_num_key_heads": m.linear_num_key_heads,
        "linear_num_value_heads": m.linear_num_value_heads,
    }


def _experts(m: ModelSpec) -> dict[str, Any]:
    has_groups = m.expert_groups > 1
    return {
        "num_moe_experts": m.num_experts,
        "moe_ffn_hidden_size": m.moe_intermediate_size,
        "moe_router_topk": m.num_experts_per_tok,
        "moe_router_score_function": m.router_score,
        # Softmax over the chosen logits equals softmax over all, renormalised over the chosen.
        "moe_router_pre_softmax": not m.norm_topk_prob,
        "moe_router_enable_expert_bias": m.router_score == "sigmoid",
        "moe_router_topk_scaling_factor": m.routed_scaling_factor,
        "moe_router_num_groups": m.expert_groups if has_groups else None,
        "moe_router_group_topk": m.chosen_expert_groups if has_groups else None,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
        "moe_shared_expert_overlap": True,
    }


def _latent(m: ModelSpec) -> dict[str, Any]:
    yarn = m.rotation.stretch
    has_yarn = isinstance(yarn, Yarn)
    if not has_yarn:
        yarn = _NO_YARN
    return {
        "q_lora_rank": m.q_lora_rank or None,
        "kv_lora_rank": m.kv_lora_rank,
        "qk_head_dim": m.qk_nope_head_dim,
        "qk_pos_emb_head_dim": m.qk_rope_head_dim,
        "v_head_dim": m.v_head_dim,
        "rope_type": "yarn" if has_yarn else "rope",
        "rotary_base": m.rotation.rope_theta,
        "rotary_scaling_factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_position_embeddings,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }


class JoinedFiles(SafeTensorIO):
    """Files whose tensors hold several of the model, or have other names: of models that also read images, of gpt-oss.

    `check_checkpoint` has found them all.
    """

    def __init__(self, folder: str, model: ModelSpec):
        super().__init__(folder)
        self._inner_of: dict[str, tuple[str, Inner]] = {}
        self._file_of: dict[str, Path] = {}
        for file in weight_files(Path(folder)):
            for key, stored in read_safetensors_header(file).items():
                self._file_of[key] = file
                self._inner_of |= {inner.name: (key, inner) for inner in inner_tensors(model, key, stored.shape)}

    def load_some_hf_weight(self, hf_weight_names: list[str]) -> dict[str, Tensor]:
        """Loads tensors by name. From a layer's experts it reads only the requested rows."""
        keys = {self._inner_of[name][0] for name in hf_weight_names}
        keys |= {key.removesuffix(BLOCKS) + SCALES for key in keys if key.endswith(BLOCKS)}
        with ExitStack() as opened:
            files = {
                file: opened.enter_context(safe_open(file, framework="pt", device="cpu"))
                for file in {self._file_of[key] for key in keys}
            }
            parts = {key: files[self._file_of[key]].get_slice(key) for key in keys}
            return {name: _inner(parts, *self._inner_of[name]) for name in hf_weight_names}


def _inner(parts: Mapping[str, Any], key: str, inner: Inner) -> Tensor:
    """Reads a tensor of the model. `parts`: the stored tensors by key, which are read when they are indexed."""
    if key.endswith(BLOCKS):
        expert = inner.first // inner.rows
        bits = mxfp4_rows(
            parts[key][expert].reshape(inner.rows, -1).numpy(), parts[key.removesuffix(BLOCKS) + SCALES][expert].numpy()
        )
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    shape = parts[key].get_shape()
    if len(shape) == len(inner.shape):
        return parts[key][:]
    expert, row = divmod(inner.first, prod(shape[1:-1]))
    if len(inner.shape) == 1:
        return parts[key][expert]
    if inner.is_turned:
        expert, column = inner.expert_and_column(shape[2])
        return parts[key][expert, :, column : column + inner.rows].T.contiguous()
    return parts[key][expert, row : row + inner.rows]


class Bfloat16Files(SafeTensorIO):
    """Files of an FP8 checkpoint. FP8 matrices are returned as bfloat16, other tensors unchanged.

    `check_checkpoint` has found their scales.
    """

    def __init__(self, folder: str, block: tuple[int, int]):
        """`block`: rows and columns of one scale's block."""
        super().__init__(folder)
        self._block = block

    def load_some_hf_weight(self, hf_weight_names: list[str]) -> dict[str, Tensor]:
        """Loads tensors by name, FP8 matrices as bfloat16."""
        stored = super().load_some_hf_weight(hf_weight_names)
        matrices = [name for name, tensor in stored.items() if tensor.dtype is torch.float8_e4m3fn]
        scales = super().load_some_hf_weight([scale_of(name) for name in matrices])
        return stored | {name: self._as_bfloat16(stored[name], scales[scale_of(name)]) for name in matrices}

    def _as_bfloat16(self, matrix: Tensor, scales: Tensor) -> Tensor:
        bits = bfloat16_bits(matrix.view(torch.uint8).numpy(), scales.numpy(), self._block)
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


class Int4Files(SafeTensorIO):
    """Files whose matrices are 4-bit integers. They are returned as bfloat16, other tensors unchanged.

    `check_checkpoint` has found their scales.
    """

    def load_some_hf_weight(self, hf_weight_names: list[str]) -> dict[str, Tensor]:
        """Loads tensors by name, 4-bit matrices as bfloat16."""
        stored = set(self.load_hf_weight_names())
        matrices = [name for name in hf_weight_names if name + PACKED in stored]
        found = super().load_some_hf_weight([name for name in hf_weight_names if name not in matrices])
        packed = super().load_some_hf_weight([name + PACKED for name in matrices])
        scales = super().load_some_hf_weight([int4_scale_of(name) for name in matrices])
        for name in matrices:
            bytes_ = packed[name + PACKED].view(torch.uint8).numpy()
            bits = bfloat16_rows(bytes_, scales[int4_scale_of(name)].float().numpy())
            found[name] = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        return found
