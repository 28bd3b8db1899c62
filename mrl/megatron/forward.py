"""One pass of micro-batches through Megatron's pipeline schedules, forward only or with backward."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mrl.algo.aggregate import Denominators
from mrl.algo.losses import LossInputs, LossOutput, PolicyLossParameters, policy_loss
from mrl.algo.metrics import MetricParts
from mrl.megatron.batching import MicroArrays
from mrl.megatron.logprob import vocab_parallel_log_probs


@dataclass(frozen=True)
class MicroInputs:
    """MicroArrays as tensors on the device."""

    input_ids: Tensor
    predictors: Tensor
    targets: Tensor
    response_mask: Tensor
    temperature: Tensor
    old_log_probs: Tensor | None
    advantages: Tensor | None
    loss_weights: Tensor | None
    selected: Tensor | None

    @classmethod
    def of(cls, arrays: MicroArrays, device: torch.device) -> "MicroInputs":
        named = {f.name: getattr(arrays, f.name) for f in fields(cls)}
        return cls(**{k: None if v is None else torch.from_numpy(np.ascontiguousarray(v)).to(device) for k, v in named.items()})


@dataclass(frozen=True)
class TokenOutputs:
    """Both [rows, response_length], float32; whatever stands outside the response mask means nothing."""

    log_probs: Tensor
    entropy: Tensor


LastStage = Callable[[MicroInputs, TokenOutputs], tuple[Tensor, object]]  # -> what to run backward on, what to hand out


def log_prob_pass(chunks: list[torch.nn.Module], micro_inputs: list[MicroInputs], vocab_size: int) -> list[TokenOutputs]:
    """Forward only. The outputs of each micro-batch on the last stage, an empty list elsewhere."""

    def keep(inputs: MicroInputs, outputs: TokenOutputs) -> tuple[Tensor, TokenOutputs]:
        return outputs.log_probs.new_zeros(()), outputs

    with torch.no_grad():
        return _run(chunks, micro_inputs, vocab_size, keep, forward_only=True)


def loss_pass(
    chunks: list[torch.nn.Module],
    micro_inputs: list[MicroInputs],
    vocab_size: int,
    parameters: PolicyLossParameters,
    denominators: Denominators,
) -> list[MetricParts]:
    """Forward and backward. Adds the gradient of the mini-batch's loss to the buffers and sums it over all ranks that share a weight.

    `denominators` count the whole mini-batch, so the gradient does not depend on how it is cut. The schedule divides each loss by the
    number of micro-batches and the gradient reduction by the number of data-parallel ranks; the factor below takes both back.
    Returns the loss metrics of each micro-batch on the last stage, an empty list elsewhere.
    """
    undo_means = len(micro_inputs) * mpu.get_data_parallel_world_size()

    def loss(inputs: MicroInputs, outputs: TokenOutputs) -> tuple[Tensor, MetricParts]:
        result = _loss(parameters, inputs, outputs, denominators)
        return result.loss * undo_means, result.metrics

    return _run(chunks, micro_inputs, vocab_size, loss, forward_only=False)


def _loss(parameters: PolicyLossParameters, inputs: MicroInputs, outputs: TokenOutputs, denominators: Denominators) -> LossOutput:
    entropy = outputs.entropy if parameters.entropy_coeff else outputs.entropy.detach()
    given = LossInputs(
        outputs.log_probs, inputs.old_log_probs, inputs.advantages, inputs.response_mask, entropy,
        weights=inputs.loss_weights, selected=inputs.selected,
    )  # fmt: skip
    return policy_loss(parameters, given, denominators)


def _run(
    chunks: list[torch.nn.Module], micro_inputs: list[MicroInputs], vocab_size: int, last_stage: LastStage, forward_only: bool
) -> list:
    def forward_step(data_iterator: Iterator[MicroInputs], model: torch.nn.Module):
        inputs = next(data_iterator)
        positions = torch.arange(inputs.input_ids.shape[1], device=inputs.input_ids.device).expand_as(inputs.input_ids)
        output = model(inputs.input_ids, positions, None, **_KEEP_DTYPE[_is_half(model)])
        return output, lambda logits: last_stage(inputs, token_outputs(logits, inputs, vocab_size))

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_inputs) for _ in chunks] if len(chunks) > 1 else iter(micro_inputs),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_inputs),
        seq_length=micro_inputs[0].input_ids.shape[1],  # not used: shapes travel between stages with each micro-batch
        micro_batch_size=micro_inputs[0].input_ids.shape[0],
        forward_only=forward_only,
    )


# The 16-bit wrapper would copy all logits to float32; only the predicting positions are needed in it.
_KEEP_DTYPE = {True: {"fp32_output": False}, False: {}}


def _is_half(model: torch.nn.Module) -> bool:
    return next(model.parameters()).dtype is not torch.float32


def token_outputs(logits: Tensor, inputs: MicroInputs, vocab_size: int) -> TokenOutputs:
    """Log-probs and entropies of the response tokens from `logits` [rows, length, padded_vocab / tp]."""
    predicting = logits.gather(1, inputs.predictors[..., None].expand(-1, -1, logits.shape[-1]))
    group = mpu.get_tensor_model_parallel_group()
    return TokenOutputs(*vocab_parallel_log_probs(predicting, inputs.targets, inputs.temperature, vocab_size, group))
