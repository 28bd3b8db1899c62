"""A whole run of a random Qwen3-Next: twenty steps with the engine's routes, and the same bits after a stop at the
tenth.
"""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_runs import finish, train
from tiny_models import tiny_next
from world import make_world, metrics, put_model, succeeded

from mrl.tools.compare_runs import checkpoint_difference, metrics_difference

pytestmark = [pytest.mark.real, pytest.mark.long]

SETTINGS = dict(
    trainer__save_freq=10, trainer__test_freq=-1, trainer__val_before_train=False, trainer__total_epochs=20,
    rollout__enable_prefix_caching=False, actor__router_replay="R3",
)  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """The tiny world with another model under its tokenizer. No token is padding: transformers would give that one an
    embedding of zeros, of which a norm's gradient is a thousand times another's where it is sampled.
    """
    return put_model(make_world(tmp_path_factory.mktemp("world")), lambda pad_token_id, **sizes: tiny_next(**sizes))


def test_twenty_steps_train_and_go_on_from_the_tenth_bit_by_bit(world, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert finish(train(world, whole, **SETTINGS, trainer__total_training_steps=20), whole) == 0
    assert finish(train(world, stopped, **SETTINGS, trainer__total_training_steps=10), stopped) == 0
    assert finish(train(world, stopped, "--resume", **SETTINGS, trainer__total_training_steps=20), stopped) == 0
    rows = metrics(whole)
    assert [row["training/global_step"] for row in rows] == list(range(1, 21))
    assert all(row["reshard/verified"] == 1 and row["router/missing_routes"] == 0 for row in rows)
    assert max(row["training/rollout_log_probs_abs_diff_max"] for row in rows) < 1e-4
    assert metrics_difference(rows, metrics(stopped)) is None
    ends = (run / "checkpoints" / "step-20" for run in (whole, stopped))
    assert checkpoint_difference(*ends) is None

    succeeded("convert", "megatron-to-hf", str(whole), "-o", str(tmp_path / "hf"))
    before, after = (load_file(next(folder.glob("*.safetensors"))) for folder in (world / "model", tmp_path / "hf"))
    assert before.keys() == after.keys()
    still = {name for name in before if before[name].equal(after[name])}
    assert all(".mlp.experts." in name for name in still)  # that no token chose, and nothing else
    assert any(name.endswith("A_log") for name in before) and len(still) < len(before) / 4
