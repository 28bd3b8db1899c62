"""What leaves the device comes back bit for bit: training, reference and checkpoints are as if it had never left."""

import json

import numpy as np
import pytest
from padded import collate
from ranks import ROOT, run_ranks
from tiny_models import save, tiny_moe

from mrl.data.samples import Sample

pytestmark = pytest.mark.real

ROWS = 8
TP2_EP2 = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
# name -> (dtype, degrees); data parallelism is what remains of two ranks
CASES = {"float32-tp2-ep2": ("float32", TP2_EP2), "bfloat16-dp2": ("bfloat16", {})}
SWITCHES = ("param_offload", "grad_offload", "optimizer_offload")


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, list[dict]]:
    """What each of two ranks saw, by case."""
    out = tmp_path_factory.mktemp("offload")
    model = save(tiny_moe(), out / "moe")
    np.savez(out / "batch.npz", **_batch())
    cases = {
        name: {kind: _config(str(model), *CASES[name], kind == "moved") for kind in ("kept", "moved")} for name in CASES
    }
    (out / "plan.json").write_text(json.dumps({"batch": str(out / "batch.npz"), "cases": cases}))
    run_ranks(ROOT / "tests/real/offload_worker.py", 2, out, [str(out / "plan.json")])
    return {name: [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in range(2)] for name in CASES}


def without_traces(reported):
    """Of metrics those that do not tell what left the device, which is the difference."""
    if isinstance(reported, list):
        return [left for one in reported if (left := without_traces(one)) != {}]  # some ranks tell nothing else
    if isinstance(reported, dict):
        return {name: value for name, value in reported.items() if not name.startswith("offload/")}
    return reported


@pytest.mark.parametrize("what", ["log_probs", "updated", "exported", "saved", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_every_update_checkpoint_and_log_prob_has_the_bits_of_an_actor_that_keeps_all(name, what, reports):
    for report in reports[name]:
        kept, moved = ([without_traces(of_round[what]) for of_round in report[kind]] for kind in ("kept", "moved"))
        assert moved == kept
    if what in ("exported", "saved"):
        assert kept[0] != kept[1] != kept[2], "an update that changes nothing shows nothing"
    if what == "reference":
        assert kept[0] == kept[2]


@pytest.mark.parametrize("name", CASES)
def test_each_phase_has_on_the_device_what_the_plan_says(name, reports):
    for report in reports[name]:
        for of_round in report["moved"]:
            phases = of_round["phases"]
            full = phases["train"]
            assert min(full.values()) > 0
            assert phases["generate"] == dict.fromkeys(full, 0)
            assert (
                phases["log_prob"]
                == phases["sync"]
                == {"parameters": full["parameters"], "gradients": 0, "optimizer": 0}
            )


@pytest.mark.parametrize("name", CASES)
def test_host_memory_is_made_once_and_holds_exactly_what_left(name, reports):
    for report in reports[name]:
        full = report["moved"][0]["phases"]["train"]
        first, second, third = (of_round["host"] for of_round in report["moved"])
        assert first == second == third
        assert first[0] == full["parameters"] + full["optimizer"], "gradients are dropped"


@pytest.mark.parametrize("name", CASES)
def test_what_touches_an_offloaded_actor_past_its_methods_is_refused(name, reports):
    for report in reports[name]:
        for of_round in report["moved"]:
            assert len(of_round["refused"]) == 5
            assert all("not on the device" in text for text in of_round["refused"]), of_round["refused"]


def _batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    samples = []
    for i in range(ROWS):
        prompt, response = (tuple(rng.integers(1, 127, n).tolist()) for n in rng.integers(2, 12, 2))
        samples.append(Sample(i, i, i, 0, prompt, response, (0.0,) * len(response), "stop", 0))
    batch = collate(samples, 1.0, 0)
    advantages = np.where(batch.response_mask, rng.normal(size=(ROWS, 1)), 0).astype(np.float32)
    old = np.where(batch.response_mask, -4.0, 0).astype(np.float32)
    return batch.arrays | {"old_log_probs": old, "ref_log_probs": old, "advantages": advantages}


def _config(path: str, dtype: str, degrees: dict, moved: bool) -> dict:
    """Two mini-batches an update, the second under the moments of the first, and a KL term."""
    return {
        "model": {"path": path, "dtype": dtype},
        "actor": {
            "layout": {"world_size": 2} | degrees,
            "optim": {"lr": 1e-2, "weight_decay": 0.1},
            "ppo_mini_batch_size": ROWS // 2,
            "ppo_micro_batch_size_per_gpu": 3,
            **dict.fromkeys(SWITCHES, moved),
        },
        "ref": {"param_offload": moved},
        "rollout": {"n": 1},
        "algorithm": {
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
            "policy_loss": {"loss_mode": "vanilla", "clip_ratio_c": 1e6},
        },
        "data": {"train_batch_size": ROWS},
        "cluster": {"device": "cpu", "step_timeout_s": 300},
    }
