"""Settings of rewards and loggers that contradict themselves, or name what is not there."""

import pytest

from mrl.config.load import load_config
from mrl.config.run_rules import RUN_RULES
from mrl.errors import InvalidConfig

TINY = "parallel_configs/tiny-moe/cpu.yaml"


def broken(*overrides):
    return {b.field: b for rule in RUN_RULES for b in rule(load_config(TINY, None, list(overrides)).config, None)}


def test_verls_managers_are_understood():
    assert broken("reward.reward_manager=naive") == {}
    assert broken("reward.reward_manager=dapo", "algorithm.overlong_buffer.enable=true") == {}
    with pytest.raises(InvalidConfig, match="reward_manager"):
        load_config(TINY, None, ["reward.reward_manager=prime"])


def test_the_naive_manager_and_an_overlong_penalty_contradict_each_other():
    found = broken("reward.reward_manager=naive", "algorithm.overlong_buffer.enable=true")
    assert found["reward.reward_manager"].allowed == ("dapo", None)


def test_unknown_rules_and_loggers_come_with_the_nearest_known():
    assert "multiple_choice" in broken("reward.function=multi_choice")["reward.function"].rule
    assert "think_format" in broken("reward.bonus_rules={think_formt: 0.1}")["reward.bonus_rules"].rule
    assert "wandb" in broken("trainer.logger=[console, wandbb]")["trainer.logger"].rule


def test_the_sources_loggers_are_known():
    assert broken("trainer.logger=[console, wandb]", "reward.function=math") == {}
    assert broken("trainer.logger=[console, tensorboard, swanlab, mlflow]") == {}
