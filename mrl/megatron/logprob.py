"""Log-probabilities and entropy from hidden states and the output layer's weight, without ever holding the logits.

The logits of all tokens would be the largest tensor of a step ([8192, 151936] in float32 is 5 GB, and a softmax holds
several). Here they are made a chunk of tokens at a time, reduced, dropped, and made again in the backward pass. The
vocabulary may be divided over ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.units import MIB

CHUNK_BYTES = 128 * MIB  # of one chunk of float32 logits; two tensors of this size are alive at a time


@dataclass(frozen=True)
class _Head:
    """This rank's rows of the output layer and what is asked of it. `weight` [vocab / tp, hidden]."""

    weight: Tensor
    width: int  # rows of `weight` that are real; the rest is padding
    first: int  # token id of the first row
    chunk: int  # tokens
    group: dist.ProcessGroup

    def chunks(self, tokens: int) -> Iterator[slice]:
        for start in range(0, tokens, self.chunk):
            yield slice(start, min(start + self.chunk, tokens))

    def logits(self, hidden: Tensor, temperature: Tensor) -> Tensor:
        """[tokens, width] float32, divided by the temperature [tokens]; a tensor that the caller may overwrite."""
        return (hidden @ self.weight[: self.width].t()).float().div_(temperature[:, None])

    def owned(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each target and whether it is here; where it is not, the column means nothing."""
        local = targets - self.first
        return local.clamp(0, self.width - 1), (local >= 0) & (local < self.width)


class _LeanLogProbs(torch.autograd.Function):
    """With z = logits / temperature, p = softmax(z): log p of the target, and entropy H = -sum p log p.

    d log p_target / d z = onehot - p;  d H / d z = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        head: _Head,
        entropy_has_gradient: bool,
    ):
        peak, sums = (
            hidden.new_zeros(len(hidden), dtype=torch.float32),
            hidden.new_zeros((3, len(hidden)), dtype=torch.float32),
        )
        for part in head.chunks(len(hidden)):
            z = head.logits(hidden[part], temperature[part])
            peak[part] = z.amax(-1)
            column, here = head.owned(targets[part])
            sums[2, part] = torch.where(here, z.gather(-1, column[:, None])[:, 0], 0.0)
            weights = z.sub_(peak[part][:, None]).exp()
            sums[0, part] = weights.sum(-1)
            sums[1, part] = torch.linalg.vecdot(weights, z)
            del z, weights  # before the next chunk's are made
        log_sum_exp, entropy, target_logit = _over_ranks(peak, sums, head.group)
        ctx.save_for_backward(hidden, weight, targets, temperature, log_sum_exp, entropy)
        ctx.head, ctx.entropy_has_gradient = head, entropy_has_gradient
        if not entropy_has_gradient:
            ctx.mark_non_differentiable(entropy)
        return target_logit - log_sum_exp, entropy

    @staticmethod
    def backward(ctx, grad_log_probs: Tensor, grad_entropy: Tensor):
        hidden, weight, targets, temperature, log_sum_exp, entropy = ctx.saved_tensors
        head: _Head = ctx.head
        grad_hidden = torch.empty_like(hidden)
        grad_weight = _WeightGradient(weight, head.width)
        for part in head.chunks(len(hidden)):
            log_p = head.logits(hidden[part], temperature[part]).sub_(log_sum_exp[part][:, None])
            scale = -grad_log_probs[part][:, None]
            if ctx.entropy_has_gradient:
                p = log_p.exp()
                grad = p.mul_(log_p.add_(entropy[part][:, None]).mul_(-grad_entropy[part][:, None]).add_(scale))
            else:
                grad = log_p.exp_().mul_(scale)
            column, here = head.owned(targets[part])
            grad.scatter_add_(-1, column[:, None], torch.where(here, grad_log_probs[part], 0.0)[:, None])
            del log_p
            grad_weight.add(grad.div_(temperature[part][:, None]), hidden[part])
            torch.mm(grad.to(hidden.dtype), weight[: head.width], out=grad_hidden[part])
            del grad
        return grad_hidden, grad_weight.result(), None, None, None, None


def _over_ranks(peak: Tensor, sums: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """log-sum-exp, entropy and target logit, all [tokens], from each rank's peak [tokens] and sums [3, tokens]: of
    exp(z - peak), of exp(z - peak) (z - peak), and the target's z on the rank that has it, 0 on the others.
    """
    highest = peak.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    shift = peak - highest
    factor = shift.exp()
    total = torch.stack([sums[0] * factor, (sums[1] + sums[0] * shift) * factor, sums[2]])
    dist.all_reduce(total, group=group)
    log_total = total[0].log()
    return highest + log_total, log_total - total[1] / total[0], total[2]


@cache
def _writes_float32(device: str, dtype: torch.dtype) -> bool:
    """Whether a product of 16-bit factors can be summed and written in float32 there, at the factors' full rate.

    Tried once: of torch's own devices CUDA can, and torch_npu makes `is_cuda` true of its tensors.
    """
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    total = torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())


class _WeightGradient:
    """Sum over chunks of grad^T hidden [width, hidden], into Megatron's gradient buffer where the weight has one.

    The buffer is float32 and exists anyway; a sum of its own would be as large as the layer and, in 16 bits, lose
    digits with every chunk. So would a product that is rounded to 16 bits before it is added.
    """

    def __init__(self, weight: Tensor, width: int):
        self.width, self.dtype = width, weight.dtype
        self.buffer = getattr(weight, "main_grad", None)
        self.total = (
            torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if self.buffer is None else self.buffer
        )

    def add(self, grad: Tensor, hidden: Tensor) -> None:
        """`grad` [tokens, width] float32, `hidden` [tokens, hidden], any float dtype."""
        into = self.total[: self.width]
        if hidden.dtype is not torch.float32 and _writes_float32(str(into.device), hidden.dtype):
            torch.addmm(into, grad.to(hidden.dtype).t(), hidden, out_dtype=torch.float32, out=into)
        else:
            into.addmm_(grad.t(), hidden.float())

    def result(self) -> Tensor | None:
        """What autograd adds to the weight's own gradient; None when it is in the buffer already."""
        return self.total.to(self.dtype) if self.buffer is None else None


def lean_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    vocab_size: int,
    group: dist.ProcessGroup,
    entropy_has_gradient: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, in nats, float32, both [tokens].

    `hidden` [tokens, hidden], any float dtype, are the states that predict `targets` [tokens] (token ids), the same on
    every rank of
    `group`, the tensor-parallel group; `weight` [padded_vocab / tp, hidden] is this rank's block of rows. `temperature`
    [tokens] divides the logits, as sampling does; rows past `vocab_size` are padding and have no probability. `chunk`:
    tokens whose logits are alive at a time; None: as many as fit CHUNK_BYTES.

    The gradient of `hidden` is this rank's share, to be summed over the group. The weight's gradient goes straight into
    `weight.main_grad` where there is one. Gradients flow from the entropy only when asked for.
    """
    rows = weight.shape[0]
    first = dist.get_rank(group) * rows
    width = min(rows, vocab_size - first)  # the layout pads by less than one block, so every rank has a real row
    head = _Head(weight.detach(), width, first, chunk or max(1, CHUNK_BYTES // (4 * width)), group)
    return _LeanLogProbs.apply(hidden, weight, targets, temperature.float(), head, entropy_has_gradient)
