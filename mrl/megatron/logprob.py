"""Log-probabilities and entropy from logits that are sharded over the vocabulary, without gathering them."""

import torch
import torch.distributed as dist
from torch import Tensor


class _VocabParallelLogProb(torch.autograd.Function):
    """With z = logits / temperature, p = softmax(z): log p of the target, and entropy H = -sum p log p.

    d log p_target / d logits = (onehot - p) / temperature;  d H / d logits = -p (log p + H) / temperature.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, temperature: Tensor, start: int, width: int, group) -> tuple[Tensor, Tensor]:
        z = logits[..., :width].float() / temperature
        peak = z.amax(-1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        local = targets - start
        here = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1)
        target_logit = torch.where(here, z.gather(-1, local[..., None]).squeeze(-1) - peak, 0.0)
        shifted = z - peak[..., None]
        weights = shifted.exp()
        sums = torch.stack([weights.sum(-1), (weights * shifted).sum(-1), target_logit])
        dist.all_reduce(sums, group=group)
        log_total = sums[0].log()
        log_probs = sums[2] - log_total
        entropy = log_total - sums[1] / sums[0]
        ctx.save_for_backward(logits, temperature, peak + log_total, entropy, local, here)
        ctx.width = width
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad_log_probs: Tensor, grad_entropy: Tensor):
        logits, temperature, log_sum_exp, entropy, local, here = ctx.saved_tensors
        log_p = logits[..., : ctx.width].float() / temperature - log_sum_exp[..., None]
        p = log_p.exp()
        grad = -p * (grad_log_probs[..., None] + grad_entropy[..., None] * (log_p + entropy[..., None]))
        grad.scatter_add_(-1, local[..., None], torch.where(here, grad_log_probs, 0.0)[..., None])
        padding = logits.shape[-1] - ctx.width
        grad = torch.nn.functional.pad(grad / temperature, (0, padding)) if padding else grad / temperature
        return grad.to(logits.dtype), None, None, None, None, None


def vocab_parallel_log_probs(logits: Tensor, targets: Tensor, temperature: Tensor, vocab_size: int, group) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, in nats, float32, both [batch, length].

    `logits` [batch, length, padded_vocab / tp] is this rank's block of columns, any float dtype; `targets` [batch, length] are token ids;
    `temperature` [batch] divides the logits, as sampling does; columns past `vocab_size` are padding and have no probability. `group` is
    the tensor-parallel group. Gradient flows to the logits from both outputs, computed in float32; every rank of the group must use the
    outputs alike, as Megatron's vocabulary-parallel cross entropy also assumes.
    """
    columns = logits.shape[-1]
    start = dist.get_rank(group) * columns
    width = min(columns, vocab_size - start)  # the layout pads by less than one block, so every rank has a real column
    return _VocabParallelLogProb.apply(logits, targets, temperature.float()[:, None, None], start, width, group)
