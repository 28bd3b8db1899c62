"""A whole run of a random Qwen3-Next: twenty steps with the engine's routes, and the same bits after a stop at the
tenth.
"""

from pathlib import Path

import pytest
from test_latent_run import after_twenty_steps
from tiny_models import tiny_next
from world import make_world, put_model

pytestmark = [pytest.mark.real, pytest.mark.long]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """The tiny world with another model under its tokenizer. No token is padding: transformers would give that one an
    embedding of zeros, of which a norm's gradient is a thousand times another's where it is sampled.
    """
    return put_model(make_world(tmp_path_factory.mktemp("world")), lambda pad_token_id, **sizes: tiny_next(**sizes))


def test_twenty_steps_train_and_go_on_from_the_tenth_bit_by_bit(world, tmp_path):
    before, after = after_twenty_steps(world, tmp_path)
    still = {name for name in before if before[name].equal(after[name])}
    assert all(".mlp.experts." in name for name in still)  # that no token chose, and nothing else
    assert any(name.endswith("A_log") for name in before) and len(still) < len(before) / 4
