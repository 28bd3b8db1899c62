"""What ranks compute with is read off what Megatron built, not off what was asked for."""

from types import SimpleNamespace

import torch
from torch import nn

from mrl.megatron.kernels import kernels_in_words


class FlashAttention(nn.Module):
    pass


class GroupedProduct(nn.Module):
    pass


class GroupedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_fc1 = GroupedProduct()


def chunk(**parts: nn.Module) -> nn.Module:
    """A model of one layer; names as in Megatron's, `self_attention.core_attention`."""
    model = nn.Module()
    for name, part in parts.items():
        outer = model
        for step in (path := name.split("__"))[:-1]:
            if not hasattr(outer, step):
                outer.add_module(step, nn.Module())
            outer = getattr(outer, step)
        outer.add_module(path[-1], part)
    return model


def optimizer(*inner) -> SimpleNamespace:
    return SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=one) for one in inner])


def test_parts_are_named_by_their_classes_wherever_a_chunk_has_them():
    first = chunk(layer__self_attention__core_attention=FlashAttention(), layer__mlp__experts=GroupedExperts())
    last = chunk(decoder__final_layernorm=nn.RMSNorm(4))
    adam = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    said = kernels_in_words([first, last], optimizer(None, adam))
    assert (
        said == "layers of torch, attention FlashAttention, experts GroupedExperts of GroupedProduct, norm RMSNorm, "
        "optimizer AdamW of torch"
    )


def test_a_dense_rank_without_an_optimizer_has_neither():
    assert kernels_in_words([chunk(a__core_attention=FlashAttention())], optimizer()) == (
        "layers of torch, attention FlashAttention, optimizer none"
    )
