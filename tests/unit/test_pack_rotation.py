"""Rotary positions of a pack, gathered at once, are to the bit those of Megatron's loop over its sequences."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from mrl.platforms.cpu_patches import PATCHES

ROW = next(row for row in PATCHES if row.target.endswith("_apply_rotary_pos_emb_thd"))
MEGATRONS = rope_utils._apply_rotary_pos_emb_thd
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
SECOND_OF_TWO = SimpleNamespace(size=lambda: 2, rank=lambda: 1)


def rotated(function, lengths, group=ALONE, dim=8, dtype=torch.float32, **named) -> list[torch.Tensor]:
    """The rotated pack and the gradient of what was rotated."""
    torch.manual_seed(0)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    angles = torch.arange(max(lengths))[:, None, None, None] * torch.linspace(1, 0.1, 8)
    pack = torch.randn(sum(lengths) // group.size(), 3, dim, dtype=dtype, requires_grad=True)
    out = function(pack, starts, angles, cp_group=group, **named)
    out.backward(torch.randn_like(out))
    return [out.detach(), pack.grad]


@pytest.mark.parametrize("lengths", [[3, 1, 7, 7, 2], [5], [1, 1], [4, 0, 3]])
@pytest.mark.parametrize(
    "case",
    [{}, {"dim": 12}, {"dtype": torch.bfloat16}, {"rotary_interleaved": True}, {"mscale": 1.25}],
    ids=["whole", "a part of each head", "bfloat16", "interleaved", "scaled"],
)
def test_a_pack_is_rotated_to_the_same_bits(lengths, case):
    for ours, expected in zip(rotated(ROW.make(MEGATRONS), lengths, **case), rotated(MEGATRONS, lengths, **case),
                              strict=True):  # fmt: skip
        assert torch.equal(ours, expected)


def test_a_part_of_a_context_is_rotated_as_megatron_does():
    ours, expected = (rotated(f, [4, 8, 4], SECOND_OF_TWO) for f in (ROW.make(MEGATRONS), MEGATRONS))
    assert torch.equal(ours[0], expected[0])
