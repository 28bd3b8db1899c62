"""A real engine that drafts samples from the model's distribution, and its log-probs are transformers'."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from deadlines import RUN_S
from engine_driver import run_engine
from predicting_oracle import Oracle
from tiny_models import (
    eagle_head,
    save,
    tiny_glm,
    tiny_kinds,
    tiny_kinds_moe,
    tiny_latent,
    tiny_moe,
    tiny_next,
    with_head,
)

pytestmark = pytest.mark.real

WORDS = 24
DRAFTED = 3


def config(path, method: str) -> dict:
    return {
        "model": {"path": str(path), "dtype": "float32"},
        "actor": {"router_replay": "R3", "layout": {"world_size": 1}, "ppo_mini_batch_size": 1},
        "rollout": {
            "max_num_seqs": 8,
            "speculation": {"method": method, "tokens": DRAFTED, "lookup": 1},
            "engine_kwargs": {"vllm": {"skip_tokenizer_init": True}},
        },
        "data": {"train_batch_size": 1, "max_prompt_length": 40, "max_response_length": 40},
        "cluster": {"device": "cpu", "n_gpus_per_node": 2},
    }


WAYS = {
    "ngram": tiny_moe,
    "mtp": tiny_glm,
    "head": tiny_moe,
}
QUICK = ("ngram",)  # what a layer of the model drafts, and the log-probs beside it: test_a_sync_brings_what_drafts


@pytest.mark.parametrize("way", [pytest.param(w, marks=[] if w in QUICK else pytest.mark.long) for w in WAYS])
def test_with_drafts_log_probs_and_routes_are_transformers_and_a_seed_repeats_in_any_order(tmp_path, way):
    model = WAYS[way](vocab_size=WORDS)
    path = with_head(save(model, tmp_path / "model")) if way == "mtp" else save(model, tmp_path / "model")
    method = str(eagle_head(tmp_path / "head", model.config, WORDS // 2)) if way == "head" else way
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, WORDS, 5 + 3 * number).tolist() for number in range(12)]
    job = {"config": config(path, method), "prompts": prompts}
    found = run_engine("engine_drafts.py", tmp_path, job, 1, RUN_S)
    assert found["rounds"][0] == found["rounds"][1]
    for prompt, (response, log_probs, routes) in zip(prompts, found["rounds"][0], strict=True):
        assert _gap(model, prompt, response, log_probs) < 1e-5
        chosen = _routes(model, prompt + response)
        assert np.array_equal(np.sort(routes, -1)[:-1], chosen[:-1])
    drafts = found["drafts"]
    assert drafts["steps"] > 100 and 0 < sum(drafts["accepted"]) < sum(drafts["drafted"])
    assert len(drafts["accepted"]) == DRAFTED


@pytest.fixture(scope="module")
def drafted(tmp_path_factory) -> dict:
    text_model = with_head(save(tiny_kinds(vocab_size=WORDS), tmp_path_factory.mktemp("text") / "model"))
    return told("drafted_tokens.py", str(text_model))


def told(program: str, *arguments: str) -> dict:
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": str(here.parents[1]), "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, str(here / program), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


@pytest.mark.parametrize(
    ("build", "asked"),
    [
        (tiny_glm, "answers"),
        pytest.param(tiny_latent, "", marks=pytest.mark.long),
        pytest.param(tiny_next, "answers", marks=pytest.mark.long),
        pytest.param(tiny_kinds, "answers", marks=pytest.mark.long),
        pytest.param(tiny_kinds_moe, "answers", marks=pytest.mark.long),
        pytest.param(tiny_glm, "fp8", marks=pytest.mark.long),
    ],
)
def test_a_sync_brings_what_drafts_and_proves_it(tmp_path, build, asked):
    """vLLM's own loader agrees with the plan. Behind the update vLLM drafts what the equations say of the new weights,
    for every request and step, and log-probs are transformers'. Without the layer's weights the update is refused, and
    so is a plan that does not know them, by the names of what would be stale.
    """
    blocks = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64} if asked == "fp8" else {}
    model = build(vocab_size=WORDS, **blocks)
    old = with_head(save(model, tmp_path / "old"), uneven=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    new = with_head(save(model, tmp_path / "new"), uneven=True)
    found = told("engine_predicting.py", str(old), str(new), asked)
    assert found["differing"] == [] and found["drafting"] > 10
    first, join = ("drafts.pre_fc_norm_embedding", "drafts.fc")
    if "qwen3" not in model.config.model_type:
        first, join = (f"drafts.model.layers.4.{name}" for name in ("enorm", "eh_proj"))
    assert f"modules incomplete: {first}" in found["stale"]
    assert f"{join}.weight is a parameter of vLLM that the plan does not know" in found["unplanned"]
    if asked == "fp8":
        assert found["drafted"] > 0 and len(found["firsts"]) > 200  # FP8 rounds: transformers drafts other tokens
    if asked != "answers":
        return
    oracle = Oracle(model, new)
    assert max(_gap(model, *answer) for answer in found["answers"]) < 1e-5
    assert len(found["firsts"]) > 200
    for known, drafted in found["firsts"]:
        with torch.no_grad():
            assert oracle.log_probs(torch.tensor(known))[len(known) - 2].argmax() == drafted


def _gap(model, prompt: list[int], response: list[int], log_probs: list[float]) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
    return float((expected - torch.tensor(log_probs)).abs().max())


def _routes(model, ids: list[int]) -> np.ndarray:
    """The experts that transformers chooses, sorted: [tokens, layers with experts, experts per token]."""
    chosen = []
    hooks = [
        module.register_forward_pre_hook(lambda _, given: chosen.append(given[1].sort(-1).values.numpy()))
        for name, module in model.named_modules()
        if name.endswith(".experts")
    ]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return np.stack(chosen, axis=1)


def test_vllms_own_temperatures_of_drafted_tokens_are_still_wrong_and_ours_are_right(drafted):
    right = [0.5, 0.5, 1.0, 2.0, 2.0, 2.0]
    assert drafted["mended"] == right
    assert drafted["own"] != right, "vLLM fills them now: mrl/engine/cpu_drafts.py is not needed any more"


def test_vllms_own_positions_of_qwens_predicting_layer_are_still_others_and_ours_are_the_models(drafted):
    of_model, own, mended = drafted["rows of positions"]
    assert of_model == mended == 1
    assert own == 3, "vLLM gives the layer the model's now: share_positions is not needed any more"


def chance(chi_square: float, freedom: int) -> float:
    """The probability of a chi-square so large or larger (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return 0.5 * math.erfc(((chi_square / freedom) ** (1 / 3) - 1 + spread) / math.sqrt(2 * spread))


def test_tokens_sampled_behind_drafts_are_distributed_as_without_and_have_its_log_probs(drafted):
    for way in drafted["ways"].values():
        assert way["worst"] < 1e-5
        assert all(tokens > 100 and chance(chi, freedom) > 1e-5 for tokens, chi, freedom in way["positions"]), way
    assert all(drafted["ways"][name]["positions"][0][0] == 100_000 for name in ("temperature 1", "top_p 0.8"))
    assert drafted["repeats"]
