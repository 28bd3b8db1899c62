"""Gated delta attention of CPU engines: transformers' rule of the same weights, however prompts are cut, and the same
bits whatever else is under way.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.engine import cpu_delta

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, WIDTH, SLOTS = 2, 6, 8, 10, 4, 9
DRAFTED = 2  # tokens of a draft, in engines that draft
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
LENGTHS = (7, 1, 30, 2)
SLOT_OF = (4, 0, 7, 2)


def drawn(drafted: int = 0) -> tuple[SimpleNamespace, tuple[Tensor, Tensor, Tensor]]:
    """A layer with states of others in its slots, and what enters it."""
    random = torch.Generator().manual_seed(0)
    layer = SimpleNamespace(
        key_dim=KEY_HEADS * KEY_DIM, value_dim=VALUE_HEADS * VALUE_DIM, head_k_dim=KEY_DIM, head_v_dim=VALUE_DIM,
        num_k_heads=KEY_HEADS, num_v_heads=VALUE_HEADS, tp_size=1,
        A_log=torch.randn(VALUE_HEADS, generator=random), dt_bias=torch.randn(VALUE_HEADS, generator=random),
        conv1d=SimpleNamespace(weight=torch.randn(CHANNELS, 1, WIDTH, generator=random)),
        kv_cache=(
            torch.randn(SLOTS, CHANNELS, WIDTH - 1 + drafted, generator=random),
            torch.randn(SLOTS, VALUE_HEADS, VALUE_DIM, KEY_DIM, generator=random),
        ),
    )  # fmt: skip
    tokens = sum(LENGTHS)
    heads = torch.randn(2, tokens, VALUE_HEADS, generator=random)
    return layer, (torch.randn(tokens, CHANNELS, generator=random), *heads)


@pytest.fixture(autouse=True)
def _states(monkeypatch):
    """Channels come before places; vLLM is not asked."""
    monkeypatch.setattr(cpu_delta, "_states", lambda layer: layer.kv_cache)


def computed(layer, inputs, lengths, slots, goes_on) -> Tensor:
    out = torch.full((sum(lengths), VALUE_HEADS, VALUE_DIM), torch.nan)
    batch = SimpleNamespace(
        num_decodes=0, num_prefills=len(lengths), has_initial_state=torch.tensor(goes_on),
        non_spec_query_start_loc=torch.tensor((0, *lengths)).cumsum(0),
        non_spec_state_indices_tensor=torch.tensor(slots),
    )  # fmt: skip
    cpu_delta._plain(layer, batch, inputs, out, torch.arange(len(out)))
    return out


def expected(layer, inputs) -> Tensor:
    """One whole sequence by transformers' functions."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    mixed, rate, step = inputs
    moved = F.conv1d(F.pad(mixed.T, (WIDTH - 1, 0))[None], layer.conv1d.weight, groups=CHANNELS)
    query, key, value = F.silu(moved)[0].T[None].split([layer.key_dim, layer.key_dim, layer.value_dim], dim=2)
    query, key = (
        x.unflatten(2, (KEY_HEADS, -1)).repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=2) for x in (query, key)
    )
    decay = -layer.A_log.exp() * F.softplus(step + layer.dt_bias)
    out, _ = torch_recurrent_gated_delta_rule(
        query, key, value.unflatten(2, (VALUE_HEADS, -1)), g=decay[None], beta=rate.sigmoid()[None],
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return out[0]


def test_sequences_are_those_of_transformers_whatever_their_slots_held():
    layer, inputs = drawn()
    found = computed(layer, inputs, LENGTHS, SLOT_OF, [False] * 4)
    parts = zip(*(x.split(LENGTHS) for x in inputs), strict=True)
    for own, part in zip(found.split(LENGTHS), parts, strict=True):
        torch.testing.assert_close(own, expected(layer, part), rtol=1e-5, atol=1e-6)
    leaking, _ = drawn()  # the trap: what another left in the slot
    other = computed(leaking, inputs, LENGTHS, SLOT_OF, [True] * 4)
    assert (other - found).abs().max() > 0.1


@pytest.mark.parametrize("cuts", [(1,) * 30, (12, 18), (29, 1), (3, 3, 24)])
def test_a_prompt_in_parts_beside_others_has_the_bits_that_it_has_alone(cuts):
    layer, inputs = drawn()
    whole = computed(layer, inputs, LENGTHS, SLOT_OF, [False] * 4).split(LENGTHS)[2]
    layer, _ = drawn()
    own = [x.split(LENGTHS)[2] for x in inputs]
    first = 0
    found = []
    for size in cuts:
        part = tuple(x[first : first + size] for x in own)
        found.append(computed(layer, part, (size,), (7,), [first > 0]))
        first += size
    assert torch.equal(torch.cat(found), whole)


def test_sequences_with_drafts_go_on_from_their_last_accepted_token():
    """Two sequences decode the tokens of two whole ones beside drafts of which now all, some or none are accepted, and
    in some steps nothing is drafted for one of them.
    """
    layer, inputs = drawn(DRAFTED)
    random = torch.Generator().manual_seed(1)
    lengths = (30, 14)
    parts = [[x[first : first + size] for x in inputs] for first, size in zip((0, 20), lengths, strict=True)]
    whole = [expected(layer, part) for part in parts]
    slots = torch.tensor([[4, 0, 7], [2, 8, 5]])  # of a sequence: one behind each token of a step
    begun = (5, 1)
    prompts = tuple(torch.cat([part[i][:size] for part, size in zip(parts, begun, strict=True)]) for i in range(3))
    found = [[own] for own in computed(layer, prompts, begun, slots[:, 0].tolist(), [False] * 2).split(begun)]
    known, accepted = list(begun), [1, 1]
    step = 0
    while any(at < size for at, size in zip(known, lengths, strict=True)):
        step += 1
        rows = [row for row in (0, 1) if known[row] < lengths[row]]
        drafted = [min((step * (row + 1)) % (DRAFTED + 1), lengths[row] - known[row] - 1) for row in rows]
        right = [min(drafts, (step + row) % (DRAFTED + 1)) for row, drafts in zip(rows, drafted, strict=True)]
        given = []
        for row, drafts, good in zip(rows, drafted, right, strict=True):
            own = [x[known[row] : known[row] + 1 + drafts].clone() for x in parts[row]]
            for x in own:  # what was drafted in vain
                x[1 + good :] = torch.randn(x[1 + good :].shape, generator=random)
            given.append(own)
        mixed = tuple(torch.cat([own[i] for own in given]) for i in range(3))
        sizes = [1 + drafts for drafts in drafted]
        out = torch.full((sum(sizes), VALUE_HEADS, VALUE_DIM), torch.nan)
        batch = SimpleNamespace(
            num_spec_decodes=len(rows), spec_query_start_loc=torch.tensor([0, *sizes]).cumsum(0),
            spec_state_indices_tensor=slots[rows], num_accepted_tokens=torch.tensor([accepted[row] for row in rows]),
        )  # fmt: skip
        cpu_delta._drafted(layer, batch, mixed, out, torch.arange(len(out)))
        for row, good, own in zip(rows, right, out.split(sizes), strict=True):
            found[row].append(own[: 1 + good])
            known[row] += 1 + good
            accepted[row] = 1 + good
    for own, right_one in zip(found, whole, strict=True):
        torch.testing.assert_close(torch.cat(own), right_one, rtol=1e-5, atol=1e-6)


def test_another_format_is_refused_in_one_message():
    _, (mixed, rate, step) = drawn()
    with pytest.raises(RuntimeError, match=r"float32 alone, and this is torch\.bfloat16"):
        cpu_delta.attend(mixed.bfloat16(), rate, step, torch.empty(0), "layer")


def test_slots_of_others_stay_as_they_are():
    layer, inputs = drawn()
    before = [x.clone() for x in layer.kv_cache]
    computed(layer, inputs, LENGTHS, SLOT_OF, [False] * 4)
    others = [slot for slot in range(SLOTS) if slot not in SLOT_OF]
    assert all(torch.equal(now[others], then[others]) for now, then in zip(layer.kv_cache, before, strict=True))
