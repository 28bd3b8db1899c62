"""The learning rate of every optimizer step, and overrides that must be real fields."""

from types import SimpleNamespace

import pytest
from megatron.core.optimizer import OptimizerConfig

from mrl.config.schema import OptimConfig
from mrl.errors import ConfigError
from mrl.rank.bridge import checked_overrides
from mrl.rank.optimizer import build_scheduler, current_lr


def rates(steps: int, total: int | None = None, **optim) -> list[float]:
    """Rates of the first `steps` optimizer steps."""
    optimizer = SimpleNamespace(param_groups=[{"default_config": True}])
    scheduler = build_scheduler(OptimConfig(**optim), optimizer, total)
    seen = []
    for _ in range(steps):
        seen.append(current_lr(optimizer))
        scheduler.step(1)
    return seen


def test_a_constant_rate_is_constant_from_the_first_step():
    assert rates(3, lr=2.0) == [2.0, 2.0, 2.0]


def test_warm_up_rises_in_equal_parts_and_no_step_is_wasted_at_rate_zero():
    assert rates(6, lr=4.0, lr_warmup_steps=4) == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]
    assert rates(4, lr=4.0, lr_warmup_init=2.0, lr_warmup_steps=2) == [3.0, 4.0, 4.0, 4.0]


def test_a_warm_up_by_share_has_that_share_of_the_decay_rounded_down():
    """verl 0.9.1, utils/megatron/optimizer.py: int(lr_warmup_steps_ratio * lr_decay_steps); FSDP's: of all steps."""
    assert rates(5, total=11, lr=3.0, lr_warmup_steps_ratio=0.28) == [1.0, 2.0, 3.0, 3.0, 3.0]
    share = rates(4, total=9, lr=2.0, lr_warmup_steps_ratio=0.5, lr_decay_style="linear", lr_decay_steps=4)
    assert share == rates(4, lr=2.0, lr_warmup_steps=2, lr_decay_style="linear", lr_decay_steps=4)
    assert rates(2, total=3, lr=2.0, lr_warmup_steps_ratio=0.1) == [2.0, 2.0]  # less than one step
    with pytest.raises(ConfigError, match=r"lr_warmup_steps_ratio=0\.5 needs a length"):
        rates(1, lr=1.0, lr_warmup_steps_ratio=0.5)


def test_linear_decay_ends_at_the_least_rate_and_stays_there():
    assert rates(6, lr=4.0, min_lr=1.0, lr_warmup_steps=2, lr_decay_style="linear", lr_decay_steps=5) == [
        2.0,
        4.0,
        3.0,
        2.0,
        1.0,
        1.0,
    ]


def test_cosine_decay_is_half_way_in_the_middle_of_the_run():
    assert rates(4, total=4, lr=4.0, lr_decay_style="cosine")[1] == pytest.approx(2.0)


def test_a_decay_without_any_length_is_refused():
    with pytest.raises(ConfigError, match="lr_decay_steps"):
        rates(1, lr=1.0, lr_decay_style="cosine")


def test_what_is_refused_of_a_critics_schedule_is_said_of_its_section():
    optimizer = SimpleNamespace(param_groups=[{"default_config": True}])
    with pytest.raises(ConfigError, match=r"set critic\.optim\.lr_decay_steps") as raised:
        build_scheduler(OptimConfig(lr=1.0, lr_decay_style="cosine"), optimizer, None, "critic")
    assert "actor.optim" not in str(raised.value)


def test_a_warm_up_as_long_as_the_run_is_refused():
    with pytest.raises(ConfigError, match="allowed 0 to 4"):
        rates(1, total=5, lr=1.0, lr_warmup_steps=5, lr_decay_style="linear")


def test_overrides_pass_as_given_when_they_are_fields():
    assert checked_overrides("k", {"adam_eps": 1e-5}, OptimizerConfig) == {"adam_eps": 1e-5}


def test_every_unknown_override_is_named_with_the_nearest_field():
    with pytest.raises(ConfigError) as error:
        checked_overrides("actor.optim.override_optimizer_config", {"adam_epss": 1, "zzz": 2}, OptimizerConfig)
    assert "adam_epss: did you mean adam_eps" in str(error.value)
    assert "zzz: did you mean none of its fields?" in str(error.value)
