"""Keeps gradients from the lookup of the model's padding token, as `padding_idx` of torch.nn.Embedding does.

All families pass config.json's pad_token_id to their embedding in transformers. Such a row of zeros, for example of an
added token, would otherwise get gradients that RMSNorm multiplies by 1/sqrt(eps), and clipping would then shrink those
of all other weights. The looked-up value is the stored row. A tied row still has the output layer's gradient.
"""

from functools import partial

from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from torch import Tensor


def keep_gradients_from(embedding: VocabParallelEmbedding, row: int) -> None:
    """Keeps the gradient of all later lookups of `row`, a token of the whole vocabulary, at zero."""
    embedding.register_forward_hook(partial(_masked, row))


def _masked(row: int, embedding: VocabParallelEmbedding, inputs: tuple[Tensor], output: Tensor) -> None:
    if not output.requires_grad:
        return
    (tokens,) = inputs  # [batch, seq]
    is_padding = tokens == row
    if embedding.reduce_scatter_embeddings:  # the output is this rank's part of the sequence, [part, batch, hidden]
        group = embedding.tp_group
        is_padding = is_padding.T.chunk(group.size())[group.rank()]
    output.register_hook(lambda gradient: gradient.masked_fill(is_padding[..., None], 0))
