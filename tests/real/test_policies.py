"""Three policies on the same ranks: the reference stays where it was frozen,
and replay keeps the old policy's experts.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from padded import collate
from ranks import run_ranks
from tiny_models import save, tiny_moe

from mrl.data.samples import Sample

pytestmark = pytest.mark.real

UPDATES = 5
SAMPLES = 10
LAYOUT = {"world_size": 2, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, list[dict]]:
    out = tmp_path_factory.mktemp("policies")
    model = tiny_moe()
    path = save(model, out / "model")
    for parameter in model.parameters():
        parameter.data.mul_(1.01)
    other = save(model, out / "other")
    batch = _batch(model.config.vocab_size)
    np.savez(out / "batch.npz", **batch.arrays)

    def case(name: str, lr: float, **more) -> dict:
        config = {
            "model": {"path": str(path), "dtype": "float32"} | more.get("model", {}),
            "actor": {
                "layout": LAYOUT, "optim": {"lr": lr, "weight_decay": 0.0}, "ppo_mini_batch_size": SAMPLES // UPDATES,
                "ppo_micro_batch_size_per_gpu": 1,
            } | more.get("actor", {}),
            "ref": more.get("ref", {}),
            "rollout": {"n": 1},
            "algorithm": more.get("algorithm", {}),
            "data": {"train_batch_size": SAMPLES},
            "cluster": {"device": "cpu", "step_timeout_s": 300},
        }  # fmt: skip
        return {"name": name, "config": config, "batch": str(out / "batch.npz")}

    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"}
    cases = [
        case("plain", 1e-3, algorithm=kl),
        case("other", 1e-3, algorithm=kl, ref={"path": str(other)}),
        case("slow", 1e-5), case("fast", 1e-2),
        case("replayed", 1e-2, actor={"router_replay": "R2"}),
        case("frozen", 1e-2, actor={"freeze_router": True, "optim": {"lr": 1e-2, "weight_decay": 0.1}}),
        case("recomputed", 1e-2, actor={"router_replay": "R2"}, model={"override_transformer_config": RECOMPUTE}),
    ]  # fmt: skip
    (out / "cases.json").write_text(json.dumps(cases))
    run_ranks(Path(__file__).with_name("policies_worker.py"), 2, out, [str(out / "cases.json")])
    return {c["name"]: [json.loads((out / f"{c['name']}-{rank}.json").read_text()) for rank in (0, 1)] for c in cases}


def _batch(vocab: int):
    rng = np.random.default_rng(3)
    samples = []
    for i in range(SAMPLES):
        prompt, response = rng.integers(2, 12), rng.integers(4, 20)
        ids = rng.integers(1, vocab, prompt + response).tolist()
        samples.append(Sample(i, i, i, 0, tuple(ids[:prompt]), tuple(ids[prompt:]), (0.0,) * int(response), "stop", 0))
    batch = collate(samples, 1.0, 0)
    advantages = np.where(batch.response_mask, rng.choice([-1.0, 1.0], SAMPLES)[:, None], 0.0).astype(np.float32)
    return replace(batch, advantages=advantages)


def parts(reports: list[dict], name: str) -> list[tuple[float, float]]:
    return [part[name] for report in reports for part in report["metrics"] if name in part]


def drift(reports: list[dict]) -> float:
    ((differing, compared),) = parts(reports, "router/drift")
    return differing / compared


def test_the_kl_to_the_start_is_exactly_zero_before_the_first_update(reports):
    (kl,) = (report["kl_before"] for report in reports["plain"] if "kl_before" in report)
    assert kl == 0.0
    assert parts(reports["plain"], "actor/kl_loss")[0][0] == 0.0
    assert parts(reports["plain"], "actor/kl_loss")[-1][0] > 0.0


def test_the_reference_is_bit_equal_after_five_updates_of_the_policy(reports):
    assert all(report["reference_unchanged"] for report in reports["plain"])
    (first,) = (report for report in reports["plain"] if "reference_moved" in report)
    assert first["reference_moved"] == 0.0
    assert first["policy_moved"] > 0.0


def test_another_checkpoint_as_reference_gives_another_kl(reports):
    assert parts(reports["other"], "actor/kl_loss")[0][0] > 0.0


def test_without_a_kl_term_nothing_is_frozen(reports):
    assert not any(report["has_reference"] for report in reports["slow"])
    assert parts(reports["slow"], "actor/kl_loss") == []


@pytest.mark.parametrize("case", ["replayed", "recomputed"])
def test_replayed_updates_use_the_old_policys_experts_and_the_router_still_learns(case, reports):
    for report in reports[case]:
        assert report["differing_maps"] == 0
        assert all(norm > 0.0 for norm in report["router_gradients"])
    assert drift(reports[case]) == 0.0


def test_without_replay_the_experts_drift_and_more_with_a_larger_rate(reports):
    assert 0.0 <= drift(reports["slow"]) < drift(reports["fast"])
    assert any(report["differing_maps"] > 0 for report in reports["fast"])


def test_recomputing_activations_under_replay_changes_no_gradient(reports):
    for plain, recomputed in zip(reports["replayed"], reports["recomputed"], strict=True):
        assert recomputed["router_gradients"] == pytest.approx(plain["router_gradients"], rel=1e-5)


def test_frozen_routers_keep_every_bit_while_all_else_learns(reports):
    for report in reports["frozen"]:
        assert len(report["routers_moved"]) == 4 and set(report["routers_moved"]) == {0.0}
        assert set(report["router_gradients"]) == {0.0} and report["others_moved"] > 0.0
    assert all(min(report["routers_moved"]) > 0.0 for report in reports["fast"])


def test_expert_loads_are_counted_over_real_tokens(reports):
    ((most, layers),) = parts(reports["fast"], "router/load/max")
    ((least, _),) = parts(reports["fast"], "router/load/min")
    assert layers == 4.0
    assert least / layers <= 1.0 <= most / layers
