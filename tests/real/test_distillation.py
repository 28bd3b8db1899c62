"""A teacher of another family, size and layout on the actor's ranks: its log-probs are those of Hugging Face in every
layout, and the actor beside it computes what it computes alone, bit for bit.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import test_parity as parity
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from test_parity import CP, EP, PP, TP
from tiny_models import save, tiny_dense, tiny_moe, tiny_shared

pytestmark = [pytest.mark.real, pytest.mark.long]

VPP = "virtual_pipeline_model_parallel_size"
TEACHERS = {"dense": tiny_dense, "shared": tiny_shared}
TOKENS = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 40}
PADDED = {"use_remove_padding": False}
# name -> (the actor's degrees, teacher, its degrees, the actor's other settings, offloaded)
CASES = {
    "dp2-tp2": ({}, "dense", {TP: 2}, {}, False),
    "tp2-pp2": ({TP: 2}, "dense", {PP: 2}, {}, True),
    "tp2-dp2": ({TP: 2, EP: 2}, "dense", {}, {}, False),
    "pp2-cp2": ({PP: 2}, "dense", {CP: 2}, TOKENS, False),
    "cp2-ep2": ({CP: 2}, "shared", {EP: 2}, {}, True),
    "ep2-tp2": ({EP: 2}, "shared", {TP: 2}, PADDED, False),
    "tp2-vpp2": ({TP: 2}, "shared", {PP: 2, VPP: 2}, {}, True),
}
RANKS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("distillation")


@pytest.fixture(scope="module")
def reference(folder) -> "parity.Reference":
    torch.set_num_threads(1)
    return parity._reference(tiny_moe(), folder / "student")


@pytest.fixture(scope="module")
def teachers(folder, reference) -> dict[str, tuple[Path, np.ndarray]]:
    """Checkpoint of each, and its log-probs of the student's samples."""
    found = {}
    for name, make in TEACHERS.items():
        model = make()
        path = save(model, folder / name)
        with torch.no_grad():
            log_probs, _ = parity._token_outputs(model, reference.batch)
        found[name] = path, np.where(reference.batch.response_mask, log_probs.numpy(), 0)
    return found


@pytest.fixture(scope="module")
def results(folder, reference, teachers) -> Path:
    """Each case with its teacher, and without it."""
    cases = []
    for name, (degrees, teacher, others, settings, offloaded) in CASES.items():
        case = parity._case("moe-dp2", {"moe": reference})
        config = case["config"]
        config["actor"] |= {"layout": {"world_size": RANKS} | degrees, "override_ddp_config": {}} | settings
        if settings is TOKENS:
            del config["actor"]["log_prob_micro_batch_size_per_gpu"]
        cases.append(case | {"name": f"{name}-alone", "config": config})
        model = {
            "model_path": str(teachers[teacher][0]),
            "layout": {"world_size": RANKS} | others,
            "param_offload": offloaded,
        }
        taught = config | {"distillation": {"enabled": True, "teacher_model": model}}
        cases.append(case | {"name": name, "config": taught})
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    out = folder / "ranks"
    run_ranks(Path(__file__).with_name("distillation_worker.py"), RANKS, out, [str(file)])
    return out


def scores(folder: Path, who: str) -> tuple[np.ndarray, np.ndarray]:
    parts = [np.load(file) for file in sorted(folder.glob(f"{who}-*.npz"))]
    rows = np.concatenate([part["rows"] for part in parts])
    return rows, np.concatenate([part["log_probs"] for part in parts])[np.argsort(rows)]


@pytest.mark.parametrize("case", CASES)
def test_the_teachers_log_probs_are_those_of_hugging_face(case, results, teachers):
    rows, log_probs = scores(results / case, "teacher")
    expected = teachers[CASES[case][1]][1]
    assert sorted(rows) == list(range(len(expected)))  # each row once, whatever replicas there are
    assert np.abs(log_probs - expected).max() < 1e-5
    again = scores(results / case, "again")[1]
    np.testing.assert_array_equal(again, log_probs)  # an update has left it as it was


@pytest.mark.parametrize("case", CASES)
def test_the_actor_computes_what_it_computes_without_a_teacher(case, results):
    alone = results / f"{case}-alone"
    for which in ("gradients", "updated"):
        found, expected = (load_file(f / f"{which}.safetensors") for f in (results / case, alone))
        assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)
    for found, expected in zip(scores(results / case, "actor"), scores(alone, "actor"), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("case", CASES)
def test_a_teacher_is_where_it_was_told_to_be_and_has_no_gradients(case, results):
    for file in (results / case).glob("report-*.json"):
        for asked in json.loads(file.read_text()):
            assert not asked["trained"]
            assert (asked["on_device"] == 0) == (asked["on_host"] > 0) == CASES[case][4]
