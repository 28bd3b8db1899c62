"""An update on policy is the update after a pass of old log-probs, without the pass: gradients, weights,
metrics of the mismatch.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from padded import PaddedBatch, collate
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_models import save, tiny_moe

from mrl.data.samples import Sample
from mrl.record.metrics import reduce_parts

pytestmark = pytest.mark.real

SAMPLES = 7  # odd: with two data-parallel ranks one has a filler
REJECTED = 2  # as the over-long filter rejects a row: out of the loss, in the metrics
BOUND = 1e-6
TP_EP = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
LAYOUTS = {
    "tp2-ep2": TP_EP,
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2-ep2": {"expert_model_parallel_size": 2},
}
WITH_PASS = "with-pass"


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("on_policy")
    model = tiny_moe()
    path = save(model, out / "model")
    np.savez(out / "batch.npz", **_batch(model.config.vocab_size).arrays)

    def case(name: str, degrees: dict, anchor: str) -> dict:
        config = {
            "model": {"path": str(path), "dtype": "float32"},
            "actor": {
                "layout": {"world_size": 2} | degrees, "optim": {"lr": 1e-3, "eps": 1e-4},
                "ppo_mini_batch_size": SAMPLES,
                "ppo_micro_batch_size_per_gpu": 2,
            },
            "rollout": {"n": 1},
            "algorithm": {"anchor": anchor, "overlong_filter": True},
            "data": {"train_batch_size": SAMPLES},
            "trainer": {"max_skipped_updates": 1},
            "cluster": {"device": "cpu", "step_timeout_s": 300},
        }  # fmt: skip
        return {
            "name": name,
            "config": config,
            "batch": str(out / "batch.npz"),
            "compares": anchor == "on_policy",
            "rejected": REJECTED,
        }

    cases = [
        case(WITH_PASS, TP_EP, "recompute"),
        *(case(name, degrees, "on_policy") for name, degrees in LAYOUTS.items()),
    ]
    (out / "cases.json").write_text(json.dumps(cases))
    run_ranks(Path(__file__).with_name("on_policy_worker.py"), 2, out, [str(out / "cases.json")])
    return out


def _batch(vocab: int) -> PaddedBatch:
    rng = np.random.default_rng(3)
    samples = []
    for i in range(SAMPLES):
        prompt, response = int(rng.integers(2, 12)), int(rng.integers(4, 20))
        ids = rng.integers(1, vocab, prompt + response).tolist()
        log_probs = tuple((-5 * rng.random(response)).tolist())
        samples.append(Sample(i, i, i, 0, tuple(ids[:prompt]), tuple(ids[prompt:]), log_probs, "stop", 0))
    batch = collate(samples, 1.0, 0)
    mask = batch.response_mask
    advantages = np.where(mask, rng.normal(size=SAMPLES)[:, None], 0.0).astype(np.float32)
    return PaddedBatch(**batch.arrays, advantages=advantages, keep=mask & (np.arange(SAMPLES) != REJECTED)[:, None])


def reports(out: Path, name: str) -> list[dict]:
    return [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]


def worst(some: dict, others: dict) -> float:
    assert some.keys() == others.keys()
    return max(float((some[name] - others[name]).abs().max()) for name in some)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_after_a_pass(layout, out):
    for report in reports(out, layout):
        assert report["gradient_error"] < BOUND and report["gradient_norm"] > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_after_a_pass_and_every_ratio_is_exactly_1(layout, out):
    after_a_pass, on_policy = ([part for report in reports(out, layout) for part in report["parts"][i]] for i in (0, 1))
    given, own = reduce_parts(after_a_pass), reduce_parts(on_policy)
    assert own == pytest.approx(given, rel=BOUND, abs=BOUND)
    assert (
        own["actor/ppo_kl"] == own["actor/log_seq_ratio_std"] == own["actor/pg_clipfrac"] == 0.0 != own["actor/pg_loss"]
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_updated_weights_are_those_after_a_pass_and_the_pass_is_not_made(layout, out):
    start, stepped, own = (
        load_file(file)
        for file in (out / "model/model.safetensors", out / f"{WITH_PASS}.safetensors", out / f"{layout}.safetensors")
    )
    assert worst(own, stepped) < BOUND < 1e-4 < worst(own, start)
    for report in reports(out, layout):
        assert report["forwards"] == len({"dp2-ep2": range(2)}.get(layout, range(4)))
    assert [report["forwards"] for report in reports(out, WITH_PASS)] == [2 * 4, 2 * 4]


OF_THE_LAYOUT = (
    "perf/update_s", "perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb",
    "global_seqlen/", "actor/dp_imbalance", "actor/padding_share", "actor/packed_sequences", "router/",
    "actor/replica_grad_norm/",
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_says_what_it_says_with_a_pass_the_mismatch_over_rejected_rows_too(layout, out):
    expected, found = reports(out, WITH_PASS)[0]["metrics"], reports(out, layout)[0]["metrics"]
    drift = expected.pop("router/drift")  # between the pass and the update, of which there is one now
    of_replicas = {name for name in found if name.startswith("actor/replica_grad_norm/")}
    assert found.keys() - of_replicas == expected.keys() and drift == 0.0
    assert {name: value for name, value in found.items() if not name.startswith(OF_THE_LAYOUT)} == pytest.approx(
        {name: value for name, value in expected.items() if not name.startswith(OF_THE_LAYOUT)}, rel=BOUND, abs=BOUND
    )
    assert expected["training/rollout_probs_diff_mean"] > 0.01 and expected["actor/entropy"] > 1.0
    assert expected["train/overlong_filtered_share"] == 1 / SAMPLES


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_that_are_not_finite_end_the_step_as_after_a_pass_and_change_nothing(layout, out):
    """trainer.max_skipped_updates is 1 here: an update that was left out would say so in other words."""
    for report in reports(out, layout):
        generations, own = report["said"]
        assert generations.startswith("rollout_log_probs: 1 of ") and f"row {SAMPLES}, token 0" in generations
        assert own.startswith("old_log_probs: ") and "the first at row 1, token 0" in own
        assert (report["unchanged"], report["counted"], report["skipped"]) == ([True, True], 0, 0)
