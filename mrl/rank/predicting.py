"""The layer that predicts a further token, on the ranks of the last pipeline stage: held for weight syncs, and trained.

It is Megatron's MultiTokenPredictionLayer, beside the model and with gradient buffers, optimizer and norm of its own.
So the policy's update has the same bits with and without it. Names of its parameters begin with "mtp.".
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.nn import Module

from mrl.algo.plain import FloatParts
from mrl.checkpoint.open_checkpoint import open_hf, weight_role
from mrl.config.schema import OptimConfig
from mrl.model import ModelSpec
from mrl.model.layout import TrainLayout
from mrl.model.megatron_shards import Shard
from mrl.model.registry import family_of
from mrl.platforms import Platform
from mrl.rank.forward import head_weight, packing_of, with_all_tokens
from mrl.rank.local_parameters import plain_name
from mrl.rank.logprob import lean_log_probs
from mrl.rank.optimizer import build_optimizer, build_scheduler
from mrl.rank.packing import MicroBatch
from mrl.rank.rank_load import fill


class PredictingLayer:
    """The predicting layer of one rank. Only ranks of the last pipeline stage have one.

    A response token t[j] is predicted from the policy's state of the token two before it and the token between, as
    DeepSeek-V3 does (arXiv:2412.19437, equations 21 to 25, for one further token):

        x[i] = W [norm_e(E t[i+1]); norm_h(h[i])],  p[i+2] = softmax(O norm(layer(x)[i]) / temperature)
        loss = -weight / N * sum over sampled tokens t[j] of log p[j](t[j])

    h is the policy's output after its last norm, E its embedding and O its output layer. No gradient reaches any of
    them. N counts the tokens of the whole mini-batch, over all replicas, so the gradient does not depend on how it is
    cut. As in vLLM's classes, E t[1] counts as zero at the first token for DeepSeek and GLM (deepseek_mtp.py,
    glm4_moe_mtp.py), and not for Qwen (qwen3_next_mtp.py, qwen3_5_mtp.py).
    """

    def __init__(
        self,
        layer: MultiTokenPredictionLayer,
        model: ModelSpec,
        policy: list[Module],
        platform: Platform,
        is_trained: bool,
    ):
        """`policy`: the chunks of the trained model, whose last one has the output layer here.

        Without `is_trained` the layer has no gradients, nor buffers for them.
        """
        module = Module()
        layer.requires_grad_(is_trained)
        for router in (each for each in layer.modules() if getattr(each, "expert_bias", None) is not None):
            router.expert_bias.requires_grad_(False)
        module.mtp = layer
        self._layer = layer
        self._core = unwrap_model(policy[-1])
        self._model = model
        self._forgets_second_token = family_of(model).predicting.forgets_second_token
        self._platform = platform
        self.chunk = _wrapped(module, layer.config)
        self._embedding: Tensor | None = None  # of the first stage, where that is another rank
        self.optimizer = self.scheduler = None
        self._sums = torch.zeros(2, device=platform.device)  # of losses, and tokens

    @property
    def head(self) -> Tensor:
        """The policy's output layer, [padded vocabulary / tensor ranks, hidden]."""
        return head_weight(self._core)

    def make_trained(self, optim: OptimConfig, dtype: torch.dtype, total_updates: int | None) -> None:
        """Gives the layer an optimizer. Its weights must be loaded."""
        self.optimizer = build_optimizer(optim, [self.chunk], dtype)
        self.scheduler = build_scheduler(optim, self.optimizer, total_updates)

    def begin(self) -> None:
        """Clears gradients and sums before the passes of a mini-batch."""
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._sums.zero_()

    def learn(self, hidden: Tensor, inputs: MicroBatch, scale: float) -> None:
        """Adds the gradient of one micro-batch, `scale` times the sum of its tokens' losses.

        `hidden`: [batch, length, hidden], the policy's output of which `inputs` has the tokens.
        """
        # each replica's gradient is divided by their number when they are summed
        scale *= mpu.get_data_parallel_world_size(with_context_parallel=True)
        with torch.enable_grad():
            log_probs = self.log_probs(hidden.detach(), inputs)
            loss = -log_probs.sum()
            (loss * scale).backward()
        self._sums += torch.stack([loss.detach(), loss.new_tensor(len(log_probs))])

    def log_probs(self, hidden: Tensor, inputs: MicroBatch) -> Tensor:
        """Returns log-probs of the tokens that the layer predicts at this context-parallel rank's positions, float32
        [tokens].
        """
        drafted = inputs.drafted
        predicted = self._forward(hidden, inputs)
        weight = self.head.detach()
        states = with_all_tokens(predicted, self._layer.config.sequence_parallel).transpose(0, 1).flatten(0, 1)
        group = mpu.get_tensor_model_parallel_group()
        return lean_log_probs(
            states[drafted.predictors], weight, drafted.targets, drafted.temperature, self._model.vocab_size, group
        )[0]

    def _forward(self, hidden: Tensor, inputs: MicroBatch) -> Tensor:
        """Returns the layer's output [length, batch, hidden], or the tensor rank's part with sequence parallelism."""
        layer = self._layer
        config = layer.config
        followed = self._embedded(inputs.drafted.next_ids)
        if self._forgets_second_token:
            followed = followed.masked_fill((inputs.position_ids == 0)[..., None], 0)
        pair = [states.transpose(0, 1).contiguous() for states in (followed, hidden)]
        if config.sequence_parallel:
            pair = [scatter_to_sequence_parallel_region(states) for states in pair]
        packing = packing_of(inputs)
        # recomputing whole layers would save nothing: backward follows at once, so only this layer's activations live
        return layer._proj_and_transformer_layer(
            hidden_states=pair[1],
            decoder_input=pair[0],
            attention_mask=None,
            context=None,
            context_mask=None,
            rotary_pos_emb=self._angles(pair[1], packing),
            rotary_pos_cos=None,
            rotary_pos_sin=None,
            attention_bias=None,
            inference_params=None,
            packed_seq_params=packing,
            sequence_len_offset=None,
        )

    def _angles(self, hidden: Tensor, packing) -> Tensor | None:
        """Returns the angles of the policy's own layers. Latent attention makes its own."""
        core = self._core
        if core.config.multi_latent_attention:
            return None
        length = core.rotary_pos_emb.get_rotary_seq_len(None, core.decoder, hidden, core.config, packing)
        return core.rotary_pos_emb(length, packed_seq=packing is not None, cp_group=None)

    @torch.no_grad()
    def _embedded(self, ids: Tensor) -> Tensor:
        """Returns the embeddings of tokens, [batch, length, hidden], on every tensor rank."""
        weight = self._embedding
        if weight is None:
            weight = self._core.embedding.word_embeddings.weight
        first = mpu.get_tensor_model_parallel_rank() * len(weight)
        is_here = (ids >= first) & (ids < first + len(weight))
        rows = F.embedding((ids - first) * is_here, weight).masked_fill(~is_here[..., None], 0)
        if mpu.get_tensor_model_parallel_world_size() > 1:
            dist.all_reduce(rows, group=mpu.get_tensor_model_parallel_group())
        return rows

    def take_embedding(self, weight: Tensor) -> None:
        """Uses a copy of the first stage's embedding until `release_embedding`."""
        self._embedding = weight

    def release_embedding(self) -> None:
        """Gives back the copy, which would lie beside engines of the same devices."""
        self._embedding = None

    def sum_gradients(self) -> None:
        """Sums gradients over replicas, and those of norms over the tensor ranks that share sequences."""
        self.chunk.finish_grad_sync()
        _allreduce_non_tensor_model_parallel_grads([self.chunk], self._layer.config)
        for module in self.chunk.modules():
            if getattr(module, "expert_bias", None) is not None:
                module.local_tokens_per_expert.zero_()

    def squares(self) -> Tensor:
        """Returns the sum of squares of this rank's part of the gradient, each element counted on one rank."""
        self.optimizer.prepare_grads()
        total = torch.zeros((), device=self._platform.device)
        for part in _with_parameters(self.optimizer):
            for gradient in part.get_main_grads_for_grad_norm():
                total += gradient.float().square().sum()
        return total

    def step(self, norm: float, clip: float) -> None:
        """Clips by a `norm` over all ranks and applies the gradient.

        With one that is not finite the layer stays as it is. Its Adam counts the step, because a checkpoint has one
        count for all parameters.
        """
        for part in _with_parameters(self.optimizer):
            parameters = part.get_parameters()
            fused = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            if not math.isfinite(norm):
                for parameter in parameters:
                    gradient = getattr(parameter, "decoupled_grad" if fused else "grad", None)
                    if gradient is not None:
                        gradient.zero_()
                for group in part.param_groups:
                    group["lr"] = 0.0  # moments would still move it; the schedule sets the next rate
            elif clip > 0:
                clip_grad_by_total_norm_fp32(parameters, clip, norm, fused)
        self.optimizer.step_with_ready_grads()
        self.scheduler.step(1)

    def metrics(self) -> FloatParts:
        """Returns the mean loss of the tokens that this replica's passes have seen."""
        dist.all_reduce(self._sums, group=mpu.get_context_parallel_group())
        loss, tokens = self._sums.tolist()
        return {"actor/mtp_loss": (loss, tokens)}


def _wrapped(module: Module, config: TransformerConfig) -> DistributedDataParallel:
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return DistributedDataParallel(config, ddp, module)


def join_making_trained(policy: list[Module], optim: OptimConfig, dtype: torch.dtype) -> None:
    """Does what a rank without the layer does while others call `make_trained`: Megatron exchanges the kinds of
    parameters over all ranks, wherever an optimizer is built.
    """
    build_optimizer(optim, [_wrapped(Module(), policy[0].config)], dtype)


def load_from_files(chunk: Module, shards: Mapping[str, Shard], path: str) -> None:
    """Fills a predicting layer from the checkpoint in `path`. `shards`: its parameters by Megatron name.

    Raises EnvironmentFault for files that lack one, RuntimeError for a layer with other parameters.
    """
    parameters = {plain_name(name): parameter for name, parameter in chunk.named_parameters()}
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if shapes != {name: shard.local_shape for name, shard in shards.items()}:
        raise RuntimeError(f"the predicting layer is not as its description: it has {shapes}")
    source = open_hf(Path(path), predicting=True)
    reader = source.reader()
    try:
        with torch.no_grad():
            for name, shard in shards.items():
                fill(reader, weight_role(shard), shard.pieces, parameters[name].data)
    finally:
        reader.close()


def _with_parameters(optimizer) -> Iterator:
    return (part for part in optimizer.chained_optimizers if not getattr(part, "is_stub_optimizer", False))


def embedding_on_last_stage(policy: list[Module], layer: PredictingLayer | None, layout: TrainLayout) -> None:
    """Gives the last stage's layer the first stage's embedding. Collective over both; all ranks may call it."""
    if layout.pipeline == 1 or mpu.get_pipeline_model_parallel_rank() not in (0, layout.pipeline - 1):
        return
    group = mpu.get_embedding_group()
    if layer is None:
        weight = unwrap_model(policy[0]).embedding.word_embeddings.weight.data
    else:
        weight = torch.empty_like(layer.head.data)
    dist.broadcast(weight, dist.get_global_rank(group, 0), group)
    if layer is not None:
        layer.take_embedding(weight)
