"""What a hybrid of gated delta and gated attention would compute without what is made for it: the log-probs of another
model, without an error.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hybrid_worker import TRAPS
from ranks import run_ranks
from test_parity import _samples, _token_outputs
from tiny_models import save, tiny_next

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> dict[str, float]:
    """Trap -> largest difference from Hugging Face's log-probs."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("hybrid")
    model = tiny_next()
    batch = _samples(model.config.vocab_size)
    with torch.no_grad():
        expected = np.where(batch.response_mask, _token_outputs(model, batch)[0].numpy(), 0)
    np.savez(out / "batch.npz", **batch.arrays)
    config = {
        "model": {"path": str(save(model, out / "model")), "dtype": "float32"},
        "actor": {
            "layout": {"world_size": 1},
            "ppo_mini_batch_size": len(batch),
            "log_prob_micro_batch_size_per_gpu": len(batch),
        },
        "rollout": {"n": 1},
        "data": {"train_batch_size": len(batch)},
        "cluster": {"device": "cpu", "step_timeout_s": 300},
    }
    case = out / "case.json"
    case.write_text(json.dumps({"config": config, "batch": str(out / "batch.npz")}))
    run_ranks(Path(__file__).with_name("hybrid_worker.py"), 1, out, [str(case)])
    found = {name: np.load(out / f"{name}.npz") for name in TRAPS}
    return {name: np.abs(part["log_probs"] - expected[part["rows"]]).max() for name, part in found.items()}


def test_in_one_pack_every_sequence_has_the_log_probs_that_it_has_alone(errors):
    assert errors["none"] < 1e-5


@pytest.mark.parametrize("trap", [name for name in TRAPS if name != "none"])
def test_without_its_cure_each_trap_is_another_model(errors, trap):
    assert errors[trap] > 0.05
