"""Every preset that ships is read, and says where it was run."""

from pathlib import Path

import pytest

from mrl.config.load import load_config

FOLDER = Path(__file__).parents[2] / "parallel_configs"
PRESETS = sorted(FOLDER.glob("*/*.yaml"))


def test_there_are_presets():
    assert FOLDER / "tiny-moe" / "cpu.yaml" in PRESETS


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_preset_loads_and_says_where_it_was_run(path):
    load_config(path)
    head = path.read_text().partition("\n\n")[0].lower()
    assert "run on:" in head or "planned arithmetic only" in head


def test_the_tiny_preset_is_what_its_comments_say():
    config = load_config(FOLDER / "tiny-moe" / "cpu.yaml").config
    assert config.data.train_batch_size // config.actor.ppo_mini_batch_size == 4
    assert config.actor.ppo_micro_batch_size_per_gpu == config.actor.ppo_mini_batch_size * config.rollout.n
    # twice the band of 1,000 tokens carried to 3 tokens by 1/sqrt(length), within a tenth
    assert config.algorithm.policy_loss.clip_ratio_low == pytest.approx(2 * 3e-4 * (1000 / 3) ** 0.5, rel=0.1)
