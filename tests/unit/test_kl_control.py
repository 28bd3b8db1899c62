"""An adaptive weight of the KL in the reward (arXiv:1909.08593): by the equation, in a run, and over a resume."""

import json
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from replicas import Replicas, scored_step, stored
from test_config_rules import broken
from test_loop import KL_IN_REWARD, World, run_of
from test_saving import made_run, model  # noqa: F401 (a fixture)
from test_step_batch import SIZES, TINY, Noisy, rollouts_of, samples

from mrl.algo.kl_control import next_kl_coef
from mrl.checkpoint.manifest import read_manifest
from mrl.config.load import load_config
from mrl.config.loss_rules import loss_notes
from mrl.config.schema_algorithm import KlControlConfig
from mrl.data.order import DataCursor
from mrl.driver import loop
from mrl.driver.resume import resumed_state
from mrl.errors import NumericAbort
from mrl.tools.import_verl.translate import import_overrides

ADAPTIVE = (*KL_IN_REWARD, "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.05")


def test_the_equation_worked_by_hand():
    """e = clip(kl / target - 1, -0.2, 0.2) changes the weight by e x samples / horizon of itself."""
    assert next_kl_coef("adaptive", 0.2, 6.6, 6.0, 512, 10240) == pytest.approx(0.2 * (1 + 0.1 * 0.05))
    assert next_kl_coef("adaptive", 0.2, 60.0, 6.0, 512, 10240) == pytest.approx(0.2 * 1.01)
    assert next_kl_coef("adaptive", 0.2, -1.0, 6.0, 512, 10240) == pytest.approx(0.2 * 0.99)
    assert next_kl_coef("fixed", 0.2, 60.0, 6.0, 512, 10240) == 0.2


def test_each_step_takes_the_weight_that_the_one_before_left(tmp_path):
    world = World()
    run = run_of(world, tmp_path, *ADAPTIVE, "algorithm.kl_ctrl.horizon=40")
    for _ in range(3):
        loop.train_step(run)
    rows = [metrics for _, metrics in world.lines]
    assert rows[0]["actor/kl_coef"] == 0.1
    for before, after in pairwise(rows):
        error = min(max(before["actor/reward_kl"] / 0.05 - 1, -0.2), 0.2)
        assert error != 0 and after["actor/kl_coef"] == before["actor/kl_coef"] * (1 + error * 4 / 40)
    assert run.state.kl_coef != rows[-1]["actor/kl_coef"]


def test_a_weight_is_that_of_the_step_in_every_reward():
    config = load_config(TINY, None, [*SIZES, *ADAPTIVE]).config
    found = []
    for given in (None, 0.1, 0.3):
        actor = Noisy(config, 2)
        _, scored = scored_step(actor, rollouts_of(stored(samples())), kl_coef=given)
        found.append((scored.metrics["actor/kl_coef"], scored.metrics["actor/reward_kl_penalty"]))
    assert found[0] == found[1] and found[2] == (0.3, pytest.approx(3 * found[1][1]))


def test_a_checkpoint_holds_its_bits(model, tmp_path):  # noqa: F811
    run = made_run(model, tmp_path)
    adaptive, fixed = (KlControlConfig(type=kind) for kind in ("adaptive", "fixed"))
    for coefficient in (None, 0.1 * (1 + 0.2 / 3)):
        run.state = run.state.advanced(DataCursor(0, 1), coefficient)
        run.saver.save_last(run.state)
        folder = tmp_path / f"step-{run.state.step}"
        manifest = read_manifest(folder)
        assert resumed_state(SimpleNamespace(manifest=manifest), adaptive).kl_coef == coefficient
        assert resumed_state(SimpleNamespace(manifest=manifest), fixed).kl_coef is None  # the configuration's
        assert ("kl_coef" in json.loads((folder / "manifest.json").read_text())["trainer"]) == (coefficient is not None)


@pytest.mark.parametrize("control", [(), ADAPTIVE[2:]])
def test_a_kl_that_is_no_number_ends_the_step_before_anything_is_changed(control):
    config = load_config(TINY, None, [*SIZES, *KL_IN_REWARD, *control]).config
    actor = Replicas(config, 2, 0.0, lambda own: np.where(np.arange(len(own)) == 0, np.nan, 0.1).astype(np.float32))
    with pytest.raises(NumericAbort, match="no finite number in 2 of 24 responses"):  # the first of each replica
        scored_step(actor, rollouts_of(stored(samples())))


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (ADAPTIVE[2:], "algorithm.kl_ctrl.type"),
        ((*KL_IN_REWARD, ADAPTIVE[3]), "algorithm.kl_ctrl.target_kl"),
        ((*KL_IN_REWARD, "algorithm.kl_ctrl.horizon=5000"), "algorithm.kl_ctrl.horizon"),
        ((*ADAPTIVE, "algorithm.kl_ctrl.kl_coef=0"), "algorithm.kl_ctrl.kl_coef"),
        ((*ADAPTIVE, "algorithm.kl_ctrl.horizon=102"), "algorithm.kl_ctrl.horizon"),  # 0.2 x 64 x 8 = 102.4
    ],
)
def test_what_an_adaptive_weight_needs_is_one_message(overrides, field):
    assert [violation.field for violation in broken(*overrides)] == [field]
    assert broken(*ADAPTIVE) == broken(*ADAPTIVE, "algorithm.kl_ctrl.horizon=103") == []


def test_a_weight_that_follows_fast_is_told_before_a_run():
    def told(horizon: int) -> list[str]:
        config = load_config(TINY, None, [*ADAPTIVE, f"algorithm.kl_ctrl.horizon={horizon}"]).config
        return [note for note in loss_notes(config) if "kl_ctrl.horizon" in note]

    assert "2 times the samples of a step: the weight may change by 10% in each" in told(2 * 64 * 8)[0]
    assert not told(10 * 64 * 8)


def test_a_verl_script_keeps_its_controller():
    control = {"type": "adaptive", "kl_coef": 0.01, "target_kl": 0.2, "horizon": 5000}
    words = [f"algorithm.kl_ctrl.{name}={value}" for name, value in control.items()]
    out = import_overrides(["algorithm.use_kl_in_reward=True", *words])
    assert {name: out.values[f"algorithm.kl_ctrl.{name}"] for name in control} == control
    assert not out.of("unsupported")
