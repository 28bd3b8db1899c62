"""Responses whose weights changed twice while they were made: each log-prob is that of the version named for it.

Held over one border and given back at the other; scored again by fresh engines of each version, to the bit, and by
transformers.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_driver import run_engine
from safetensors.torch import load_file, save_file
from tiny_models import save, tiny_moe
from transformers import AutoModelForCausalLM

from mrl.model import load_model_spec, tensor_specs
from mrl.platforms.hosting import get_hosting

pytestmark = [pytest.mark.real, pytest.mark.long]
VERSIONS = 3
LIMIT_S = 500


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Folders of the weights of each version."""
    folder, model = tmp_path_factory.mktemp("models"), tiny_moe().to(torch.float32)
    folders = [save(model, folder / f"version-{version}") for version in range(VERSIONS)]
    first = load_file(folders[0] / "model.safetensors")
    for version in range(1, VERSIONS):
        noise = torch.Generator().manual_seed(version)
        weights = {
            k: v + 0.3 * v.std().nan_to_num(1.0) * torch.randn(v.shape, generator=noise) for k, v in first.items()
        }
        save_file(weights, folders[version] / "model.safetensors", {"format": "pt"})
    return folders


@pytest.fixture(scope="module")
def found(models, tmp_path_factory) -> dict:
    spec = load_model_spec(models[0])
    arguments = {
        "dtype": "float32", "tensor_parallel_size": 1, "max_model_len": 256, "max_num_seqs": 32, "seed": 0,
        "skip_tokenizer_init": True, "generation_config": "vllm", "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True, "distributed_executor_backend": "mp", "enable_prefix_caching": True,
        **get_hosting("cpu").engine_arguments(256, 1024),
    }  # fmt: skip
    job = {
        "models": [str(folder) for folder in models], "arguments": arguments, "vocab_size": spec.vocab_size,
        "expected": [[t.name, t.shape] for t in tensor_specs(spec)],
    }  # fmt: skip
    return run_engine("engine_flight.py", tmp_path_factory.mktemp("flight"), job, 1, LIMIT_S)


def spans_of(one: dict) -> list[tuple[int, int, int]]:
    """(first token, end, version)"""
    starts = [start for start, _ in one["spans"]] + [len(one["tokens"])]
    return [(start, end, version) for (start, end), (_, version) in zip(pairwise(starts), one["spans"], strict=True)]


@torch.no_grad()
def differences(models: list[Path], flown: list[dict], swap: dict[int, int]) -> np.ndarray:
    """|engine's log-prob - transformers'| of each token, by the weights that are said to have made it, or by others."""
    scorers = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in models]
    found = []
    for one in flown:
        ids = torch.tensor([one["prompt"] + one["tokens"]])
        place = len(one["prompt"]) - 1
        for start, end, version in spans_of(one):
            scores = torch.log_softmax(scorers[swap.get(version, version)](ids).logits[0].float(), -1)
            tokens = torch.tensor(one["tokens"][start:end])
            own = scores[place + start : place + end].gather(-1, tokens[:, None])[:, 0]
            found.append((own - torch.tensor(one["log_probs"][start:end])).abs())
    return torch.cat(found).numpy()


def test_each_response_is_of_three_versions_that_begin_where_the_engine_stood_still(found):
    assert len(found["flown"]) == 12
    for one in found["flown"]:
        assert [version for _, version in one["spans"]] == [0, 1, 2] and one["spans"][0][0] == 0
        assert len(one["tokens"]) == len(one["log_probs"]) == 160
        assert one["spans"][1][0] >= 30 and one["spans"][2][0] >= 80


def test_transformers_gives_each_token_the_same_log_prob_by_its_own_version_and_by_no_other(models, found):
    right = differences(models, found["flown"], {})
    print(f"tokens {len(right)}, max {right.max():.2e}, mean {right.mean():.2e}")
    assert right.max() < 1e-4 and right.mean() < 1e-6
    for swap in ({0: 1}, {1: 2}, {1: 0}, {2: 1}):
        wrong = differences(models, found["flown"], swap)
        assert wrong.max() > 1e-2 and wrong.mean() > 1e-3


def test_a_fresh_engine_of_its_version_makes_each_span_again_to_the_bit(found):
    """Of the first version, before it ever took other weights. Of the second the greedy ones: see `made_again`."""
    flown = {one["id"]: one for one in found["flown"]}
    for whole in found["undisturbed"]:
        one, border = flown[whole["id"]], flown[whole["id"]]["spans"][1][0]
        assert (whole["tokens"][:border], whole["log_probs"][:border]) == (
            one["tokens"][:border],
            one["log_probs"][:border],
        )
        assert whole["log_probs"] != one["log_probs"]
    for spans in found["again"].values():
        for span in spans:
            one, place = flown[span["id"]], slice(span["start"], span["end"])
            assert (span["tokens"], span["log_probs"]) == (one["tokens"][place], one["log_probs"][place])
    assert [len(found["undisturbed"]), *(len(spans) for spans in found["again"].values())] == [12, 4, 12]


def test_a_cache_that_is_not_emptied_is_counted(found):
    emptied, kept = found["stale"]
    assert emptied == 0 and kept == 150 // found["block"] * found["block"] > 0


def test_requests_that_keep_what_old_weights_computed_are_never_served_on(found):
    assert "did not empty its prefix cache" in found["kept_cache"]
