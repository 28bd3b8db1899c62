"""An update on policy is the update after a pass of old log-probs, without the pass: gradients, weights, metrics of the mismatch."""

import json
from pathlib import Path

import numpy as np
import pytest
from padded import PaddedBatch, collate, in_rows
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_models import save, tiny_moe

from mrl.algo.correction import mismatch_metrics, mismatch_of_rows
from mrl.data.batch import TrainBatch
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
                "layout": {"world_size": 2} | degrees, "optim": {"lr": 1e-3, "eps": 1e-4}, "ppo_mini_batch_size": SAMPLES,
                "ppo_micro_batch_size_per_gpu": 2,
            },
            "rollout": {"n": 1},
            "algorithm": {"anchor": anchor},
            "data": {"train_batch_size": SAMPLES},
            "trainer": {"max_skipped_updates": 1},
            "cluster": {"device": "cpu", "step_timeout_s": 300},
        }  # fmt: skip
        return {"name": name, "config": config, "batch": str(out / "batch.npz"), "compares": anchor == "on_policy"}

    cases = [case(WITH_PASS, TP_EP, "recompute"), *(case(name, degrees, "on_policy") for name, degrees in LAYOUTS.items())]
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


def old_log_probs(out: Path, name: str) -> tuple[np.ndarray, float]:
    """[response tokens] in the order of rows, and the mean entropy; of all replicas."""
    batch = whole(out)
    found, entropies, rows = np.zeros((SAMPLES, int(batch.response_lengths.max())), np.float32), [], []
    for old in (report["old"] for report in reports(out, name) if report["old"]):
        found[old["rows"]] = in_rows(batch, np.array(old["rows"]), np.array(old["log_probs"], np.float32))
        rows, entropies = rows + old["rows"], [*entropies, old["entropy"]]
    assert sorted(rows) == list(range(SAMPLES)), "rejected rows too, and no filler"
    return found[PaddedBatch(**np.load(out / "batch.npz")).response_mask], sum(v for v, _ in entropies) / sum(n for _, n in entropies)


def whole(out: Path) -> TrainBatch:
    return PaddedBatch(**np.load(out / "batch.npz")).packed()


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
    assert own.pop("ran/anchor/on_policy") == SAMPLES - 1 == own["ran/policy_loss/gspo"]
    assert own == pytest.approx(given, rel=BOUND, abs=BOUND)
    assert own["actor/ppo_kl"] == own["actor/log_seq_ratio_std"] == own["actor/pg_clipfrac"] == 0.0 != own["actor/pg_loss"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_updated_weights_are_those_after_a_pass_and_the_pass_is_not_made(layout, out):
    start, stepped, own = (
        load_file(file) for file in (out / "model/model.safetensors", out / f"{WITH_PASS}.safetensors", out / f"{layout}.safetensors")
    )
    assert worst(own, stepped) < BOUND < 1e-4 < worst(own, start)
    for report in reports(out, layout):
        assert report["forwards"] == len({"dp2-ep2": range(2)}.get(layout, range(4)))
    assert [report["forwards"] for report in reports(out, WITH_PASS)] == [2 * 4, 2 * 4]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_mismatch_and_the_entropy_are_those_of_the_pass(layout, out):
    batch = whole(out)
    (passed, entropy), (own, own_entropy) = old_log_probs(out, WITH_PASS), old_log_probs(out, layout)
    expected, found = (mismatch_metrics(mismatch_of_rows(batch.rollout_log_probs, each, batch.response_lengths)) for each in (passed, own))
    assert found == pytest.approx(expected, rel=BOUND, abs=BOUND) and own_entropy == pytest.approx(entropy, rel=BOUND)
    assert expected["training/rollout_probs_diff_mean"] > 0.01


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_that_are_not_finite_change_nothing_are_handed_out_and_count_as_no_skipped_update(layout, out):
    found = reports(out, layout)
    assert all(report["unchanged"] == [True, True] for report in found)
    assert all((report["updates_counted"], report["skipped"], report["told"]) == (0, 0, 0) for report in found)
    assert sum(report["bad"] or 0 for report in found) > 0
