"""Moves weights between Hugging Face checkpoints and Megatron models.

mbridge moves them, by the weight map (mapped_bridge.py). Another bridge would be another class in this file.
"""

import difflib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Protocol

import torch
from mbridge.core import bridge as mbridge_base
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.nn import Module, Parameter

from mrl.config.schema import ActorConfig, ModelConfig
from mrl.errors import ConfigError
from mrl.model import ModelSpec, load_model_spec
from mrl.model.adapters import Lora, adapted_layers
from mrl.model.hf_files import check_checkpoint
from mrl.model.layout import TrainLayout, padded_vocab_size
from mrl.model.registry import weight_map
from mrl.platforms.layers import layers
from mrl.rank.gated_delta import set_delta_kernel
from mrl.rank.gradient_sums import add_within_products, for_megatron, is_wanted
from mrl.rank.lora_layers import attach, hidden
from mrl.rank.mapped_bridge import MappedBridge, bridge_config
from mrl.rank.padding_row import keep_gradients_from
from mrl.rank.rotary import set_rotation

if TYPE_CHECKING:
    from mrl.rank.tower_training import TowerMaker

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_REPLICATED = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
_FORMATS = {**DTYPES, "fp32": torch.float32}  # number formats as they are passed to fields of Megatron's classes


class Bridge(Protocol):
    """The bridge that the actor needs. All methods are collective: every rank calls them, in the same order."""

    def build_model(self, is_trained: bool = True) -> list[torch.nn.Module]:
        """Returns the model chunks of this rank, without weights.

        With `is_trained` they are wrapped for data-parallel training. Otherwise they have no gradients.
        """

    def build_predicting_layer(self) -> MultiTokenPredictionLayer:
        """Returns the layer that predicts a further token, without weights, on a rank of the last pipeline stage.

        Chunks must be built. It is as the last of their layers with keys and values.
        """

    def load_hf(self, path: str) -> None:
        """Fills the chunks from the safetensors files in `path`.

        Raises EnvironmentFault when they are not this model's.
        """

    def export_hf(self, change: Callable[[Tensor], Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, full tensor) of every weight on every rank, in the model's dtype.

        A tensor is valid until the next one is requested. `change` maps each of a rank's parameters, at its turn, to
        the tensor that is exported instead.
        """


@dataclass
class MBridge:
    """mbridge 0.15.1 with transformers 5 and Megatron-core 0.16.1. Megatron's groups must exist before it is made."""

    model_config: ModelConfig
    actor_config: ActorConfig
    model: ModelSpec
    layout: TrainLayout
    deterministic: bool = False  # Megatron's own switch, in addition to the platform's
    seed: int = 0  # for the initial values of adapters
    has_value_head: bool = False  # a critic has one instead of the output layer

    def __post_init__(self) -> None:
        self.dtype = DTYPES[self.model_config.dtype]
        pad_to = None
        if padded_vocab_size(self.model.vocab_size, self.layout.tensor) != self.model.vocab_size:
            pad_to = self.layout.tensor
        hf_config = bridge_config(self.model)
        if self.has_value_head:
            hf_config.tie_word_embeddings = False  # tying would need an output layer
        self._bridge = MappedBridge(hf_config, dtype=self.dtype, make_vocab_size_divisible_by=pad_to)
        self._chunks: list[torch.nn.Module] = []
        overrides = checked_overrides(
            "model.override_transformer_config", self.model_config.override_transformer_config, TransformerConfig
        )
        if layers() == "transformer_engine":
            overrides = for_megatron(overrides)
        ours = _transformer_config(self.model, self.layout) | {"deterministic_mode": self.deterministic}
        self._bridge.set_extra_args(**ours | _without_overlap(overrides) | overrides)
        if layers() == "torch":
            self._use_torch_layers(overrides)

    def _use_torch_layers(self, overrides: dict[str, Any]) -> None:
        from mrl.rank import torch_spec

        self._bridge.set_extra_args(**torch_spec.CONFIG_WITHOUT_TRANSFORMER_ENGINE | overrides)
        self._bridge.has_vp_stage = True  # mbridge sets it in the method that this class replaces

        def layers_of(vp_stage: int | None = None) -> Any:
            block = torch_spec.decoder_block_spec(self._bridge.config, vp_stage, self.model.linear_by_kind)
            if self.model.wide_qk_norm:
                block = torch_spec.with_wide_norms(block)
            if self.model.attention_sinks:
                block = torch_spec.with_sinks(block, self.model)
            if self.model.clamped_experts:
                block = torch_spec.with_clamped_experts(block)
            return block

        self._bridge._get_transformer_layer_spec = layers_of

    def build_model(self, is_trained: bool = True) -> list[torch.nn.Module]:
        ddp = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True}
        ddp |= checked_overrides(
            "actor.override_ddp_config", self.actor_config.override_ddp_config, DistributedDataParallelConfig
        )
        callbacks = [_make_constants_parameters, _mark_expert_parameters, _mark_replicated_parameters, _mark_sinks]
        if not self.model.is_latent:
            callbacks.append(partial(set_rotation, self.model))
        if self.model.pad_token_id is not None:
            callbacks.append(partial(_keep_gradients_from_padding, self.model.pad_token_id))
        lora = self.actor_config.lora.adapters
        if lora and is_trained:
            callbacks.insert(0, partial(self._attach_adapters, lora, count()))
        if self.has_value_head:
            callbacks.insert(0, put_head)
        tower = self._tower_maker()
        if tower is not None:
            callbacks.append(tower.put)
        with redirect_stdout(sys.stderr):  # it prints parameter counts
            self._chunks = self._bridge.get_model(
                wrap_with_ddp=is_trained,
                bf16=self.dtype is torch.bfloat16,
                ddp_config=ddp,
                data_parallel_random_init=False,
                post_model_creation_callbacks=callbacks,
            )
        if tower is not None:
            tower.restore_buffers()
        set_delta_kernel(self._chunks, self.model_config.gated_delta)
        # Megatron's wrapper of a bfloat16 model rounds routers' constants, and would make them float32 only when loaded
        for router in chain.from_iterable(map(_routers_with_constants, self._chunks)):
            router.expert_bias.data = router.expert_bias.data.float()
        if not is_trained:
            for chunk in self._chunks:
                chunk.requires_grad_(False)
        elif is_wanted(self.model_config.override_transformer_config):
            add_within_products(self._chunks)
        return self._chunks

    def build_predicting_layer(self) -> MultiTokenPredictionLayer:
        config = copy(self._bridge.config)
        if self.model.is_moe:  # routers' losses are the policy's, and Megatron's table of them has its layers alone
            config.moe_router_load_balancing_type, config.moe_aux_loss_coeff = "none", 0.0
            config.moe_z_loss_coeff = None
        last = unwrap_model(self._chunks[-1])
        block = self._all_layers()
        norm = block.layer_norm
        attending = max(set(range(self.model.num_layers)) - set(self.model.linear_layers))
        inner = block.layer_specs[attending]
        parts = MultiTokenPredictionLayerSubmodules(norm, norm, _column_parallel(), inner, norm)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        layer = MultiTokenPredictionLayer(config, parts, vp_stage=getattr(last, "vp_stage", None), pg_collection=groups)
        layer = layer.to(next(last.parameters()).device, self.dtype)
        for callback in (_make_constants_parameters, _mark_expert_parameters, _mark_replicated_parameters):
            callback(layer)
        for router in _routers_with_constants(layer):
            router.expert_bias.data = router.expert_bias.data.float()
        return layer

    def _all_layers(self) -> TransformerBlockSubmodules:
        """Returns the layers of the whole model. A last stage may have none of its own."""
        own = self._bridge.config
        self._bridge.config = copy(own)
        self._bridge.config.pipeline_model_parallel_size = 1
        self._bridge.config.virtual_pipeline_model_parallel_size = None
        self._bridge.config.pipeline_model_parallel_layout = None
        try:
            return self._bridge._get_transformer_layer_spec()
        finally:
            self._bridge.config = own

    def _tower_maker(self) -> "TowerMaker | None":
        if self.model.trained_tower is None:
            return None
        from mrl.rank.tower_training import TowerMaker  # imports transformers' models that see

        return TowerMaker(self.model_config.path, self.model.trained_tower, self.dtype)

    def _attach_adapters(self, lora: Lora, numbers: Iterator[int], chunk: torch.nn.Module, **_: Any) -> None:
        """Attaches adapters to a chunk. `numbers` yields the chunks' numbers in the order in which they are made."""
        number = next(numbers)
        layers = adapted_layers(self.model, self.layout, torch.distributed.get_rank(), lora)
        own = [layer for layer in layers if layer.vp_chunk == number]
        attach(chunk, own, lora, self._bridge.config, self.seed, self.actor_config.lora.dropout)

    def load_hf(self, path: str) -> None:
        own = load_model_spec(path)
        stored = replace(self.model, fp8_block=own.fp8_block, int4_group=own.int4_group, is_mxfp4=own.is_mxfp4)
        check_checkpoint(path, stored)
        with torch.no_grad(), hidden(self._chunks), head_hidden(self._chunks):
            # one parameter after the other, because changes may make them larger
            self._bridge.load_weights(self._chunks, path, memory_efficient=stored.is_quantised)

    def export_hf(self, change: Callable[[Tensor], Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        seen: set[str] = set()
        with torch.no_grad(), hidden(self._chunks), _changed(change):
            for name, tensor in self._bridge.export_weights(self._chunks):
                if name not in seen:  # tied embeddings come once from the first stage and once from the last
                    seen.add(name)
                    yield name, tensor


def _column_parallel() -> type:
    """Returns the class of column-parallel layers in the installed kind of layers."""
    if layers() == "torch":
        return ColumnParallelLinear
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider().column_parallel_linear()


@contextmanager
def _changed(change: Callable[[Tensor], Tensor] | None) -> Iterator[None]:
    """Makes mbridge export changed parameters, one after the other, until the block ends."""
    if change is None:
        yield
        return
    to_all_stages = mbridge_base.broadcast_from_megatron_pp  # gets every parameter; None for one of another stage
    mbridge_base.broadcast_from_megatron_pp = lambda own: to_all_stages(own if own is None else change(own))
    try:
        yield
    finally:
        mbridge_base.broadcast_from_megatron_pp = to_all_stages


def _transformer_config(model: ModelSpec, layout: TrainLayout) -> dict[str, Any]:
    """Returns the settings that differ from mbridge's defaults in every run."""
    # engines have no dropout, whatever config.json says of pretraining
    config: dict[str, Any] = {
        "sequence_parallel": layout.sequence_parallel,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if len({count for stage in layout.chunk_layers for count in stage}) > 1:
        config["pipeline_model_parallel_layout"] = layout.pipeline_rows()
    if model.is_moe:
        # RL moves the policy by the reward alone: nothing else may push the router, and its choice must not depend on
        # rounding.
        config |= {
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_z_loss_coeff": None,
            "moe_router_bias_update_rate": 0.0,
            "moe_shared_expert_intermediate_size": model.shared_expert_intermediate_size or None,
            "moe_shared_expert_gate": weight_map(model).has("mlp.shared_experts.gate_weight"),
        }
    if len(model.moe_layers) not in (0, model.num_layers):
        config["moe_layer_freq"] = [int(layer in model.moe_layers) for layer in range(model.num_layers)]
    return config


def _keep_gradients_from_padding(token: int, chunk: torch.nn.Module, pre_process: bool, **_: Any) -> None:
    if pre_process:  # a last stage has the tied weight for its output layer alone
        keep_gradients_from(chunk.embedding.word_embeddings, token)


def _make_constants_parameters(chunk: torch.nn.Module, **_: Any) -> None:
    """Makes the constants that routers choose by parameters without gradient. Megatron keeps them in buffers.

    So they are found with the other weights. Neither data parallelism nor the optimizer uses them.
    """
    for router in _routers_with_constants(chunk):
        constants = router._buffers.pop("expert_bias")
        router.register_parameter("expert_bias", torch.nn.Parameter(constants, requires_grad=False))


def _routers_with_constants(chunk: torch.nn.Module) -> list[TopKRouter]:
    return [module for module in chunk.modules() if isinstance(module, TopKRouter) and module.expert_bias is not None]


def _mark_expert_parameters(chunk: torch.nn.Module, **_: Any) -> None:
    """Marks experts, as Megatron does only with expert parallelism.

    Without the mark, replicas over tensor ranks are never summed.
    """
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False


def _mark_replicated_parameters(chunk: torch.nn.Module, **_: Any) -> None:
    """Unmarks down projections of latent attention, which every tensor rank has whole.

    Transformer Engine marks all weights of its linear layers as cut over tensor ranks. With the mark, each rank's copy
    counts in the gradient norm, and an export joins the copies.
    """
    for name, parameter in chunk.named_parameters():
        if name.endswith(_REPLICATED):
            parameter.tensor_model_parallel = False


def _mark_sinks(chunk: torch.nn.Module, **_: Any) -> None:
    """Marks the sinks of attention as cut over tensor ranks. Without the mark, a gradient norm counts those of the
    first rank alone, and an export has no others.
    """
    for name, parameter in chunk.named_parameters():
        if name.endswith(".softmax_offset"):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)


def _without_overlap(overrides: dict[str, Any]) -> dict[str, Any]:
    """Returns what keeps shared experts from overlapping the exchange of tokens, where Megatron refuses it.

    Bridges switch it on.
    """
    has_other_exchange = overrides.get("moe_token_dispatcher_type", "alltoall") != "alltoall"
    if has_other_exchange or "shared_experts" in (overrides.get("recompute_modules") or ()):
        return {"moe_shared_expert_overlap": False}
    return {}


def checked_overrides(key: str, overrides: dict[str, Any], config_class: type) -> dict[str, Any]:
    """Checks `overrides` against the fields of the dataclass `config_class`. Returns them with torch's number formats.

    `key` is their key in the YAML. Raises ConfigError that lists every unknown name with the nearest real ones.
    """
    known = [f.name for f in fields(config_class)]
    unknown = [name for name in overrides if name not in known]
    if unknown:
        lines = [
            f"  {name}: did you mean {' or '.join(difflib.get_close_matches(name, known) or ['none of its fields'])}?"
            for name in unknown
        ]
        raise ConfigError(f"{key}: not a field of Megatron's {config_class.__name__}:\n" + "\n".join(lines))
    formats = {f.name for f in fields(config_class) if f.type is torch.dtype}
    return {name: _FORMATS.get(value, value) if name in formats else value for name, value in overrides.items()}


class ValueHead(Module):
    """A critic's last layer: to one number, without bias, complete on every tensor-parallel rank. It begins at zero.

    So initial values are zero for every token, in any layout, and all later values are learnt. Under sequence
    parallelism each rank multiplies its own tokens. Megatron sums the weight's gradients as it does for norms.
    """

    def __init__(self, output_layer: Module, sequence_parallel: bool) -> None:
        """Copies number format, device and width from `output_layer`, which the head replaces."""
        super().__init__()
        self.weight = Parameter(output_layer.weight.new_zeros(1, output_layer.weight.shape[1]))
        self.weight.sequence_parallel = sequence_parallel
        self._sequence_parallel = sequence_parallel

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Returns float32 [length, batch, 1], all tokens on every tensor-parallel rank.

        Takes [length or part, batch, hidden]. Values are computed in float32 whatever the weights are. In bfloat16, its
        8 bits could not tell near values apart.
        """
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self._sequence_parallel:
            # every rank continues with the same loss, so each takes the gradient of its own tokens, once
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def put_head(chunk: Module, post_process: bool, config: Any, **_: Any) -> None:
    """Replaces a chunk's output layer by a value head if it has one. It is a callback of mbridge."""
    if post_process:
        chunk.output_layer = ValueHead(chunk.output_layer, config.sequence_parallel)


@contextmanager
def head_hidden(chunks: Iterable[Module]) -> Iterator[None]:
    """Hides the value head, until the block ends, from code that walks the parameters by the checkpoint's names."""
    heads = [module for chunk in chunks for module in chunk.modules() if isinstance(module, ValueHead)]
    weights = [head._parameters.pop("weight") for head in heads]
    try:
        yield
    finally:
        for head, weight in zip(heads, weights, strict=True):
            head.register_parameter("weight", weight)
