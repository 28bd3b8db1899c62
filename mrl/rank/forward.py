"""Passes micro-batches through Megatron's pipeline schedules, forward only or with backward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.utils import unwrap_model
from torch import Tensor

from mrl.algo.aggregate import MetricParts, merge, to_floats
from mrl.algo.losses import LossInputs, LossOutput, policy_loss
from mrl.algo.plain import Denominators, PolicyLossParameters
from mrl.data.batch import TrainBatch
from mrl.model.layout import TrainLayout
from mrl.platforms.packs import Pack, for_attention, tie
from mrl.rank.cut import MicroRows
from mrl.rank.host_arrays import brought
from mrl.rank.logprob import lean_log_probs, top_tokens
from mrl.rank.packing import MicroBatch, MicroBatches, Shape, micro_batch
from mrl.rank.row_results import RowResult


def on_device(inputs: MicroBatch[np.ndarray], device: torch.device) -> MicroBatch[Tensor]:
    """Returns the arrays as tensors on `device`."""
    return inputs.mapped(lambda array: brought(array, device))


def laid_out(
    batch: TrainBatch,
    micros: Sequence[MicroRows],
    shape: Shape,
    layout: TrainLayout,
    device: torch.device,
    drafts: bool = False,
) -> MicroBatches:
    """Returns this rank's inputs for each micro-batch of a pass. `drafts`: as for `micro_batch`."""
    context_rank = mpu.get_context_parallel_rank()

    def lay_out(number: int) -> MicroBatch[Tensor]:
        micro = micros[number]
        return on_device(micro_batch(batch, micro.rows, shape, context_rank, micro.is_filler, drafts), device)

    return MicroBatches(len(micros), lay_out, layout.pipeline if layout.virtual_pipeline > 1 else 1)


def packing_of(inputs: MicroBatch[Tensor]) -> PackedSeqParams | None:
    """Returns where sequences begin and end, for attention and rotary positions. Pads belong to their sequence's end.

    Transformer Engine refuses context parallelism without starts of padded sequences (2.11, context_parallel.py:
    "cu_seqlens_padded can not be None"). It compares them with the others in every layer. The comparison costs nothing
    if both are one tensor. For integers in the same memory torch answers without reading them
    (ATen/native/cuda/Equal.cpp).
    """
    if inputs.sequence_starts is None:
        return None
    positions = inputs.position_ids.flatten()
    if inputs.positions is not None:  # each token has angles of its own (mrl.rank.vision)
        positions = torch.arange(len(positions), device=positions.device)
    starts = tie(inputs.sequence_starts, Pack(inputs.lengths, positions))
    of_attention = for_attention(starts)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=of_attention,
        cu_seqlens_kv=of_attention,
        cu_seqlens_q_padded=starts,
        cu_seqlens_kv_padded=starts,
        max_seqlen_q=inputs.longest,
        max_seqlen_kv=inputs.longest,
    )


@dataclass(frozen=True)
class TokenOutputs:
    """Outputs of tokens, all [rows, response_length], with whole sequences on every rank."""

    log_probs: Tensor  # float32; zero where nothing was computed
    entropy: Tensor  # the same
    computed: Tensor  # bool; as MicroBatch.has_log_probs
    # [rows, response_length, k]: other tokens at the token's position, int64, and their log-probs
    top_ids: Tensor | None = None
    top_log_probs: Tensor | None = None

    def with_top_on_host(self) -> "TokenOutputs":
        """Returns the outputs with the likeliest tokens on the host. They are many times as large as the others."""
        if self.top_ids is None:
            return self
        return replace(self, top_ids=self.top_ids.int().cpu(), top_log_probs=self.top_log_probs.cpu())

    def detached(self) -> "TokenOutputs":
        """Returns the outputs without the graph."""
        return TokenOutputs(self.log_probs.detach(), self.entropy.detach(), self.computed)


@dataclass(frozen=True)
class LossResult:
    """The result of one micro-batch of an update.

    `outputs`: its forward's outputs of tokens, if no earlier pass had computed them.
    """

    metrics: MetricParts
    outputs: TokenOutputs | None


@dataclass(frozen=True)
class Likeliest:
    """The number of likeliest tokens that are wanted for each token, among ids below a bound."""

    count: int
    below: int


Outputs = Callable[[Tensor, torch.nn.Module, MicroBatch], Any]  # outputs of tokens, from the last chunk's result
Beside = Callable[[Tensor, MicroBatch], None]  # gets the last chunk's result, whose graph it leaves alone
LastStage = Callable[[MicroBatch, Any], tuple[Tensor, object]]  # -> the tensor to run backward on, the object to return
# a context that is entered while one chunk computes one micro-batch
Around = Callable[[torch.nn.Module, MicroBatch], AbstractContextManager]


def nothing_around(model: torch.nn.Module, inputs: MicroBatch) -> AbstractContextManager:
    """Returns an empty context, for passes that nothing observes."""
    return nullcontext()


def log_prob_pass(
    chunks: list[torch.nn.Module],
    micro_batches: MicroBatches,
    vocab_size: int,
    around: Around = nothing_around,
    likeliest: Likeliest | None = None,
) -> list[TokenOutputs]:
    """Runs the forward only. Returns the outputs of each micro-batch on the last stage, an empty list elsewhere.

    `likeliest`: further tokens whose log-probs are wanted for each token.
    """

    def keep(inputs: MicroBatch, outputs: TokenOutputs) -> tuple[Tensor, TokenOutputs]:
        return outputs.log_probs.new_zeros(()), outputs.with_top_on_host()

    with torch.no_grad(), evaluating(chunks):
        outputs = _outputs_of(vocab_size, likeliest=likeliest)
        return run_pass(chunks, micro_batches, outputs, keep, around, forward_only=True)


@contextmanager
def evaluating(chunks: list[torch.nn.Module]) -> Iterator[None]:
    """Makes the chunks compute as engines do: everything that changes activations only for training is left out."""
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk in chunks:
            chunk.train()


def loss_pass(
    chunks: list[torch.nn.Module],
    micro_batches: MicroBatches,
    vocab_size: int,
    parameters: PolicyLossParameters,
    denominators: Denominators,
    around: Around = nothing_around,
    beside: Beside | None = None,
) -> list[LossResult]:
    """Runs forward and backward of a mini-batch on this rank.

    Adds the gradient of the mini-batch's loss to the buffers and sums it over all ranks that share a weight.

    `denominators` count the whole mini-batch, so the gradient does not depend on how it is cut. Megatron's schedule
    divides each loss by the number of micro-batches and multiplies it by the context-parallel size, and its reduction
    of gradients divides by data-parallel times context-parallel ranks. What is left is undone here, so gradients are
    sums: micro-batches times data-parallel ranks. `beside` gets the last stage's hidden states of each micro-batch.
    Returns the result of each micro-batch on the last stage, an empty list elsewhere.
    """
    undo_means = len(micro_batches) * mpu.get_data_parallel_world_size()

    def loss(inputs: MicroBatch, outputs: TokenOutputs) -> tuple[Tensor, LossResult]:
        result = _loss(parameters, inputs, outputs, denominators)
        return result.loss * undo_means, LossResult(
            result.metrics, outputs.detached() if inputs.old_log_probs is None else None
        )

    of_policy = _outputs_of(vocab_size, entropy_has_gradient=bool(parameters.entropy_coeff))

    def outputs(hidden: Tensor, model: torch.nn.Module, inputs: MicroBatch) -> TokenOutputs:
        if beside is not None:
            beside(hidden, inputs)
        return of_policy(hidden, model, inputs)

    return run_pass(chunks, micro_batches, outputs, loss, around, forward_only=False)


def _outputs_of(vocab_size: int, entropy_has_gradient: bool = False, likeliest: Likeliest | None = None) -> Outputs:
    """Returns the function that computes log-probs and entropies from hidden states."""

    def outputs(hidden: Tensor, model: torch.nn.Module, inputs: MicroBatch) -> TokenOutputs:
        return token_outputs(hidden, head_weight(model), inputs, vocab_size, entropy_has_gradient, likeliest)

    return outputs


def _loss(
    parameters: PolicyLossParameters, inputs: MicroBatch, outputs: TokenOutputs, denominators: Denominators
) -> LossOutput:
    given = LossInputs(
        outputs.log_probs,
        inputs.old_log_probs,
        inputs.advantages,
        inputs.response_mask,
        outputs.entropy,
        ref_log_probs=inputs.ref_log_probs,
        teacher_log_probs=inputs.teacher_log_probs,
        teacher_top_log_probs=inputs.teacher_top_log_probs,
        top_log_probs=outputs.top_log_probs,
        weights=inputs.loss_weights,
        selected=inputs.selected,
    )
    return policy_loss(parameters, given, denominators)


def run_pass(
    chunks: list[torch.nn.Module],
    micro_batches: MicroBatches,
    outputs: Outputs,
    last_stage: LastStage,
    around: Around,
    forward_only: bool,
) -> list:
    """Runs Megatron's schedule. Returns the objects that `last_stage` returns for each micro-batch, an empty list on
    other stages.
    """

    def forward_step(data_iterator: Iterator[MicroBatch], model: torch.nn.Module):
        inputs = next(data_iterator)
        with around(model, inputs):
            is_half = next(model.parameters()).dtype is not torch.float32
            output = model(
                inputs.input_ids,
                inputs.position_ids,
                None,
                packed_seq_params=packing_of(inputs),
                **_KEEP_DTYPE[is_half],
            )
        return output, lambda last: last_stage(inputs, outputs(last, model, inputs))

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches) for _ in chunks] if len(chunks) > 1 else iter(micro_batches),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=micro_batches[0].input_ids.shape[1],  # not used: shapes travel between stages with each micro-batch
        micro_batch_size=micro_batches[0].input_ids.shape[0],
        forward_only=forward_only,
    )


# The 16-bit wrapper would copy the last stage's result to float32; log-probs convert one block at a time.
_KEEP_DTYPE = {True: {"fp32_output": False}, False: {}}


def return_hidden_states(chunks: list[torch.nn.Module]) -> None:
    """Makes the last stage's chunk return hidden states [batch, length, hidden] instead of logits."""
    for chunk in unwrap_model(chunks):
        if chunk.post_process:
            chunk.output_layer.forward = _gathered_tokens(chunk.config.sequence_parallel)


def _gathered_tokens(sequence_parallel: bool) -> Callable:
    """Returns what takes the place of an output layer: it returns its input, with all tokens on every tensor rank."""

    def forward(hidden: Tensor, *_, **__) -> tuple[Tensor, None]:
        return with_all_tokens(hidden, sequence_parallel), None

    return forward


def with_all_tokens(hidden: Tensor, sequence_parallel: bool) -> Tensor:
    """Returns hidden states [length, batch, hidden] with all tokens on every tensor rank.

    Backward sums the ranks' gradients, each of which comes from that rank's part of the vocabulary.
    """
    if sequence_parallel:
        return gather_from_sequence_parallel_region(hidden)
    whole = copy_to_tensor_model_parallel_region(hidden)
    if whole.requires_grad:
        # Megatron sums a copy of a gradient that is not contiguous, and continues with the original
        # (0.16.1, tensor_parallel/mappings.py: _reduce)
        whole.register_hook(Tensor.contiguous)
    return whole


def head_weight(model: torch.nn.Module) -> Tensor:
    """Returns the output layer's weight in the last chunk of a model."""
    core = unwrap_model(model)
    if core.share_embeddings_and_output_weights:
        return core.shared_embedding_or_output_weight()
    return core.output_layer.weight


def token_outputs(
    hidden: Tensor,
    weight: Tensor,
    inputs: MicroBatch,
    vocab_size: int,
    entropy_has_gradient: bool,
    likeliest: Likeliest | None = None,
) -> TokenOutputs:
    """Returns log-probs and entropies of the response tokens at this context-parallel rank's positions.

    `hidden`: [batch, length, hidden]. A teacher's tokens in `inputs` get log-probs too.
    """
    predicting = hidden.flatten(0, 1)[inputs.predictors]
    group = mpu.get_tensor_model_parallel_group()
    log_probs, entropy = lean_log_probs(
        predicting, weight, _targets(inputs), inputs.token_temperature, vocab_size, group, entropy_has_gradient
    )
    top = {}
    if inputs.teacher_top_ids is not None:
        top["top_log_probs"] = whole_sequences(log_probs[:, 1:], inputs)
        log_probs = log_probs[:, 0]
    if likeliest is not None:
        found = top_tokens(
            predicting, weight, inputs.token_temperature, vocab_size, group, likeliest.count, likeliest.below
        )
        top["top_ids"], top["top_log_probs"] = (whole_sequences(values, inputs) for values in found)
    log_probs, entropy = (whole_sequences(values, inputs) for values in (log_probs, entropy))
    return TokenOutputs(log_probs, entropy, inputs.has_log_probs, **top)


def _targets(inputs: MicroBatch) -> Tensor:
    """Returns token ids whose log-probs are wanted: [tokens], or [tokens, 1 + k] with a teacher's tokens after the
    token.
    """
    if inputs.teacher_top_ids is None:
        return inputs.targets
    top_ids = inputs.teacher_top_ids.flatten(0, 1)[inputs.slots].long()
    return torch.cat([inputs.targets[:, None], top_ids], 1)


def whole_sequences(values: Tensor, inputs: MicroBatch) -> Tensor:
    """Returns [rows, response_length, ...] from [tokens, ...] of this rank and of the other context-parallel ranks.

    Every one of them then computes the same loss over whole sequences. Backward gives each rank the gradient of its own
    tokens, once.
    """
    mask = inputs.response_mask
    flat = values.new_zeros(mask.numel(), *values.shape[1:]).index_put((inputs.slots,), values)
    group = mpu.get_context_parallel_group()
    if dist.get_world_size(group) > 1:
        flat = reduce_from_tensor_model_parallel_region(flat, group=group)
    return flat.view(*mask.shape, *values.shape[1:])


def of_rows(micros: Sequence[MicroRows], outputs: Sequence[TokenOutputs]) -> RowResult:
    """Joins the outputs of micro-batches without fillers."""
    kept = [(micro.rows, each) for micro, each in zip(micros, outputs, strict=True) if not micro.is_filler]
    rows = [np.zeros(0, np.int64), *(rows for rows, _ in kept)]
    log_probs = [np.zeros(0, np.float32), *(each.log_probs[each.computed].cpu().numpy() for _, each in kept)]
    entropy = merge(to_floats({"entropy": (each.entropy.sum(), each.computed.sum())}) for _, each in kept)
    top_ids = top_log_probs = None
    if any(each.top_ids is not None for _, each in kept):
        top_ids = np.concatenate([each.top_ids[each.computed.cpu()].numpy() for _, each in kept])
        top_log_probs = np.concatenate([each.top_log_probs[each.computed.cpu()].numpy() for _, each in kept])
    mean = entropy.get("entropy", (0.0, 0.0))
    return RowResult(np.concatenate(rows), np.concatenate(log_probs), mean, top_ids, top_log_probs)
