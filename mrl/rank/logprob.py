"""Log-probabilities and entropy from hidden states and the output layer's weight, without ever holding the logits.

The logits of all tokens would be the largest tensor of a step. [8192, 151936] in float32 takes 5 GB, and a softmax
holds several. Here they are computed block by block, reduced, dropped, and recomputed in the backward pass. The
vocabulary may be divided over ranks.

A block is some tokens by some of the vocabulary. On accelerators it has all of a rank's vocabulary and as many tokens
as fit LOGIT_CHUNK, for few launches. On CPU it fits the cache, so that elementwise work costs almost nothing compared
with the products.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.model.computed_sizes import LOGIT_CHUNK
from mrl.units import MIB

# attribute of a weight whose gradient buffer Megatron reduces in its backward: mrl/rank/overlap.py
REDUCES_EARLY = "mrl_reduces_early"
# many tokens, because the weight's gradient is read and written once for each such part
_CPU_TOKENS = 2048
_CPU_BLOCK_BYTES = 8 * MIB


@dataclass(frozen=True)
class _Head:
    """This rank's rows of the output layer with the sizes of its blocks. `weight` is [vocab / tp, hidden]."""

    weight: Tensor
    width: int  # rows of `weight` that are real; the rest is padding
    first: int  # token id of the first row
    tokens: int  # in a block
    rows: int  # in a block
    group: dist.ProcessGroup

    def parts(self, tokens: int) -> Iterator[slice]:
        """Yields the tokens of each block."""
        return _slices(tokens, self.tokens)

    def blocks(self) -> Iterator[slice]:
        """Yields the rows of each block."""
        return _slices(self.width, self.rows)

    def buffer(self, tokens: int) -> Tensor:
        """Allocates float32 memory of a block's size, once instead of for each block.

        Small results between blocks stay in memory. On the CPU, the heap would keep a hole of a block's size below each
        of them.
        """
        size = min(tokens, self.tokens) * min(self.width, self.rows)
        return torch.empty(size, dtype=torch.float32, device=self.weight.device)

    def logits(self, hidden: Tensor, temperature: Tensor, block: slice, buffer: Tensor, scratch: Tensor) -> Tensor:
        """Returns logits [tokens, rows] in float32 in `buffer`, divided by the temperature [tokens].

        `scratch`: more memory, which a 16-bit product overwrites.
        """
        logits = _matrix(buffer, len(hidden), block.stop - block.start)
        product = logits
        if hidden.dtype is not torch.float32:
            product = _matrix(scratch.view(hidden.dtype), *logits.shape)
        torch.mm(hidden, self.weight[block].t(), out=product)
        if product.device.type == "cpu":  # there a division of mixed types converts into memory of its own
            product = logits.copy_(product)
        return torch.div(product, temperature[:, None], out=logits)

    def owned(self, targets: Tensor, block: slice) -> tuple[Tensor, Tensor]:
        """Returns each target's column in the block and whether it is there. The column of an absent target is
        meaningless.
        """
        local = targets - self.first - block.start
        width = block.stop - block.start
        return local.clamp(0, width - 1), (local >= 0) & (local < width)


def _matrix(buffer: Tensor, rows: int, columns: int) -> Tensor:
    return buffer[: rows * columns].view(rows, columns)


def _slices(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _block_shape(weight: Tensor, width: int) -> tuple[int, int]:
    """Returns tokens and rows of a block on the weight's device."""
    if weight.device.type != "cpu":
        return max(1, LOGIT_CHUNK // (4 * width)), width
    rows = min(width, _CPU_BLOCK_BYTES // (4 * _CPU_TOKENS))
    return max(_CPU_TOKENS, _CPU_BLOCK_BYTES // (4 * rows)), rows


class _LeanLogProbs(torch.autograd.Function):
    """Log-probs and entropies of tokens. The backward pass recomputes the logits, block by block.

    With z = logits / temperature and p = softmax(z): log p of each target, and entropy H = -sum p log p. `targets`
    [tokens, k].

    d log p_target / d z = onehot - p; d H / d z = -p (log p + H).
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
        peak = hidden.new_zeros(len(hidden), dtype=torch.float32)
        sums = hidden.new_zeros((2, len(hidden)), dtype=torch.float32)
        target_logits = hidden.new_zeros(targets.shape, dtype=torch.float32)
        buffers = head.buffer(len(hidden)), head.buffer(len(hidden))
        for part in head.parts(len(hidden)):
            by_block = []
            for block in head.blocks():
                z = head.logits(hidden[part], temperature[part], block, *buffers)
                column, here = head.owned(targets[part], block)
                target_logits[part] += torch.where(here, z.gather(-1, column), 0.0)
                by_block.append(_block_sums(z, buffers[1]))
            peak[part], sums[:, part] = _of_blocks(by_block)
        log_sum_exp, entropy, target_logits = _over_ranks(peak, sums, target_logits, head.group)
        ctx.save_for_backward(hidden, weight, targets, temperature, log_sum_exp, entropy)
        ctx.head = head
        ctx.entropy_has_gradient = entropy_has_gradient
        if not entropy_has_gradient:
            ctx.mark_non_differentiable(entropy)
        return target_logits - log_sum_exp[:, None], entropy

    @staticmethod
    def backward(ctx, grad_log_probs: Tensor, grad_entropy: Tensor):
        hidden, weight, targets, temperature, log_sum_exp, entropy = ctx.saved_tensors
        head: _Head = ctx.head
        # by logit, not by logit / temperature: divided here, where they are few
        of_targets = grad_log_probs / temperature[:, None]
        of_entropy = grad_entropy / temperature
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:  # no gradient if adapters are trained instead of the weights
            grad_weight = _WeightGradient(weight, head.width)
        # once for both products, where both take 16 bits
        rounds = head.rows >= head.width and _writes_float32(str(hidden.device), hidden.dtype)
        needs_other = ctx.entropy_has_gradient or hidden.dtype is not torch.float32
        buffer = head.buffer(len(hidden))
        other = head.buffer(len(hidden) if needs_other else 0)
        for part in head.parts(len(hidden)):
            grad_part = _HiddenGradient(grad_hidden[part], several=head.rows < head.width)
            for block in head.blocks():
                z = head.logits(hidden[part], temperature[part], block, buffer, other)
                log_p = z.sub_(log_sum_exp[part][:, None])
                scale = -of_targets[part].sum(-1, keepdim=True)
                if ctx.entropy_has_gradient:
                    p = torch.exp(log_p, out=_matrix(other, *log_p.shape))
                    grad = p.mul_(log_p.add_(entropy[part][:, None]).mul_(-of_entropy[part][:, None]).add_(scale))
                else:
                    grad = log_p.exp_().mul_(scale)
                column, here = head.owned(targets[part], block)
                grad.scatter_add_(-1, column, torch.where(here, of_targets[part], 0.0))
                if rounds:
                    grad = grad.to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight.add(block, grad, hidden[part])
                grad_part.add(grad, weight[block])
            grad_part.finish()
        of_weight = None
        if grad_weight is not None:
            of_weight = grad_weight.result()
        return grad_hidden, of_weight, None, None, None, None


def _block_sums(z: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the peak [tokens] of a block's logits z, and two sums [2, tokens].

    The sums are those of exp(z - peak) and of exp(z - peak) (z - peak). Overwrites z and `scratch`.
    """
    peak = z.amax(-1)
    weights = torch.exp(z.sub_(peak[:, None]), out=_matrix(scratch, *z.shape))
    return peak, torch.stack([weights.sum(-1), weights.mul_(z).sum(-1)])


def _of_blocks(by_block: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Combines peaks [tokens] and sums [2, tokens] of all blocks."""
    peaks = torch.stack([peak for peak, _ in by_block])
    of_blocks = torch.stack([own for _, own in by_block], 1)
    peak = peaks.amax(0)
    return peak, _at_peak(of_blocks, peaks - peak).sum(1)


def _at_peak(sums: Tensor, shift: Tensor) -> Tensor:
    """Converts `sums` [2, ...] to a higher peak. `shift` [...]: own peak minus the higher one."""
    factor = shift.exp()
    return torch.stack([sums[0] * factor, (sums[1] + sums[0] * shift) * factor])


def _over_ranks(peak: Tensor, sums: Tensor, targets: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-sum-exp and entropy [tokens], and target logits [tokens, k], over all ranks.

    Takes each rank's peak [tokens] and sums [2, tokens] from `_of_blocks`. `targets` has the logits of the rank's own
    targets, and 0 for the others.
    """
    highest = peak.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    total = torch.cat([_at_peak(sums, peak - highest), targets.t()])
    dist.all_reduce(total, group=group)
    log_total = total[0].log()
    return highest + log_total, log_total - total[1] / total[0], total[2:].t()


class _HiddenGradient:
    """Sums grad @ weight [tokens, hidden] over a part's blocks, in float32 if there are `several` in 16 bits."""

    def __init__(self, into: Tensor, several: bool):
        self.into = into
        self._is_first = True
        self._total = torch.empty_like(into, dtype=torch.float32) if several else into

    def add(self, grad: Tensor, weight: Tensor) -> None:
        """Adds a block. `grad` is [tokens, rows], `weight` [rows, hidden], both of any float dtype."""
        dtype = self._total.dtype
        if self._is_first:
            torch.mm(grad.to(dtype), weight.to(dtype), out=self._total)
        else:
            self._total.addmm_(grad.to(dtype), weight.to(dtype))
        self._is_first = False

    def finish(self) -> None:
        """Writes the sum to its destination."""
        if self._total is not self.into:
            self.into.copy_(self._total)


@cache
def _writes_float32(device: str, dtype: torch.dtype) -> bool:
    """Tells whether the device can write a product of 16-bit factors in float32, at full rate. It is tried once.

    Among torch's own devices CUDA can. `is_cuda` cannot tell, because torch_npu makes it true for its own tensors.
    """
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    total = torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())


def head_gradient_text(weight: Tensor) -> str:
    """Describes how the gradient of an output layer's weight is multiplied and summed.

    A float32 product of 16-bit factors takes many times as long.
    """
    if weight.dtype is torch.float32:
        return "a product in float32"
    kind = str(weight.dtype).removeprefix("torch.")
    if _writes_float32(str(weight.device), weight.dtype):
        return f"a product of {kind} into float32"
    return f"a product in float32 of {kind}, which this device cannot sum in float32"


class _WeightGradient:
    """Sums grad^T hidden [width, hidden] over chunks in float32, in Megatron's gradient buffer if that is float32.

    Such a buffer exists anyway, and a separate sum is as large as the layer. A 16-bit buffer would lose digits with
    every chunk. Then a separate sum is kept, and autograd adds it once. A product that is rounded to 16 bits before it
    is added would lose digits too.
    """

    def __init__(self, weight: Tensor, width: int):
        self.width = width
        self.dtype = weight.dtype
        buffer = getattr(weight, "main_grad", None)
        self.buffer = buffer if buffer is not None and buffer.dtype is torch.float32 else None
        self.reduces_early = getattr(weight, REDUCES_EARLY, False)
        self.total = (
            torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if self.buffer is None else self.buffer
        )

    def add(self, block: slice, grad: Tensor, hidden: Tensor) -> None:
        """Adds grad^T hidden for `block`.

        `grad` is [tokens, rows] float32 or of `hidden`'s dtype, `hidden` [tokens, hidden] of any float dtype.
        """
        into = self.total[block]
        if hidden.dtype is not torch.float32 and _writes_float32(str(into.device), hidden.dtype):
            torch.addmm(into, grad.to(hidden.dtype).t(), hidden, out_dtype=torch.float32, out=into)
        else:
            into.addmm_(grad.float().t(), hidden.float())

    def result(self) -> Tensor | None:
        """Returns the gradient that autograd adds to the weight's own: all of it if there is no buffer.

        Returns None if the buffer has it already, or zeros if Megatron expects a gradient before it reduces the
        buffer.
        """
        if self.buffer is None:
            return self.total.to(self.dtype)
        if self.reduces_early:
            return torch.zeros_like(self.buffer, dtype=self.dtype)
        return None


def lean_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    vocab_size: int,
    group: dist.ProcessGroup,
    entropy_has_gradient: bool = False,
    block: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each target, shaped like `targets`, and each distribution's entropy [tokens].

    Both are float32, in nats.

    `hidden` [tokens, hidden], any float dtype, are the states that predict `targets`. `targets` are token ids:
    [tokens], or several for each state, [tokens, k]. Both are equal on every rank of `group`, the tensor-parallel
    group. `weight` [padded_vocab / tp, hidden] is this rank's block of rows. `temperature` [tokens] divides the logits,
    as sampling does. Rows past `vocab_size` are padding and have no probability. `block`: tokens, and rows of `weight`,
    whose logits exist at a time; None: the best size for the device.

    The gradient of `hidden` is this rank's share, to be summed over the group. The weight's gradient is added directly
    to `weight.main_grad` if that is float32. Gradients flow from the entropy only if `entropy_has_gradient`.
    """
    head = _head(weight, vocab_size, group, block)
    several = targets if targets.dim() == 2 else targets[:, None]
    log_probs, entropy = _LeanLogProbs.apply(hidden, weight, several, temperature.float(), head, entropy_has_gradient)
    return log_probs.view(targets.shape), entropy


def _head(weight: Tensor, vocab_size: int, group: dist.ProcessGroup, block: tuple[int, int] | None) -> _Head:
    rows = weight.shape[0]
    first = dist.get_rank(group) * rows
    width = min(rows, vocab_size - first)  # the layout pads by less than one block, so every rank has a real row
    return _Head(weight.detach(), width, first, *(block or _block_shape(weight, width)), group)


@torch.no_grad()
def top_tokens(
    hidden: Tensor,
    weight: Tensor,
    temperature: Tensor,
    vocab_size: int,
    group: dist.ProcessGroup,
    count: int,
    below: int,
    block: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the `count` likeliest token ids under `below`, likeliest first, int64, and their log-probs.

    Both are [tokens, count]. Other arguments are as in `lean_log_probs`. Each rank finds its own candidates. So beside
    a block of logits only `count` candidates for each token and rank are in memory.
    """
    head = _head(weight, vocab_size, group, block)
    temperature = temperature.float()
    peak = hidden.new_zeros(len(hidden), dtype=torch.float32)
    sums = hidden.new_zeros((2, len(hidden)), dtype=torch.float32)
    logits = hidden.new_full((len(hidden), count), -math.inf, dtype=torch.float32)
    ids = torch.zeros((len(hidden), count), dtype=torch.int64, device=hidden.device)
    buffers = head.buffer(len(hidden)), head.buffer(len(hidden))
    for part in head.parts(len(hidden)):
        by_block = []
        for number in head.blocks():
            z = head.logits(hidden[part], temperature[part], number, *buffers)
            first = head.first + number.start
            if first < below:
                found = z[:, : below - first]
                best = found.topk(min(count, found.shape[1]), -1)
                top_log_probs = torch.cat([logits[part], best.values], 1)
                logits[part], ids[part] = _best(top_log_probs, torch.cat([ids[part], best.indices + first], 1), count)
            by_block.append(_block_sums(z, buffers[1]))
        peak[part], sums[:, part] = _of_blocks(by_block)
    log_sum_exp, _, _ = _over_ranks(peak, sums, sums.new_zeros(len(hidden), 0), group)
    of_ranks = [[torch.empty_like(own) for _ in range(dist.get_world_size(group))] for own in (logits, ids)]
    for gathered, own in zip(of_ranks, (logits, ids), strict=True):
        dist.all_gather(gathered, own, group=group)
    logits, ids = _best(*(torch.cat(gathered, 1) for gathered in of_ranks), count)
    return ids, logits - log_sum_exp[:, None]


def _best(logits: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    best = logits.topk(count, -1)
    return best.values, ids.gather(-1, best.indices)
