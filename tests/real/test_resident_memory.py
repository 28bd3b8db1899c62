"""The resident set of a rank that takes turns with an engine: what the plan gives it on the device and on the host, in
every phase.

On a CPU the device is the host, so a process holds both at once. The plan is held against the resident set above that
after the imports, from the second step on, when every place on the host has been made.
"""

import json

import numpy as np
import pytest
from padded import collate
from ranks import ROOT, run_ranks
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mrl.config.schema import RunConfig
from mrl.data.samples import Sample
from mrl.model import load_model_spec
from mrl.plan.devices import find_device
from mrl.plan.memory import memory_section
from mrl.plan.memory_phases import ACTOR, phase_bytes
from mrl.plan.plan_inputs import PlanInputs
from mrl.units import MIB

pytestmark = [pytest.mark.real, pytest.mark.long]

ROWS, PROMPT, RESPONSE, WORDS = 8, 16, 16, 128
BOUND = 0.10
DEADLINE_S = 300.0
# layers of about 50 MB, nearly all of it experts; ranks and degrees
CASES = {
    "0.4 GB, one rank": (8, 1, {}),
    "0.8 GB, TP2 EP2": (16, 2, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_what_a_rank_holds_is_what_the_plan_gives_it_in_every_phase(name, tmp_path):
    layers, world, degrees = CASES[name]
    config = _config(tmp_path, layers, {"world_size": world} | degrees)
    np.savez(tmp_path / "batch.npz", **_batch())
    (tmp_path / "case.json").write_text(
        json.dumps({"name": "case", "config": config, "batch": str(tmp_path / "batch.npz")})
    )
    run_ranks(ROOT / "tests/real/resident_worker.py", world, tmp_path, [str(tmp_path / "case.json")], DEADLINE_S)
    run = RunConfig.model_validate(config)
    plan = {
        "memory": memory_section(PlanInputs.of(run, load_model_spec(run.model.path), find_device("cpu"))),
        "layout": {"placement": "colocated"},
    }
    wrong = []
    for rank in range(world):
        for moment in json.loads((tmp_path / f"case-{rank}.json").read_text()):
            planned, phase = phase_bytes(plan, moment["after"]), moment["after"]
            held, expected = (
                moment["resident_bytes"] - moment["baseline_bytes"],
                planned.holders[ACTOR] + planned.host[ACTOR],
            )
            print(f"{name} rank {rank} step {moment['step']} {phase}: held {held / MIB:.0f}, planned "
                  f"{expected / MIB:.0f}, ratio {held / expected:.3f}, live "
                  f"{moment['live_bytes'] / MIB:.0f} of {planned.holders[ACTOR] / MIB:.0f}")  # fmt: skip
            if moment["step"] and abs(held / expected - 1) > BOUND:
                wrong.append(f"rank {rank} {phase}: {held / expected:.3f}")
    assert not wrong


def _config(folder, layers: int, layout: dict) -> dict:
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=512, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
            intermediate_size=512,
            moe_intermediate_size=512, num_experts=16, num_experts_per_tok=2, vocab_size=WORDS,
            max_position_embeddings=256,
            norm_topk_prob=True,
        )
    )  # fmt: skip
    model.save_pretrained(folder / "model")
    offload = dict.fromkeys(("param_offload", "grad_offload", "optimizer_offload"), True)
    sizes = {"ppo_mini_batch_size": ROWS, "ppo_micro_batch_size_per_gpu": ROWS}
    return {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "actor": {"layout": layout, **sizes, **offload},
        "rollout": {"n": 1, "tensor_model_parallel_size": layout["world_size"]},
        "data": {"train_batch_size": ROWS, "max_prompt_length": PROMPT, "max_response_length": RESPONSE},
        "cluster": {
            "device": "cpu",
            "placement": "colocated",
            "n_gpus_per_node": layout["world_size"],
            "step_timeout_s": 60,
        },
        "reshard": {"budget_mb": 1},
    }


def _batch() -> dict[str, np.ndarray]:
    """Every sample at its limits, as the plan counts them."""
    rng = np.random.default_rng(0)
    samples = []
    for i in range(ROWS):
        ids = tuple(rng.integers(1, WORDS - 1, PROMPT + RESPONSE).tolist())
        samples.append(Sample(i, i, i, 0, ids[:PROMPT], ids[PROMPT:], (0.0,) * RESPONSE, "length", 0))
    batch = collate(samples, 1.0, 0)
    advantages = np.where(batch.response_mask, rng.normal(size=(ROWS, 1)), 0).astype(np.float32)
    return batch.arrays | {
        "old_log_probs": np.where(batch.response_mask, -4.0, 0).astype(np.float32),
        "advantages": advantages,
    }
