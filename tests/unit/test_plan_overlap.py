"""What an update computes twice, and what data parallelism exchanges beside it, in predicted seconds."""

from dataclasses import replace

import pytest

from mrl.model import forward_flops_per_token, known_spec, module_flops_per_token
from mrl.model.layout import TrainLayout
from mrl.plan.activations import MicroBatchShape, Recompute
from mrl.plan.devices import USUAL, find_device
from mrl.plan.model_state import stage_state
from mrl.plan.times import Overlap, PassWork, share_again, update_passes, update_seconds

MOE, DENSE = known_spec("Qwen3-30B-A3B"), known_spec("Qwen3-8B")
CONTEXT, NOTHING = 2048.0, Recompute()
H100 = find_device("h100-80g")


def selective(*modules: str) -> Recompute:
    return Recompute("selective", modules=modules)


def seconds(overlap: Overlap, micro_batches: int = 4, recompute: Recompute = NOTHING):
    layout = TrainLayout.build(
        {"world_size": 16, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 8}, MOE
    )
    work = PassWork(
        MOE, MicroBatchShape(1, 8192, 4096), 8 * 8192.0 * micro_batches, forward_flops_per_token(MOE, CONTEXT)
    )
    return update_seconds(work, layout, H100, 8, stage_state(MOE, layout, 0), recompute, USUAL, overlap)


def test_the_modules_of_a_mixture_have_the_operations_of_their_shapes():
    """Hand-computed: 48 layers of 8 experts of three 2048 x 768 matrices and a 2048 x 128 router."""
    parts = module_flops_per_token(MOE, CONTEXT)
    assert parts["moe"] == 2 * 48 * (8 * 3 * 2048 * 768 + 2048 * 128)
    assert parts["core_attn"] == 2 * 48 * 2 * 32 * 128 * CONTEXT
    assert parts["mlp"] == parts["shared_experts"] == 0


def test_the_modules_of_a_dense_model_and_what_is_outside_them_are_all():
    parts = module_flops_per_token(DENSE, CONTEXT)
    assert parts["mlp"] == 2 * 36 * 3 * 4096 * 12288 and parts["moe"] == 0
    projections = 2 * 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024) + 2 * 151936 * 4096
    assert sum(parts.values()) + projections == forward_flops_per_token(DENSE, CONTEXT)


def test_what_is_computed_twice_lies_between_nothing_and_a_whole_forward():
    flops = forward_flops_per_token(MOE, CONTEXT)
    shares = [share_again(r, MOE, flops) for r in (
        Recompute(), selective("moe_act", "layernorm"), selective("core_attn"), selective("moe"),
        selective("moe", "core_attn"), Recompute("full"),
    )]  # fmt: skip
    assert shares == sorted(shares) and shares[:2] == [0, 0] and shares[-1] == 1 and 0.3 < shares[3] < 0.8
    assert [update_passes(r).compute for r in (Recompute(), Recompute("full"))] == [3, 4]


def test_experts_that_are_made_again_send_their_tokens_again():
    assert update_passes(selective("moe"), 0.5).experts == 4 and update_passes(selective("moe_act"), 0.0).experts == 3
    assert seconds(Overlap(), recompute=selective("moe")).expert == pytest.approx(seconds(Overlap()).expert * 4 / 3)


@pytest.mark.parametrize("recompute", [Recompute(), selective("moe"), Recompute("full")])
def test_what_goes_on_beside_computing_is_hidden_up_to_one_micro_batch(recompute):
    alone, beside = seconds(Overlap(), recompute=recompute), seconds(Overlap(True, 1.0), recompute=recompute)
    one = (alone.total - alone.bubble - alone.data) / 4
    assert 0 <= beside.data <= alone.data
    assert alone.data - beside.data <= one * (1 + 1e-9)
    assert replace(beside, data=alone.data) == alone


def test_of_the_gathers_those_of_all_updates_but_a_steps_last_are_hidden():
    alone, all_but_last, every = (seconds(Overlap(True, share)).data for share in (0.0, 0.75, 1.0))
    assert alone - all_but_last == pytest.approx(0.75 * (alone - every))
