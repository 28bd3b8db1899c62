"""What ranks compute with is read off what Megatron built, not off what was asked for."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mrl.rank.gradient_sums import SWITCH, add_within_products, added_within_products, for_megatron, is_wanted
from mrl.rank.kernels import kernels_text
from mrl.rank.logprob import head_gradient_text


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
    said = kernels_text([first, last], optimizer(None, adam))
    assert (
        said == "layers of torch, attention FlashAttention, experts GroupedExperts of GroupedProduct, norm RMSNorm, "
        "optimizer AdamW of torch"
    )


def test_a_dense_rank_without_an_optimizer_has_neither():
    assert kernels_text([chunk(a__core_attention=FlashAttention())], optimizer()) == (
        "layers of torch, attention FlashAttention, optimizer none"
    )


class Fused(nn.Linear):
    """Of Transformer Engine's modules what is asked here: they have the switch, and are made with it off."""

    def __init__(self, *buffers: torch.dtype | None, learns: bool = True):
        super().__init__(4, 4, dtype=torch.bfloat16)
        self.fuse_wgrad_accumulation = False
        self.requires_grad_(learns)
        for number, kind in enumerate(buffers):
            weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16), requires_grad=learns)
            self.register_parameter("weight" if not number else f"weight{number}", weight)
            if kind is not None:
                weight.main_grad = torch.zeros(4, 4, dtype=kind)


@pytest.mark.parametrize(
    ("module", "fused"),
    [
        (Fused(torch.float32), True),
        (Fused(torch.float32, torch.float32), True),
        (Fused(torch.bfloat16), False),
        (Fused(None), False),
        (Fused(torch.float32, None), False),
        (Fused(torch.float32, learns=False), False),
    ],
    ids=["one weight", "experts", "a buffer in 16 bits", "no buffer", "an expert without", "frozen"],
)
def test_gradients_are_added_within_the_product_where_their_buffers_are_float32(module, fused):
    """A bias beside the weight has no such buffer and does not matter."""
    chunks = [nn.ModuleDict({"layer": module, "plain": nn.Linear(4, 4)})]
    add_within_products(chunks)
    assert getattr(module, SWITCH) is fused and not hasattr(chunks[0]["plain"], SWITCH)
    assert added_within_products(chunks) == (int(fused), 1)


def test_what_becomes_of_gradients_in_16_bits_is_said():
    model = nn.ModuleDict({"layer": Fused(torch.float32), "output_layer": nn.Linear(4, 8, dtype=torch.bfloat16)})
    add_within_products([model])
    assert kernels_text([model], optimizer()) == (
        "layers of torch, gradients of 1 of 1 fused modules added in float32 within the product, that of the head by "
        "a product in float32 of bfloat16, which this device cannot sum in float32, optimizer none"
    )
    assert head_gradient_text(torch.zeros(2, 2)) == "a product in float32"


@pytest.mark.parametrize(("given", "wanted"), [({}, True), ({"gradient_accumulation_fusion": True}, True),
                                               ({"gradient_accumulation_fusion": False}, False)])  # fmt: skip
def test_megatrons_switch_is_taken_for_what_it_says_and_kept_from_megatron(given, wanted):
    """Which would build its output layer with Apex alone."""
    assert is_wanted(given) is wanted
    assert for_megatron(given | {"moe_permute_fusion": True}) == {"moe_permute_fusion": True}
