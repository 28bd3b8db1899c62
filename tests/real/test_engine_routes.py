"""The routes that a real engine hands out with its samples are those by which it computed them:
Hugging Face chooses the same experts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from deadlines import RUN_S
from tiny_models import save, tiny_moe

from mrl.platforms.hosting import get_hosting

pytestmark = [pytest.mark.real, pytest.mark.long]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Sample -> token ids of prompt and response, routes."""
    out = tmp_path_factory.mktemp("routes")
    config = {
        "model": {"path": str(save(tiny_moe(), out / "model")), "dtype": "float32"},
        "actor": {"router_replay": "R3", "layout": {"world_size": 1}, "ppo_mini_batch_size": 1},
        "rollout": {
            "max_num_seqs": 4,
            "enable_prefix_caching": True,
            "engine_kwargs": {"vllm": {"skip_tokenizer_init": True}},
        },
        "data": {"train_batch_size": 1, "max_prompt_length": 220, "max_response_length": 12},
        "cluster": {"device": "cpu", "n_gpus_per_node": 2},
    }
    (out / "config.json").write_text(json.dumps(config))
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    environment |= get_hosting("cpu").engine_environment(engine_id=0, engines=1, workers=1, kvcache_gib=1)
    command = [sys.executable, str(HERE / "engine_routes.py"), str(out / "config.json"), str(out / "found.npz")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found = np.load(out / "found.npz")
    return {i: (found[f"ids-{i}"], found[f"routes-{i}"]) for i in range(10)}


def hugging_face_routes(ids: np.ndarray) -> np.ndarray:
    """[tokens, layers, topk], sorted."""
    with torch.no_grad():
        logits = tiny_moe()(torch.from_numpy(ids)[None], output_router_logits=True).router_logits
    return np.stack([layer.topk(2).indices.sort(-1).values.numpy() for layer in logits], axis=1)


def test_every_computed_token_has_the_route_that_hugging_face_chooses(samples):
    for sample in range(9):
        ids, routes = samples[sample]
        assert routes.shape == (len(ids), 4, 2) and routes.dtype == np.int8
        assert np.array_equal(np.sort(routes[:-1], -1), hugging_face_routes(ids)[:-1])
        assert (routes[-1] == -1).all()  # sampled, and never computed


def test_what_the_prefix_cache_had_is_missing_and_the_rest_is_there(samples):
    ids, routes = samples[9]
    cached = int((routes[:-1, 0, 0] == -1).sum())
    assert 0 < cached < 200 and (routes[:cached] == -1).all()
    assert np.array_equal(np.sort(routes[cached:-1], -1), hugging_face_routes(ids)[cached:-1])
