"""Rotary positions of a pack whose sequences the host knows are to the bit those of Megatron's loop over its sequences,
which reads where they begin from the device.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from mrl.platforms.cpu_patches import PATCHES, rows_for
from mrl.platforms.packs import Pack, for_attention, pack_of, tie
from mrl.rank.packing import kept_positions

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "hardware"))
from host_reads import HostReads

NAME = "_apply_rotary_pos_emb_thd"
WAYS = {row.devices: row.make for row in PATCHES if row.target.endswith(NAME)}
MEGATRONS = rope_utils._apply_rotary_pos_emb_thd
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
SECOND_OF_TWO = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
every_way = pytest.mark.parametrize("make", WAYS.values(), ids=lambda make: make.__name__)


def known_starts(lengths, group=ALONE) -> torch.Tensor:
    """Tied to what the host knows of them."""
    places = np.concatenate([np.arange(length) for length in lengths])
    places = places[kept_positions(np.array(lengths), group.size(), group.rank())]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return tie(starts, Pack(tuple(lengths), torch.from_numpy(places)))


def rotated(function, lengths, group=ALONE, dim=8, dtype=torch.float32, **named) -> list[torch.Tensor]:
    """The rotated pack and the gradient of what was rotated."""
    torch.manual_seed(0)
    angles = torch.arange(max(lengths))[:, None, None, None] * torch.linspace(1, 0.1, 8)
    pack = torch.randn(sum(lengths) // group.size(), 3, dim, dtype=dtype, requires_grad=True)
    out = function(pack, known_starts(lengths, group), angles, cp_group=group, **named)
    out.backward(torch.randn_like(out))
    return [out.detach(), pack.grad]


def same_bits(make, lengths, **case) -> bool:
    both = rotated(make(MEGATRONS), lengths, **case), rotated(MEGATRONS, lengths, **case)
    return all(torch.equal(ours, expected) for ours, expected in zip(*both, strict=True))


@every_way
@pytest.mark.parametrize("lengths", [[3, 1, 7, 7, 2], [5], [1, 1], [4, 0, 3]])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"dim": 12},
        {"dtype": torch.bfloat16},
        {"rotary_interleaved": True},
        {"mscale": 1.25},
        {"multi_latent_attention": True},
    ],
    ids=["whole", "a part of each head", "bfloat16", "interleaved", "scaled", "latent"],
)
def test_a_pack_is_rotated_to_the_same_bits(make, lengths, case):
    assert same_bits(make, lengths, **case)


@every_way
@pytest.mark.parametrize("lengths", [[4, 8, 4], [8], [4, 4]])
def test_a_part_of_a_context_is_rotated_to_the_same_bits(make, lengths):
    assert same_bits(make, lengths, group=SECOND_OF_TWO)


@every_way
def test_nothing_is_read_from_the_device_for_it(make):
    with HostReads() as reads:
        rotated(make(MEGATRONS), [3, 1, 7], multi_latent_attention=False)
        rotated(make(MEGATRONS), [4, 8], group=SECOND_OF_TWO, multi_latent_attention=True)
    assert not reads.sites
    with HostReads() as reads:
        rotated(MEGATRONS, [3, 1, 7])
    assert reads.sites.total() == 2


@every_way
def test_starts_that_nobody_knows_are_megatrons_to_read(make):
    starts, pack, angles = torch.tensor([0, 2, 5]), torch.randn(5, 1, 8), torch.randn(3, 1, 1, 8)
    ours, expected = (function(pack, starts, angles, cp_group=ALONE) for function in (make(MEGATRONS), MEGATRONS))
    assert torch.equal(ours, expected)


def test_every_device_has_one_way():
    assert sorted(device for devices in WAYS for device in devices) == ["cpu", "cuda", "npu"]
    assert [row.target.rpartition(".")[2] for row in rows_for("npu")] == [NAME]


class OnNpu:
    """Starts as they lie there; whoever reads them fails."""

    device = torch.device("meta")
    dtype = torch.int32

    def __init__(self, device: str):
        self.device = SimpleNamespace(type=device)


def test_attention_of_mindspeed_is_given_starts_on_the_host():
    pack = Pack((3, 4, 0), torch.zeros(7))
    there = tie(OnNpu("npu"), pack)
    given = for_attention(there)
    assert given.tolist() == [0, 3, 7, 7] and given.dtype is torch.int32 and given.device.type == "cpu"
    assert pack_of(given) is pack
    elsewhere = tie(OnNpu("cuda"), pack)
    assert for_attention(elsewhere) is elsewhere and pack_of(elsewhere) is pack
    unknown = OnNpu("npu")
    assert for_attention(unknown) is unknown
