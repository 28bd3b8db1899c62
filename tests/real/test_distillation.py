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
    "bfloat16-tp2-pp2": ({TP: 2}, "shared", {PP: 2}, {}, True),
}
# the same, with a loss over the teacher's likeliest words
OVER_TOP_K = {
    "words-tp2-pp2": ({TP: 2}, "dense", {PP: 2}, {}, False),
    "words-dp2-tp2": ({}, "dense", {TP: 2}, {}, False),
    "words-cp2-tp2": ({CP: 2}, "shared", {TP: 2}, PADDED, True),
    "words-pp2-cp2": ({PP: 2}, "shared", {CP: 2}, {}, False),
}
WORDS, COEF = 5, 0.5
STUDENT = 127  # words that the student has
RANKS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("distillation")


@pytest.fixture(scope="module")
def reference(folder) -> "parity.Reference":
    torch.set_num_threads(1)
    return parity._reference(tiny_moe(), folder / "student")


@pytest.fixture(scope="module")
def teachers(folder, reference) -> dict[str, tuple[Path, np.ndarray, np.ndarray, np.ndarray]]:
    """Checkpoint of each, its log-probs of the student's samples, and its likeliest words there with theirs."""
    found = {}
    for name, make in TEACHERS.items():
        model = make()
        path = save(model, folder / name)
        with torch.no_grad():
            log_probs, _ = parity._token_outputs(model, reference.batch)
            best = torch.cat(distributions(model, reference.batch))[:, :STUDENT].topk(WORDS, -1)
        expected = np.where(reference.batch.response_mask, log_probs.numpy(), 0)
        found[name] = path, expected, best.indices.numpy().astype(np.int32), best.values.numpy()
    return found


def distributions(model, batch) -> list[torch.Tensor]:
    """Log-probs of all words at each response token, [tokens, words] a sample."""
    found = []
    for row in range(len(batch)):
        prompt, response = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        ids = torch.from_numpy(batch.input_ids[row, : prompt + response])
        logits = model(ids[None]).logits[0, prompt - 1 : -1] / float(batch.temperature[row])
        found.append(logits.log_softmax(-1))
    return found


def words_file(folder: Path, reference, words: np.ndarray, top_log_probs: np.ndarray, name: str) -> Path:
    np.savez(folder / f"{name}-words.npz", teacher_top_ids=words, teacher_top_log_probs=top_log_probs)
    return folder / f"{name}-words.npz"


@pytest.fixture(scope="module")
def results(folder, reference, teachers) -> Path:
    """Each case with its teacher, and without it."""
    cases = []
    words = {name: words_file(folder, reference, *teachers[name][2:], name) for name in TEACHERS}
    for name, (degrees, teacher, others, settings, offloaded) in (CASES | OVER_TOP_K).items():
        case = parity._case("moe-dp2", {"moe": reference})
        config = case["config"]
        config["actor"] |= {"layout": {"world_size": RANKS} | degrees, "override_ddp_config": {}} | settings
        if name.startswith("bfloat16"):
            config["model"]["dtype"] = "bfloat16"
        if settings is TOKENS:
            del config["actor"]["log_prob_micro_batch_size_per_gpu"]
        if name in CASES:
            cases.append(case | {"name": f"{name}-alone", "config": config})
        model = {
            "model_path": str(teachers[teacher][0]),
            "layout": {"world_size": RANKS} | others,
            "param_offload": offloaded,
        }
        taught = {"enabled": True, "teacher_model": model}
        if name in OVER_TOP_K:
            case["words"] = str(words[teacher])
            taught["distillation_loss"] = {"loss_mode": "reverse_kl_topk", "use_policy_gradient": False,
                "topk": WORDS, "distillation_loss_coef": COEF}  # fmt: skip
        cases.append(case | {"name": name, "config": config | {"distillation": taught}})
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
    assert np.abs(log_probs - expected).max() < (0.3 if case.startswith("bfloat16") else 1e-5)
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


@pytest.mark.parametrize("case", OVER_TOP_K)
def test_the_teachers_likeliest_words_are_those_of_hugging_face(case, results, teachers, reference):
    _, _, words, top_log_probs = teachers[OVER_TOP_K[case][1]]
    parts = [np.load(file) for file in sorted((results / case).glob("teacher-*.npz"))]
    counts = reference.batch.response_lengths
    ends = np.cumsum(counts)
    for part in parts:
        tokens = np.concatenate([np.arange(ends[row] - counts[row], ends[row]) for row in part["rows"]])
        np.testing.assert_array_equal(part["words"], words[tokens])
        assert np.abs(part["of_words"] - top_log_probs[tokens]).max() < 1e-5


@pytest.mark.parametrize("case", OVER_TOP_K)
def test_gradients_of_a_loss_over_words_are_those_of_autograd(case, results, teachers, reference, folder):
    """Against the Hugging Face model: GSPO's loss, and the KL over the words and all others as one, written anew."""
    _, _, words, top_log_probs = teachers[OVER_TOP_K[case][1]]
    model = tiny_moe()
    loss = parity._sequence_gspo(model, reference.batch)
    ends = np.cumsum(reference.batch.response_lengths)
    kl = []
    for row, log_probs in enumerate(distributions(model, reference.batch)):
        tokens = slice(ends[row] - len(log_probs), ends[row])
        own = log_probs.gather(-1, torch.from_numpy(words[tokens]).long())
        theirs = torch.from_numpy(top_log_probs[tokens])
        left, kept = (1 - each.exp().sum(-1) for each in (own, theirs))
        each = (own.exp() * (own - theirs)).sum(-1) + left * (left.log() - kept.log())
        kl.append(each.mean())
    kept_rows = [row for row in range(len(reference.batch)) if row != parity.REJECTED]
    (loss + COEF * torch.stack(kl)[kept_rows].mean()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    expected = parity._checkpoint_names(model, gradients, folder / f"{case}-expected")
    found = load_file(results / case / "gradients.safetensors")
    assert parity._worst(found, expected) < 1e-4
    alone = load_file(results / "tp2-dp2-alone" / "gradients.safetensors")
    assert parity._worst(found, alone) > 1e-2  # it is the loss that is other


@pytest.mark.parametrize("case", CASES)
def test_a_teacher_is_where_it_was_told_to_be_and_has_no_gradients(case, results):
    for file in (results / case).glob("report-*.json"):
        for asked in json.loads(file.read_text()):
            assert not asked["trained"]
            assert (asked["on_device"] == 0) == (asked["on_host"] > 0) == CASES[case][4]
