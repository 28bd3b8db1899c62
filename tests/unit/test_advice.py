"""A clip band that does not fit is told once, with what would fit at the run's response length."""

from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.driver.advice import advisers, clip_advice, routes_advice
from mrl.driver.reporting import AdvisedRecord
from mrl.record.attempts import UnderWay

TINY = Path(__file__).resolve().parents[2] / "parallel_configs" / "tiny-moe" / "cpu.yaml"
SIZES = ("data.train_batch_size=64", "actor.ppo_mini_batch_size=16")


def config(*overrides):
    return load_config(TINY, overrides=[*SIZES, *overrides]).config


def said_of(config, metrics):
    """Of clipping."""
    return clip_advice(config.algorithm.policy_loss, config.updates_per_step, metrics)


def metrics(clipped, length=1000.0):
    return {"actor/pg_clipfrac": clipped, "response_length/mean": length}


@pytest.mark.parametrize("clipped", [1e-6, 0.15, 0.4])
def test_a_healthy_share_is_no_matter(clipped):
    assert said_of(config(), metrics(clipped)) is None


def test_a_band_that_never_clips_is_to_be_narrowed_and_one_that_always_does_widened():
    assert "clip nothing; narrow it" in said_of(config(), metrics(0.0))
    assert "clip most sequences; widen it" in said_of(config(), metrics(0.41))


@pytest.mark.parametrize(("length", "band"), [(1000.0, "0.0003"), (10.0, "0.003"), (100_000.0, "3e-05")])
def test_the_band_that_fits_goes_as_one_over_the_root_of_the_length(length, band):
    assert f"at {length:.0f} tokens a band near {band} is usual" in said_of(config(), metrics(0.5, length))


def test_nothing_is_said_where_nothing_can_clip_or_the_loss_is_another_or_the_metric_is_not_there():
    assert said_of(config("data.train_batch_size=16"), metrics(0.0)) is None  # one update: every ratio is one
    assert said_of(load_config(TINY, "grpo", SIZES).config, metrics(0.0)) is None
    assert said_of(config(), {"val-core/x": 1.0}) is None


def test_it_is_printed_once_and_every_step_is_recorded(capsys, tmp_path):
    class Recorder:
        def __init__(self):
            self.steps = []

        def write(self, step, metrics):
            self.steps.append(step)

    recorder = Recorder()
    made = config()
    advice = advisers(made.algorithm, made.rollout, made.cluster.device, made.updates_per_step)
    record = AdvisedRecord(recorder, advice, UnderWay(tmp_path, 0))
    for step, clipped in ((1, 0.2), (2, 0.0), (3, 0.9)):
        record.write(step, metrics(clipped))
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and said[0].startswith("step 2: warning: actor/pg_clipfrac is 0 ")
    assert recorder.steps == [1, 2, 3]


def test_missing_routes_are_told_with_what_brings_them():
    missing = {"router/missing_routes": 0.25}
    rollout = config("actor.router_replay=R3", "rollout.enable_prefix_caching=true").rollout
    assert "enable_prefix_caching: false" in routes_advice(rollout, "cpu", missing)
    assert "engine-N.log" in routes_advice(rollout, "cuda", missing)
    for none in ({"router/missing_routes": 0.0}, {}):
        assert routes_advice(rollout, "cpu", none) is None
