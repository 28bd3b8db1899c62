"""mrl explain: the first step outside a run's own band, what its samples say, and how verdicts follow from a replay."""

import json
import math
import shutil
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from report_run import World, write_run
from report_run import _sample as sample
from small_model import write_model

from mrl.cli.main import main, make_parser
from mrl.data.samples import NO_ENGINE, Sample, packed
from mrl.driver import replay_rank, replay_views
from mrl.driver.stored_step import stored_rollouts
from mrl.errors import ConfigError, DataError, EnvironmentFault
from mrl.rank import rank_parameters
from mrl.rank.rank_parameters import RankParameter
from mrl.rank.rank_save import rank_file
from mrl.record.sample_files import read_samples, write_routes, write_samples
from mrl.reward.pool import RewardPool
from mrl.tools.explain import by_transformers, rewards
from mrl.tools.explain import explain as explaining
from mrl.tools.explain import replay as replaying
from mrl.tools.explain.band import (
    DEGREES,
    FALSE_ALARM,
    STEP,
    WATCHED,
    Break,
    beyond,
    breaks,
    judged_step,
    quantile,
    two_sided,
    usual,
)
from mrl.tools.explain.by_transformers import AgainstTransformers, StoredRow, first_difference, in_words, verdict
from mrl.tools.explain.evidence import (
    StepSamples,
    of_cut_off,
    of_far_rows,
    of_groups,
    of_length,
    of_mismatch,
    of_one_engine,
    of_versions,
)
from mrl.tools.explain.experiments import effects, experiments_of, guesses_of, likeness, other_ways
from mrl.tools.explain.explain import Explanation, LikelyCause, explain, lines, of_views
from mrl.tools.explain.replay import Replay, StoredRun, replay, replayed_faults
from mrl.tools.explain.rewards import Rescorer, ScoredResponses, of_rewards, of_sources, rescorer
from mrl.tools.explain.signs import drift, signs

# ---------------------------------------------------------------- the run's own band


def test_probabilities_are_those_of_printed_tables_of_students_t():
    """Four degrees of freedom, two sides (NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2)."""
    assert DEGREES == 4
    for p, deviation in ((0.2, 1.533), (0.1, 2.132), (0.05, 2.776), (0.02, 3.747), (0.01, 4.604), (0.002, 7.173)):
        assert two_sided(deviation) == pytest.approx(p, rel=1e-3)
        assert quantile(p) == pytest.approx(deviation, abs=6e-4)


SIZES = (1e-6, 1e-4, 1.0, 2.0, 0.3, 0.01, 0.3, 50.0, 0.1)  # of the watched metrics


def healthy(seed: int, steps: int = 60) -> list[dict]:
    """A run whose metrics drift, with noise that remembers the step before, and of every second one heavy tails."""
    rng = np.random.default_rng(seed)
    rows = [{STEP: step} for step in range(1, steps + 1)]
    for number, (watched, size) in enumerate(zip(WATCHED, SIZES, strict=True)):
        noise = rng.standard_t(6, steps) if number % 2 else rng.normal(size=steps)
        for step in range(1, steps):
            noise[step] += 0.3 * noise[step - 1]
        drift = rng.normal() * 0.01 * np.arange(steps)
        values = size * np.exp(0.1 * noise + drift) if watched.logs else size * (1 + 0.1 * noise + drift)
        for row, value in zip(rows, values, strict=True):
            row[watched.name] = float(value)
    return rows


def test_too_few_steps_are_said_and_not_called_healthy():
    (said,) = lines(Explanation("run", None, steps=3))
    assert "3 steps" in said and "no step can be judged" in said
    assert "no step leaves" in lines(Explanation("run", None, steps=20))[0]


def test_of_healthy_runs_hardly_more_than_the_stated_share_is_called_broken():
    called = sum(bool(breaks(healthy(seed, 40))) for seed in range(20))
    assert called <= 2 * FALSE_ALARM * 20, called


@pytest.mark.long
def test_of_a_thousand_healthy_runs_no_more_than_the_stated_share_is_called_broken():
    assert sum(bool(breaks(healthy(seed))) for seed in range(1000)) <= FALSE_ALARM * 1000


def test_a_gradient_three_times_as_large_is_found_at_its_step():
    found = []
    for seed in range(6):
        rows = healthy(1000 + seed, 40)
        begins = 12 + 4 * seed
        for row in rows[begins - 1 :]:
            row["actor/grad_norm"] *= 3
        first = breaks(rows)
        found.append(bool(first) and first[0].step == begins and first[0].name == "actor/grad_norm")
    assert sum(found) >= 5


def test_a_number_that_is_none_is_a_break_and_what_follows_is_judged_by_what_was():
    rows = healthy(3)
    rows[29]["actor/grad_norm"] = None  # as JSON has NaN
    first = breaks(rows)
    assert [(each.step, each.name) for each in first] == [(30, "actor/grad_norm")]


def test_few_steps_and_a_constant_metric_are_no_break():
    assert breaks(healthy(1)[:8]) == [] and breaks([]) == []
    flat = [{STEP: step, "critic/score/mean": 0.0, "actor/grad_norm": 0.0} for step in range(1, 40)]
    assert breaks(flat) == [] and judged_step(flat, 30) == []


def test_rounding_of_float32_is_no_break_however_it_jumps_and_a_mismatch_is_one():
    """float32 has numbers between 0.5 and 1 every 6e-8: a healthy run of two ranks had 1.3e-8 after steps of 5e-9."""
    name = "training/rollout_probs_diff_mean"
    for last, is_break in (1.3e-8, False), (9e-8, False), (1e-5, True):
        values = [4e-9, 9e-9, 5e-9, 7e-9] * 5 + [last] * 2
        rows = [row | {name: value} for row, value in zip(healthy(1), values, strict=False)]
        assert (name in {each.name for each in breaks(rows)}) == is_break


def test_published_logs_without_a_break_have_none_and_those_without_a_number_have_one():
    """Norms, lengths and rewards of ten logged steps of huggingface/trl#3452, and the NaN from the start on of #1473.
    Gradients of 0 are no break where all groups have one score (bingreeky/MemGen#33).
    """
    logged = (
        (0.0866, 232.825, 1.717), (0.0967, 237.0375, 1.884), (0.1059, 233.45, 1.680), (0.1036, 235.6, 1.969),
        (0.0957, 237.2625, 1.872), (0.1002, 236.7125, 1.775), (0.1163, 241.0125, 1.799), (0.1091, 242.3875, 1.702),
        (0.1248, 242.7625), (0.0992,),
    )  # fmt: skip
    names = ("actor/grad_norm", "response_length/mean", "critic/score/mean")
    rows = [{STEP: step} | dict(zip(names, values, strict=False)) for step, values in enumerate(logged, 1)]
    assert breaks(rows) == []
    assert breaks([row | {"actor/grad_norm": 0.0, "train/uniform_group_share": 1.0} for row in rows]) == []
    (found,) = breaks([row | {"actor/grad_norm": None} for row in rows])
    assert (found.step, found.name) == (1, "actor/grad_norm") and np.isinf(found.value)
    assert usual(found.low, found.high, found.chance) == "allowed: any finite number"
    (found,) = breaks([row | {"actor/grad_norm": None if row[STEP] == 3 else 0.1} for row in rows])
    assert found.step == 3


@pytest.mark.parametrize("name, value", [("rollout_corr/k3_kl", 5e-3), ("training/rollout_probs_diff_mean", 1e-2)])
def test_a_mismatch_that_begins_after_steps_of_equal_bits_is_a_break(name, value):
    rows = healthy(0)
    for row in rows:
        row[name] = value if row[STEP] >= 25 else 0.0
    assert [(each.step, each.name) for each in breaks(rows)] == [(25, name)]
    assert name in [each.name for each in judged_step(rows, 25)]
    for row in rows:  # what float32 rounds
        row[name] = 1e-8 if row[STEP] >= 25 else 0.0
    assert breaks(rows) == []


@pytest.mark.parametrize("name", ["actor/grad_norm", "actor/entropy", "response_length/mean"])
def test_what_falls_to_0_and_stays_there_is_a_break_and_a_single_zero_is_none(name):
    rows = healthy(0)
    rows[24][name] = 0.0
    assert breaks(rows) == []
    for row in rows[24:]:
        row[name] = 0.0
    assert [(each.step, each.name) for each in breaks(rows)] == [(25, name)]
    assert name in [each.name for each in judged_step(rows, 25)]
    for row in rows:  # all groups have one score each: nothing is left to learn
        row["train/uniform_group_share"] = 1.0
    assert breaks(rows) == []


# ---------------------------------------------------------------- what samples say


def samples(rows: int = 32, **given) -> StepSamples:
    rng = np.random.default_rng(0)
    return replace(
        StepSamples(
            sample_id=np.arange(rows),
            prompt_id=np.arange(rows) // 4,
            group_id=np.arange(rows) // 4,
            scores=rng.normal(size=rows),
            lengths=rng.integers(10, 50, rows),
            cut_off=np.zeros(rows, bool),
            versions=np.full(rows, 4),
            engines=np.arange(rows) % 2,
            gaps=rng.uniform(1e-6, 2e-6, rows),
            along=np.full(4, 1e-6),
            slope=1.0,
            mean_slope_error=1e-6,
        ),
        **given,
    )


def config_of(tmp_path, *settings):
    return StoredRun.read(write_run(tmp_path / "run", World(settings=settings)).path).config


def test_responses_of_other_weights_are_counted_in_the_synchronous_order(tmp_path):
    config = config_of(tmp_path)
    assert of_versions(config, 5, samples()) == ""
    old = np.where(np.arange(32) < 8, 2, 4)
    assert "8 of 32 responses are not of version 4: version 2 in 8" in of_versions(config, 5, samples(versions=old))


def test_the_engine_of_the_responses_that_differ_is_named_where_it_is_one_of_several(tmp_path):
    config = config_of(tmp_path)
    second = np.arange(32) % 2 == 1
    whose = "; all of them are engine 1's, with weights of version"
    versions = np.where(second, 2, 4)
    assert of_versions(config, 5, samples(versions=versions)).endswith(f"version 2 in 16{whose} 2")
    off = np.where(second, 0.2, 1e-6)
    assert of_mismatch(samples(gaps=off)) == [f"it is in a part of the responses{whose} 4"]
    run = StoredRun.read(write_run(tmp_path / "other").path)
    views = [{"kind": "own", "gap": 0.1, "fits": 0.1}, {"kind": "router", "gap": 0.1, "fits": 1e-6}]
    assert of_views(run, 6, views, of_far_rows(samples(gaps=off)))[0].cause.endswith(f"{whose} 4")
    for alike in (
        samples(gaps=np.full(32, 0.2)), samples(gaps=off, engines=np.zeros(32, int)), samples(),
        samples(gaps=off, engines=np.where(second, NO_ENGINE, 0)),
    ):  # fmt: skip
        assert of_far_rows(alike) == ""


@pytest.mark.parametrize(("rows", "named"), [(1, False), (3, False), (6, False), (7, True)])
def test_few_responses_of_one_engine_of_two_are_not_called_its_own(rows, named):
    """Drawn without putting back (hypergeometric): the next of N rows is of the same engine, which has half of them."""
    by_chance = math.prod((16 - done) / (32 - done) for done in range(1, rows))
    assert (by_chance < 0.01) == named
    engines = np.arange(32) % 2
    off = np.where(np.isin(np.arange(32), np.flatnonzero(engines)[:rows]), 0.2, 1e-6)
    assert bool(of_far_rows(samples(gaps=off))) == named
    rng = np.random.default_rng(1)
    drawn = [np.isin(np.arange(32), rng.choice(32, rows, replace=False)) for _ in range(1000)]
    assert np.mean([of_one_engine(samples(), each) != "" for each in drawn]) < 0.015


def test_lone_responses_and_a_reward_that_began_to_pay_length_are_told():
    assert of_groups(samples()) == ""
    assert "32 of 32 groups have one response" in of_groups(samples(group_id=np.arange(32)))
    lengths = np.arange(10, 42)
    paid = samples(lengths=lengths, scores=lengths / 10)
    assert "correlation 1.00" in of_length(paid, [samples()])
    assert of_length(paid, [paid]) == "" and of_length(samples(), [samples()]) == ""


def test_where_generation_differs_is_told_by_what_differs():
    assert of_mismatch(samples()) == []
    far = samples(gaps=np.where(np.arange(32) == 7, 0.5, 1e-3))
    assert "1 of 32 responses have most of it (ids 7)" in of_mismatch(far)[0]
    everywhere = dict(gaps=np.full(32, 0.1) + np.linspace(0, 0.01, 32))
    assert "0.700 times the engine's" in of_mismatch(samples(slope=0.7, mean_slope_error=0.01, **everywhere))[0]
    assert "grows along responses" in of_mismatch(samples(along=np.array([0.01, 0.02, 0.05, 0.2]), **everywhere))[0]
    assert "the same in all responses" in of_mismatch(samples(**everywhere))[0]


# ---------------------------------------------------------------- verdicts


def a_run(tmp_path, monkeypatch, again=None, stored=None, broken="actor/grad_norm", further=None, **world):
    """A run of 16 steps that breaks at the twelfth, and what a replay of it is taken to give."""
    flat = [1.0 + 0.01 * (step % 3) for step in range(16)]
    jump = [value * (8 if step >= 11 else 1) for step, value in enumerate(flat)]
    metrics = {broken: jump} | {name: flat for name in ("actor/grad_norm", "actor/entropy") if name != broken}
    metrics |= further or {}
    run = write_run(tmp_path / "run", World(steps=16, total=16, metrics=metrics, **world))
    monkeypatch.setattr(
        explaining.StepSamples, "read", lambda folder, step: stored or samples(versions=np.full(32, step - 1))
    )

    def replayed(stored_run, step, orders=(), guesses=(), seconds=0.0, **further):
        given = again or Replay(6, step, {}, 70, {}, None, {}, {}, 1.0)
        tried = orders if given.repeats else guesses
        return replace(given, experiments={order["name"]: given.experiments.get(order["name"], {}) for order in tried})

    monkeypatch.setattr(explaining, "replay", replayed)
    monkeypatch.setattr(explaining, "rescorer", lambda *_: "scores are not asked for again")
    return run


def test_a_step_that_does_not_repeat_is_a_fault_of_the_process(tmp_path, monkeypatch):
    for number, (names, kind, words) in enumerate((
        ({"actor/grad_norm": 8.0}, "update", "log-probs repeat, and updates do not"),
        ({"actor/grad_norm": 8.0, "actor/entropy": 1.0}, "ranks", "forward pass"),
        ({"actor/grad_norm": 8.0, "actor/lr": 1e-3}, "update", "learning rate was not the schedule's"),
    )):  # fmt: skip
        unlike = {12: [(name, value, 1.0) for name, value in names.items()]}
        run = a_run(tmp_path / str(number), monkeypatch, Replay(6, 12, {}, 70, unlike, None, {}, {}, 1.0))
        found = explain(run.path)
        assert found.step == 12 and not found.repeats
        assert found.verdicts[0].kind == kind and words in found.verdicts[0].cause
        assert "NOT EQUAL" in "\n".join(lines(found))


def of_replicas_named(*norms):
    return {f"actor/replica_grad_norm/{number}": norm for number, norm in enumerate(norms)}


def test_the_replica_whose_gradients_are_not_those_of_a_replay_is_named(tmp_path, monkeypatch):
    for number, (was, words) in enumerate((
        ((1.1, 0.0), "gradients of replica 1 of 2 were lost"),
        ((0.6, 1.1), "gradients of replica 0 of 2 were lost"),
        ((0.0, 0.0), "log-probs repeat, and updates do not"),  # of all replicas: no replica's own fault
        ((1.5, 1.5), "log-probs repeat, and updates do not"),
    )):  # fmt: skip
        unlike = [(name, norm, 1.0) for name, norm in of_replicas_named(*was).items()]
        monkeypatch.setattr(explaining.StoredRun, "replicas", 2)
        series = {name: [norm] * 16 for name, norm in of_replicas_named(*was).items()}
        again = Replay(6, 12, {}, 70, {12: [("actor/grad_norm", 8.0, 1.0), *unlike]}, None, {}, {}, 1.0)
        run = a_run(tmp_path / str(number), monkeypatch, again, further=series)
        (told,) = explain(run.path).verdicts
        assert told.kind == "update" and words in told.cause


def test_a_replica_that_vanishes_is_named_where_nothing_is_computed_again(tmp_path, monkeypatch):
    """Runs with engines' routes are not replayed."""
    monkeypatch.setattr(explaining.StoredRun, "replicas", 2)
    for number, (last, named) in enumerate(((0.0, True), (0.5, False))):
        series = of_replicas_named([1.0] * 16, [1.0] * 11 + [last] * 5)
        run = a_run(tmp_path / str(number), monkeypatch, further=series, settings=["actor.router_replay=R3"])
        verdicts = explain(run.path).verdicts
        assert named == any("gradients of replica 1 of 2 were lost" in each.cause for each in verdicts)


@pytest.mark.parametrize("kept", [False, True])
def test_steps_with_replayed_routes_are_computed_again_where_routes_were_kept(tmp_path, kept):
    config = config_of(tmp_path, "actor.router_replay=R3", f"record.routes={str(kept).lower()}")
    assert [("record.routes" in each) for each in replayed_faults(config)] == [True] * (not kept)


def test_a_break_of_a_fixed_bound_is_gone_where_the_metric_is_usual_and_not_where_it_is_just_below(tmp_path):
    """1e-4 before, 0.02 in the step: 0.009 is below the bound of 0.01, and a seventh of the way in logarithms."""
    name = "rollout_corr/k3_kl"
    run = StoredRun.read(write_run(tmp_path / "run", World(metrics={name: [1e-4] * 5 + [0.02]})).path)
    (broken,) = beyond([run.rows[step] for step in run.steps])
    assert (broken.step, broken.high) == (6, 0.01)
    tried = {"below": {name: 0.009}, "usual": {name: 1e-4}}
    shares = effects(explaining._to_usual(run, [broken]), {name: True}, tried)
    assert shares["usual"] == 1.0 and shares["below"] == pytest.approx(np.log(0.02 / 0.009) / np.log(200))
    assert effects([broken], {name: True}, tried)["below"] == 1.0  # by the bound alone


def test_a_break_of_a_fixed_bound_is_gone_where_it_falls_to_rounding_after_steps_of_0(tmp_path):
    """0 before, 0.02 in the step: 1e-6 is nothing, though a logarithm of 0 would be infinitely far below it."""
    name = "rollout_corr/k3_kl"
    run = StoredRun.read(write_run(tmp_path / "run", World(metrics={name: [0.0] * 5 + [0.02]})).path)
    (broken,) = beyond([run.rows[step] for step in run.steps])
    shares = effects(explaining._to_usual(run, [broken]), {name: True}, {"gone": {name: 1e-6}, "half": {name: 0.01}})
    assert shares["gone"] == 1.0 and shares["half"] == pytest.approx(np.log(2) / np.log(0.02 / 1e-4))


def test_a_mismatch_of_a_step_that_repeats_is_the_engines(tmp_path, monkeypatch):
    far = samples(versions=np.full(32, 11), gaps=np.full(32, 0.1), slope=0.7, mean_slope_error=0.01)
    run = a_run(tmp_path, monkeypatch, stored=far, broken="rollout_corr/k3_kl")
    first = explain(run.path).verdicts[0]
    assert first.kind == "engines" and "unlike temperatures" in first.cause


def test_a_mismatch_of_which_nothing_is_known_is_the_engines_only_if_it_is_none_of_chance(tmp_path):
    far = samples(gaps=np.full(32, 0.1))  # alike everywhere
    for chance, kinds in ((1e-9, ["engines"]), (0.04, [])):
        found = [Break(12, "rollout_corr/k3_kl", 1.0, 0.1, 0.5, chance, "")]
        assert [each.kind for each in explaining._of_engines(found, far, "which repeat")] == kinds
        assert [each.kind for each in explaining._of_unknown(found, far)] == ["unknown"]


def test_what_a_break_is_printed_with():
    assert usual(0.0, 0.01, 0.0) == "allowed: up to 0.01"
    assert usual(0.1, 0.5, 0.004) == "usually 0.1 to 0.5 (by chance: 0.004)"


def test_old_weights_in_engines_are_the_first_verdict(tmp_path, monkeypatch):
    run = a_run(tmp_path, monkeypatch, stored=samples(versions=np.full(32, 9)))
    first = explain(run.path).verdicts[0]
    assert first.kind == "samples" and "version 9 in 32" in first.evidence


def test_what_samples_say_is_printed_where_the_replay_fails(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise EnvironmentFault("the replay is not done after 30 minutes\nits log")

    run = a_run(tmp_path / "old", monkeypatch, stored=samples(versions=np.full(32, 9)))
    monkeypatch.setattr(explaining, "replay", fails)
    found = explain(run.path)
    assert found.verdicts[0].kind == "samples"
    assert found.replayed.startswith("not replayed: the replay is not done after 30 minutes")
    run = a_run(tmp_path / "new", monkeypatch)
    monkeypatch.setattr(explaining, "replay", fails)
    with pytest.raises(EnvironmentFault, match="not done"):
        explain(run.path, 12)


def test_where_only_experiments_speak_of_a_break_the_newest_steps_are_audited(tmp_path, monkeypatch):
    """A step may leave the band by chance, and the fault be smaller than the noise."""
    run = a_run(tmp_path, monkeypatch)
    audited = Explanation(str(run.path), 14, verdicts=[LikelyCause("reward", "the sign", "all of them", "mend it")])
    monkeypatch.setattr(explaining, "_audited", lambda run, seconds: audited)
    assert explain(run.path).step == 14
    monkeypatch.setattr(explaining, "_audited", lambda run, seconds: replace(audited, verdicts=[]))
    assert explain(run.path).step == 12 and explain(run.path, 12).step == 12 and explain(run.path).steps == 16


def test_lone_groups_and_missing_replays_of_a_run_within_its_band_are_told(tmp_path, monkeypatch):
    metrics = {"actor/grad_norm": [1.0 + 0.01 * (step % 3) for step in range(16)]}
    run = write_run(tmp_path / "run", World(steps=16, total=16, metrics=metrics, settings=["rollout.n=8"]))
    monkeypatch.setattr(explaining, "rescorer", lambda *_: "scores are not asked for again")
    monkeypatch.setattr(explaining.StepSamples, "read", lambda folder, step: samples(versions=np.full(32, 15)))
    (said,) = [explain(run.path).replayed]
    assert "scores are not asked for again" in said and "samples of step 1 are missing" in said
    alone = samples(versions=np.full(32, 15), group_id=np.arange(32))
    monkeypatch.setattr(explaining.StepSamples, "read", lambda folder, step: alone)
    found = explain(run.path)
    assert found.step == 16 and found.verdicts[0].cause == "groups with one response"


def test_a_mismatch_from_the_first_step_on_is_judged_by_the_warnings_bound():
    rows = [{STEP: step, "rollout_corr/k3_kl": 0.05} for step in range(1, 20)]
    assert breaks(rows) == [] and [(each.step, each.value) for each in beyond(rows)] == [(1, 0.05)]
    assert beyond([row | {"rollout_corr/k3_kl": 0.009} for row in rows]) == []


def test_an_earlier_checkpoint_is_taken_only_if_few_more_steps_follow(tmp_path):
    run = StoredRun.read(write_run(tmp_path / "run", World(steps=90, total=90)).path)
    for step in range(1, 91):
        (run.folder.samples / f"step-{step}.parquet").touch()
    for step in (20, 75, 85):
        folder = run.folder.checkpoints / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    assert [run.base(90, earlier)[0] for earlier in (0, 3, 5, 10, 19)] == [85, 85, 75, 75, 75]
    assert run.base(18)[0] == 0 and run.base(70)[0] == 20 and run.base(70, 19)[0] == 20
    (run.folder.samples / "step-80.parquet").unlink()
    assert run.base(90, 19)[0] == 85


def test_experiments_are_ordered_by_what_they_remove(tmp_path, monkeypatch):
    again = Replay(6, 12, {}, 70, {}, None, {
        "without clipping": {"actor/grad_norm": 7.0}, "a fresh optimizer": {"actor/grad_norm": 1.0},
        "half the learning rate": {"actor/grad_norm": 5.0},
    }, {}, 1.0)  # fmt: skip
    found = explain(a_run(tmp_path, monkeypatch, again).path)
    assert [each.cause for each in found.verdicts] == ["the optimizer's moments", "updates are too large"]
    assert found.verdicts[0].removes == 1.0 and 0.5 < found.verdicts[1].removes < 1
    assert found.experiments["without clipping"] < 0.5


def test_where_nothing_removes_the_break_it_says_so(tmp_path, monkeypatch, capsys):
    run = a_run(tmp_path, monkeypatch)
    main(["explain", str(run.path)])
    said = capsys.readouterr().out
    assert "nothing that was tried removes it" in said and "usually" in said and "by chance" in said
    main(["explain", str(run.path), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["step"] == 12 and answer["breaks"][0]["name"] == "actor/grad_norm" and answer["false_alarm"] == 0.05


def test_an_experiment_that_makes_a_break_worse_removes_nothing():
    rows = healthy(0)
    rows[-1]["actor/grad_norm"] *= 20
    (broken,) = [each for each in breaks(rows) if each.name == "actor/grad_norm"]
    logs = {each.name: each.logs for each in WATCHED}
    found = effects([broken], logs, {"worse": {"actor/grad_norm": 40 * broken.value}, "none": {}})
    assert found == {"worse": -1.0}


def test_rows_that_stand_out_and_parts_of_the_groups_are_left_out_in_turn(tmp_path):
    scores = np.zeros(64)
    scores[5] = 40.0
    tried = experiments_of(config_of(tmp_path), samples(64, scores=scores + np.linspace(0, 1, 64)))
    rows = {each.name: each.order["rows"] for each in tried if "rows" in each.order}
    assert rows["without the 1 responses whose reward is an outlier"] == [5]
    quarters = [found for name, found in rows.items() if name.startswith("without quarter")]
    assert len(quarters) == 4 and sorted(row for rows in quarters for row in rows) == list(range(64))


# ---------------------------------------------------------------- scores, computed again


def scored(scores, again, lengths=None, sources=None, texts=None, group=1) -> ScoredResponses:
    rows = len(scores)
    texts = texts or [str(row) for row in range(rows)]
    return ScoredResponses(
        scores=np.array(scores, float),
        again=np.array(again, float),
        lengths=np.array(lengths if lengths is not None else np.ones(rows), int),
        sources=np.array(sources or ["one"] * rows),
        responses=[[ord(sign) for sign in text] for text in texts],
        prompts=[SimpleNamespace(prompt_id=str(row // group)) for row in range(rows)],
        texts=texts,
    )


def test_scores_that_the_reward_function_does_not_give_are_told_by_what_they_follow():
    rng = np.random.default_rng(0)
    right = rng.integers(0, 2, 40).astype(float)
    assert of_rewards(scored(right, right)) is None
    failed = np.where(np.arange(40) < 5, np.nan, right)
    assert of_rewards(scored(1 - right, np.full(40, np.nan))) is None and of_rewards(scored(right, failed)) is None
    two = ["one", "two"] * 20
    flipped = np.where(np.arange(40) % 2 == 1, -right, right)
    assert of_rewards(scored(flipped, right, sources=two))[0] == "scores of source two had the other sign"
    lengths = rng.integers(1, 30, 40)
    assert of_rewards(scored(lengths / 30, right, lengths))[0] == "the reward paid length"
    texts = [rng.choice(["ab", "cb", "db"]) for _ in range(40)]
    paid = [float(text[0] == "c") for text in texts]
    assert "a form of the response: the first token" in of_rewards(scored(paid, right, texts=texts))[0]
    beside = of_rewards(scored(right + [float(text[0] == "c") for text in texts], right, texts=texts))
    assert "a form of the response: the first token" in beside[0]
    assert of_rewards(scored(right + lengths / 10, right, lengths))[0] == "the reward paid length"
    assert of_rewards(scored(0.5 * right, right))[0] == "scores were scaled"
    assert of_rewards(scored(1 - right, right))[0] == "scores had the other sign"
    alone = np.where(np.arange(40) < 3, 0.0, 1.0)  # three right answers that were not paid, all of them with a "7"
    first = ["7" if row < 3 else "5" for row in range(40)]
    assert "a form" not in of_rewards(scored(alone, np.ones(40), texts=first))[0]
    assert "judged by another truth" in of_rewards(scored(0 * right, right))[0]
    for paid, words in ((0 * right, "judged by another truth"), (np.roll(right, 1), "truth of the row before")):

        class Again:
            def shifted(self, step, source, paid=paid):
                return {"before": paid, "after": 0 * right}

        assert words in of_rewards(scored(paid, right), Again())[0]
    anything = of_rewards(scored(right + rng.normal(size=40), right))
    assert anything[0] == "the reward function gave other scores than it gives now" and "40 of 40" in anything[1]


def test_a_runs_own_data_and_reward_are_read_again_without_a_word(tmp_path, capfd, monkeypatch):
    """What is printed would stand before the JSON of an answer."""
    write_model(tmp_path / "model")
    rows = [
        {"data_source": "a", "prompt": f"1+{number}", "reward_model": {"ground_truth": str(1 + number)}}
        for number in range(64)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = [f"data.train_files=[{tmp_path / 'rows.jsonl'}]", "data.val_files=[]"]
    settings = [f"model.path={tmp_path / 'model'}", *files, "reward.function=exact_match",
                "reward.custom_reward_function=null",
                "data.train_batch_size=8", "actor.ppo_mini_batch_size=8"]  # fmt: skip
    run = StoredRun.read(write_run(tmp_path / "run", World(settings=settings)).path)
    again = rescorer(run)
    assert isinstance(again, Rescorer)
    assert capfd.readouterr().out == ""
    made = []

    class Pool(RewardPool):
        def __init__(self, *arguments):
            made.append(self)
            super().__init__(*arguments)

        def submit(self, item):
            made.append(item)
            super().submit(item)

    monkeypatch.setattr(rewards, "RewardPool", Pool)
    with again:
        for _ in range(3):
            assert again.step(6).again.tolist() == [0.0] * 6  # each response is asked of twice, once
        assert len(made) == 1 + 2 * 6
        write_samples(run.folder.samples, 5, [packed([replace(sample(0), prompt_id=64)])], [{"score": 0.0}])
        with pytest.raises(DataError, match="prompt 64 of step 5 is not in"):
            again.step(5)


def test_a_source_whose_truths_are_shifted_is_told_from_one_that_changed():
    rng = np.random.default_rng(1)
    sources = ["one", "two"] * 20

    def step(of_two):
        scores = np.where(np.arange(40) % 2 == 1, of_two, rng.integers(0, 2, 40)).astype(float)
        return scored(scores, scores, sources=sources)

    class Again:
        def __init__(self, mean):
            self._mean = mean

        def shifted(self, now, source):
            return {"before": np.full(20, self._mean), "after": np.zeros(20)}

    before = [step(rng.integers(0, 2, 40)) for _ in range(5)]
    assert of_sources(step(rng.integers(0, 2, 40)), before, Again(0.0)) is None
    assert of_sources(step(0), before, Again(0.5))[0] == "truths of source two are shifted by a row"
    assert of_sources(step(0), before, Again(0.0))[0] == "rewards of source two changed"
    assert of_sources(step(0), before, Again(0.0), searched=True) is None


def test_responses_to_one_prompt_are_alike_in_healthy_runs():
    """Eight responses a prompt, and prompts of which some are seldom solved: nothing changed in 300 steps."""
    rng = np.random.default_rng(2)

    def step():
        chances = np.repeat(rng.beta(2, 2, 32), 8)
        sources = ["one" if prompt < 16 else "two" for prompt in range(32) for _ in range(8)]
        scores = (rng.random(256) < chances).astype(float)
        return scored(scores, scores, sources=sources, group=8)

    steps = [step() for _ in range(300)]
    told = [of_sources(steps[i], steps[i - 5 : i], None) for i in range(5, 300)]
    assert not any(told)


# ---------------------------------------------------------------- what was computed in their place


@pytest.mark.parametrize("replica", [0, 1])
def test_gradients_of_a_replica_are_lost_before_megatron_sums_them(monkeypatch, replica):
    """Megatron's own end of a pass reaches what loses them."""
    import torch
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    summed = []
    monkeypatch.setattr(
        _ParamAndGradBucketGroup,
        "start_grad_sync",
        lambda self, **_: summed.append(self.buckets[0].grad_data.sum().item()),
    )
    monkeypatch.setattr("megatron.core.parallel_state.get_data_parallel_rank", lambda: 1)
    group = object.__new__(_ParamAndGradBucketGroup)
    group.ddp_config = SimpleNamespace(overlap_grad_reduce=False)
    chunk = SimpleNamespace(bucket_groups=[group], expert_parallel_bucket_groups=[])
    for context in (replay_rank.without_replica([chunk], replica), nullcontext()):
        group.buckets = [SimpleNamespace(grad_data=torch.ones(3))]
        with context:
            group.finish_grad_sync()
    assert summed == [0.0 if replica == 1 else 3.0, 3.0]


@pytest.mark.parametrize("value", [0.4, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.3, 2.0])
def test_a_number_near_the_ranks_own_is_found_too(value):
    """Each row takes the better of a view and the ranks' own, whose gap is that of 1."""

    def tried(view):
        gaps = np.abs(np.log(view["value"]) - np.log(value)), abs(np.log(value))
        return view | {"fits": float(np.minimum(*gaps))}

    assert replay_views._searched("temperature", 0.25, 4.0, tried)["value"] == pytest.approx(value, rel=0.02)


def test_epochs_and_a_kl_in_the_rewards_have_experiments_and_guesses(tmp_path):
    settings = ["actor.ppo_epochs=2", "algorithm.use_kl_in_reward=true"]
    config = config_of(tmp_path, *settings)
    tried = {each.name: dict(each.order) for each in experiments_of(config, samples())}
    guessed = {each.name: dict(each.order) for each in guesses_of(config, 1)}
    for found in (tried, guessed):
        assert found["with one epoch"] == {"settings": {"actor.ppo_epochs": 1}}
    assert tried["without the KL in the rewards"] == {"kl_coef_times": 0.0}
    assert guessed["with the other sign of the KL in the rewards"] == {"kl_coef_times": -1.0}
    plain = config_of(tmp_path / "plain")
    assert "with one epoch" not in [each.name for each in (*experiments_of(plain, samples()), *guesses_of(plain, 1))]


def test_a_weight_of_the_kl_that_does_not_follow_from_the_steps_before_is_told(tmp_path, monkeypatch):
    """A replay begins with the checkpoint's weight, and not with that of the run's metrics."""
    adaptive = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"]
    stored = SimpleNamespace(trainer={"kl_coef": 0.25})
    monkeypatch.setattr(replaying, "read_manifest", lambda folder: stored)
    for settings, given, first in ((adaptive, tmp_path, 0.25), (adaptive, None, None), (adaptive[:1], tmp_path, None)):
        run = SimpleNamespace(config=config_of(tmp_path / str(first) / str(given is None), *settings))
        assert replaying.first_kl_coef(run, given) == first
    unlike = {12: [("actor/kl_coef", 0.1, 0.25), ("actor/grad_norm", 8.0, 1.0)]}
    run = a_run(tmp_path / "told", monkeypatch, Replay(6, 12, {}, 70, unlike, None, {}, {}, 1.0))
    first = explain(run.path).verdicts[0]
    assert first.kind == "update" and "weight of the KL in the rewards was not what" in first.cause


def test_all_of_an_explanation_has_one_end(tmp_path, monkeypatch):
    given = []
    run = a_run(tmp_path, monkeypatch)
    replayed = explaining.replay
    monkeypatch.setattr(
        explaining, "replay", lambda *order, **named: given.append(order[4]) or replayed(*order, **named)
    )
    monkeypatch.setattr(explaining, "rescorer", lambda run, end: time.sleep(0.5) or "slow")
    explain(run.path, seconds=60.0)
    assert 50 < given[0] <= 59.5


def test_scores_and_calls_for_which_there_is_no_time_are_not_waited_for():
    again = object.__new__(Rescorer)
    again._end, again._pool = time.monotonic() - 1, None
    with pytest.raises(DataError, match="share of the time"):
        again._scores([], [], [])


def test_a_guess_is_like_the_run_as_far_as_it_gives_what_did_not_repeat():
    unlike = [("a", 2.0, 1.0), ("b", None, 1.0), ("c", 3.0, 1.0)]
    assert likeness(unlike, {"a": 2.0, "c": 3.0}) == 1.0 and likeness(unlike, {"a": 1.5, "c": 2.0}) == 0.5
    assert likeness(unlike, {"a": 1.0, "c": -9.0}) == 0.0 and likeness(unlike, {}) == 0.0


def test_a_guess_that_gives_what_the_run_had_is_the_verdict(tmp_path, monkeypatch):
    unlike = {12: [("actor/grad_norm", 8.0, 1.0)]}
    for name, words in (
        ("with a band that clips nothing", "clipped nothing"),
        ("with moments of zero", "its moments were zero"),
    ):
        again = Replay(6, 12, {}, 70, unlike, None, {name: {"actor/grad_norm": 8.0}}, {}, 1.0)
        first = explain(a_run(tmp_path / words, monkeypatch, again).path).verdicts[0]
        assert first.kind == "update" and words in first.cause and "100% of the difference" in first.evidence


class Engines:
    """Ranks whose model is one number: their log-probs differ from generation's by how far it is from what that had."""

    def __init__(self, config, generation):
        self.config = config
        self.generation = generation

    def gaps(self):
        return np.abs(np.log(self.config.rollout.temperature / self.generation)) + np.zeros(8), np.ones(8, int)


def test_the_temperature_of_generation_is_found_from_its_log_probs(tmp_path, monkeypatch):
    ranks = Engines(config_of(tmp_path), 0.63)
    monkeypatch.setattr(replay_views, "views_of", lambda actor, older: [])
    monkeypatch.setattr(replay_views, "experts_of", lambda actor, older: [])
    monkeypatch.delitem(replay_views._SEARCHED, "softmax")
    own, found = replay_views.compared_views(ranks, {}, ranks.gaps)
    assert own["kind"] == "own" and own["gap"] == pytest.approx(np.log(1 / 0.63))
    assert found["value"] == pytest.approx(0.63, rel=0.01) and found["fits"] < 0.01
    assert ranks.config.rollout.temperature == 1.0  # put back


def test_views_end_when_their_time_does_and_a_row_counts_by_its_tokens():
    """Three views in time; the means are those of all tokens, as metrics of a run are."""
    left = iter([True, True, True])
    actor = SimpleNamespace(config=None)
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patched:
        patched.setattr(replay_views, "views_of", lambda actor, older: [{"kind": "own", "number": n} for n in range(5)])
        patched.setattr(replay_views, "experts_of", lambda actor, older: [])
        patched.setattr(replay_views, "_SEARCHED", {})
        gaps = lambda: (np.array([0.1, 500.0]), np.array([10, 1000]))  # noqa: E731
        own, *views = replay_views.compared_views(actor, {}, gaps, lambda: next(left, False))
        assert len(replay_views.compared_views(actor, {}, gaps, floor=0.5)) == 1
    assert own["gap"] == pytest.approx(500.1 / 1010)
    assert [view.get("late", False) for view in views] == [False] * 3 + [True] * 2


def test_time_is_that_of_the_first_rank():
    told = []
    clock = replay_rank.Time(SimpleNamespace(gather_bytes=lambda own: told.append(own) or [b"0", own]), np.inf)
    assert not clock.is_left(0.5) and told == [b"1"]


def test_what_gives_generations_log_probs_is_the_verdict(tmp_path):
    run = StoredRun.read(write_run(tmp_path / "run").path)
    own = {"kind": "own", "gap": 0.2, "fits": 0.2}
    for view, words in (
        ({"kind": "temperature", "value": 0.6}, "temperature 0.6"),
        ({"kind": "version", "value": 3}, "weights of version 3, and not of 5"),
        ({"kind": "expert", "layer": 1, "expert": 2, "value": 4}, "expert 2 of layer 1 was stale"),
        ({"kind": "router"}, "router computed in bfloat16"),
        ({"kind": "rounded"}, "rounded to bfloat16"),
        ({"kind": "softmax", "value": 2.0}, "2 times the ranks' softmax scale"),
        ({"kind": "rotation", "stretch": ["yarn", {"factor": 4.0}]}, "positions by yarn with factor 4"),
    ):
        views = [own, {"kind": "x", "failed": "no"}, view | {"gap": 1e-6, "fits": 1e-6}]
        (first,) = of_views(run, 6, views)
        assert first.kind == "engines" and words in first.cause and first.removes > 0.99
        assert of_views(run, 6, [own, view | {"gap": 0.2, "fits": 0.15}]) == []
    assert of_views(run, 6, []) == []


def test_responses_cut_off_below_the_limit_are_told(tmp_path):
    config = config_of(tmp_path)
    longest = config.data.max_response_length
    assert of_cut_off(config, samples()) == ""
    at_limit = samples(cut_off=np.ones(32, bool), lengths=np.full(32, longest))
    assert of_cut_off(config, at_limit) == ""
    early = of_cut_off(config, samples(cut_off=np.ones(32, bool), lengths=np.full(32, longest - 1)))
    assert f"32 of 32 responses are cut off at {longest - 1}" in early


# ---------------------------------------------------------------- bad input


def test_what_cannot_be_explained_is_refused_with_one_message_each(tmp_path, monkeypatch):
    fine = a_run(tmp_path / "fine", monkeypatch)
    monkeypatch.undo()
    bare = a_run(tmp_path / "bare", monkeypatch, with_samples=False)
    monkeypatch.undo()
    other = write_run(tmp_path / "other" / "run")
    other.config.write_text(other.config.read_text().replace("seed:", "seeds:", 1))
    torn = a_run(tmp_path / "torn", monkeypatch)
    monkeypatch.undo()
    (torn.samples / "step-12.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(DataError, match="samples of step 12 cannot be read"):
        explain(torn.path)
    lines_of = fine.metrics.read_text().splitlines()
    cut = write_run(tmp_path / "cut" / "run")
    cut.metrics.write_text("")
    assert lines_of
    for path, step, words in (
        (cut.path, None, "has no step yet"),
        (tmp_path, None, "holds no run"),
        (fine.path, 40, "no such step; it has steps 1 to 16"),
        (fine.path, 11, "every metric is within the band"),
        (bare.path, None, "samples of step 1 are missing"),
        (other.path, None, "was written by another version of mrl"),
    ):
        with pytest.raises(ConfigError, match=words):
            explain(path, step)


def test_damaged_samples_are_told_from_missing_ones(tmp_path):
    run = write_run(tmp_path / "run")
    (run.samples / "step-6.parquet").write_bytes(b"PAR1 no more")
    config = StoredRun.read(run.path).config
    with pytest.raises(DataError, match="samples of step 6 cannot be read"):
        stored_rollouts(config, run.samples, 6)
    with pytest.raises(ConfigError, match="has no samples of step 5"):
        stored_rollouts(config, run.samples, 5)


def test_a_step_too_far_from_its_checkpoint_and_a_recipe_that_is_not_replayed_are_told(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", World(settings=["record.samples=8"]))
    stored = StoredRun.read(run.path)
    with pytest.raises(ConfigError, match=r"record\.samples: 8 kept a part"):
        replay(stored, 6)
    with pytest.raises(ConfigError, match="from the run's start, as no checkpoint before it is left, and samples of"):
        stored.base(6)


def test_a_response_is_shown_with_its_routes_and_where_its_prompt_had_others(tmp_path, capsys):
    """Two layers, two experts a token: of the prompt's tokens the other response has one with another expert, and one
    with the same in another order.
    """
    run = write_run(tmp_path / "run")
    rows = [row for row in read_samples(run.samples, 6) if row["sample_id"] in (2, 3)]
    made = []
    for row in rows:
        ids = row["prompt_ids"], row["response_ids"]
        routes = np.tile(np.array([0, 1], np.int8), (sum(map(len, ids)), 2, 1))
        routes[-1] = -1
        made.append(
            Sample(row["prompt_id"], row["group_id"], row["sample_id"], 0, *ids, row["rollout_log_probs"], "stop", 1)
        )
        made[-1] = replace(made[-1], routes=routes)
    made[1].routes[0, 0] = (0, 5)
    made[1].routes[0, 1] = (1, 0)
    write_routes(run.samples, 6, [packed(made)])
    main(["samples", str(run.path), "--id", "2", "--jsonl"])
    routes = json.loads(capsys.readouterr().out)["routes"]
    pairs = 2 * len(made[0].routes)
    assert routes == {"chosen": made[0].routes.tolist(), "missing": 2, "pairs": pairs, "elsewhere": {"3": 1}}
    main(["samples", str(run.path), "--id", "2"])
    said = capsys.readouterr().out
    assert f"routes: {pairs - 2} of {pairs} pairs" in said and "response of the same weights: 3: 1" in said


def test_routes_of_a_stored_step_are_those_that_ranks_are_given(tmp_path):
    run = write_run(tmp_path / "run")
    config = StoredRun.read(run.path).config
    assert stored_rollouts(config, run.samples, 6).samples.blocks[0].routes is None
    rows = read_samples(run.samples, 6)
    made = [
        Sample(row["prompt_id"], row["group_id"], row["sample_id"], 0, row["prompt_ids"], row["response_ids"],
               row["rollout_log_probs"], "stop", 1, routes=np.full((len(row["prompt_ids"] + row["response_ids"]), 2, 2),
               number, np.int8))
        for number, row in enumerate(rows)
    ]  # fmt: skip
    write_routes(run.samples, 6, [packed(made[::-1])])
    (block,) = stored_rollouts(config, run.samples, 6).samples.blocks
    assert np.array_equal(block.routes, np.concatenate([each.routes for each in made]))


def test_a_step_of_replayed_routes_is_refused_where_they_were_not_kept(tmp_path):
    """Not where engines returned none for some responses: ranks routed these by themselves in the run, too."""
    r3 = ["actor.router_replay=R3", "record.routes=true", "record.samples=all"]
    run = write_run(tmp_path / "run", World(settings=r3))
    stored = StoredRun.read(run.path)
    for step in range(1, 6):
        shutil.copy(run.samples / "step-6.parquet", run.samples / f"step-{step}.parquet")
    rows = read_samples(run.samples, 6)
    made = [
        Sample(row["prompt_id"], row["group_id"], row["sample_id"], 0, row["prompt_ids"], row["response_ids"],
               row["rollout_log_probs"], "stop", 1)
        for row in rows
    ]  # fmt: skip
    routed = [replace(each, routes=np.ones((len(each.prompt_ids + each.response_ids), 2, 2), np.int8)) for each in made]
    for step in (1, 2, 3, 5, 6):
        write_routes(run.samples, step, [packed(routed)])
    with pytest.raises(ConfigError, match=r"step 4 trained on the engines' routes .* 6 of 6 responses were not kept"):
        replay(stored, 6)
    write_routes(run.samples, 4, [packed(routed[:4])])
    for refused in (lambda: replay(stored, 6), lambda: stored_rollouts(stored.config, run.samples, 4)):
        with pytest.raises(ConfigError, match=r"step 4 .* 2 of 6 responses were not kept"):
            refused()
    write_routes(run.samples, 4, [packed(made[:1]), packed(routed[1:4]), packed(made[4:])])
    rollouts = stored_rollouts(stored.config, run.samples, 4).samples
    assert rollouts.rows.routed.tolist() == [False, True, True, True, False, False]


def test_one_response_is_shown_through_everything(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    shutil.copy(run.samples / "step-6.parquet", run.samples / "step-3.parquet")
    (run.samples / "step-2.parquet").write_bytes(b"no file of columns")
    main(["samples", str(run.path), "--id", "3", "--jsonl"])
    story = json.loads(capsys.readouterr().out)
    # scores 0.4 and 0.6 of one prompt: GRPO's advantage is half their difference over their deviation (n - 1)
    assert story["advantage"] == pytest.approx(0.1 / (0.02**0.5 + 1e-6))
    assert [each["sample_id"] for each in story["group"]] == [2, 3] and story["other_steps"] == {"3": [0.4, 0.6]}
    main(["samples", str(run.path), "--id", "3"])
    said = capsys.readouterr().out
    assert "its group, score by id: 2: 0.4, 3: 0.6" in said and "the same prompt in step 3: scores 0.4, 0.6" in said
    with pytest.raises(ConfigError, match="--id 77: step 6 has no such response; it has 0 to 5"):
        options = make_parser().parse_args(["samples", str(run.path), "--id", "77"])
        options.run(options)


def test_stored_samples_come_back_as_they_were_trained_on(tmp_path):
    run = write_run(tmp_path / "run")
    found = stored_rollouts(StoredRun.read(run.path).config, run.samples, 6)
    rows = found.samples.read()
    assert rows.token_ids[:6].tolist() == [0, 1, 0, 3, 2, 4] and rows.rollout_log_probs[1] == np.float32(-3.0)
    assert found.rewards.tolist() == [row / 5 for row in range(6)] and found.results[0].parts.keys() == {"note"}


# ---------------------------------------------------------------- early signs


def test_the_chance_of_a_drift_is_how_often_noise_has_it():
    """Half of what does not drift rises: 5 % of it with a chance below 5 %."""
    for alike in (0.0, 0.4):
        chances = []
        for seed in range(400):
            noise = np.random.default_rng(seed).normal(size=40)
            for step in range(1, 40):
                noise[step] += alike * noise[step - 1]
            deviation, chance = drift(noise)
            chances.append(chance if deviation > 0 else 1 - chance)
        assert 0.02 <= np.mean(np.array(chances) < 0.05) <= 0.09
    assert drift(range(20))[1] < 1e-6 and drift([1.0] * 20) == (0.0, 0.5) and drift([1, 2, 3]) == (0.0, 0.5)


def steps_of(**metrics) -> list[dict]:
    names = {name.replace("__", "/"): values for name, values in metrics.items()}
    return [{STEP: step + 1} | {name: float(values[step]) for name, values in names.items()} for step in range(30)]


def test_signs_say_what_drifts():
    noise = np.random.default_rng(0).normal(size=30) * 0.1
    rise = np.arange(30) / 10
    assert signs(steps_of(response_length__clip_ratio=noise, actor__entropy=noise, critic__score__mean=noise)) == []
    (cut,) = signs(steps_of(response_length__clip_ratio=rise + noise))
    assert "cut off" in cut.words and cut.chance < 1e-6 and "by chance" in str(cut)
    (apart,) = signs(steps_of(actor__entropy=-rise + noise, rollout_corr__k3_kl=rise + noise[::-1]))
    assert apart.words.startswith("entropy falls while generation")
    held_out = {"val-core/sum/mean@4": np.full(30, 0.3)}
    (gamed,) = signs(steps_of(critic__score__mean=rise + noise, **held_out))
    assert "may be gamed" in gamed.words
    longer = rise + noise
    (pays,) = signs(steps_of(critic__score__mean=longer, response_length__mean=10 * longer))
    assert "as far as responses become longer" in pays.words


# ---------------------------------------------------------------- engines against transformers

LAYERS, TOKENS, EXPERTS = 3, 40, 8


def states(seed: int = 0) -> dict[str, np.ndarray]:
    """Hidden states of some tokens; each has two of the experts."""
    rng = np.random.default_rng(seed)
    names = [f"{part}.{layer}" for layer in range(LAYERS) for part in ("attention", "layer")]
    found = {name: rng.normal(size=(TOKENS, 16)) for name in ("embedded", *names)}
    return found | {f"router.{layer}": rng.normal(size=(TOKENS, EXPERTS)) for layer in range(LAYERS)}


def from_layer(layer: int, where=slice(None), attention: bool = False) -> dict[str, np.ndarray]:
    """The same states, but those of a layer's tokens `where`, and of all tokens after it."""
    found = states()
    for later in range(layer, LAYERS):
        rows = where if later == layer else slice(None)
        for part in ("attention", "layer") if later > layer or attention else ("layer",):
            found[f"{part}.{later}"][rows] *= 1.5
    return found


def test_the_first_layer_token_and_expert_that_differ_are_named():
    theirs = states()
    chosen = np.argsort(-theirs["router.1"], axis=-1)[:, :2]
    of_third = (chosen == 3).any(axis=-1)
    assert 0 < of_third.sum() < TOKENS
    other_choice = from_layer(1, np.arange(TOKENS) >= 5)
    other_choice["router.1"][5:] *= -1
    rows = [
        StoredRow(7, list(range(30)), 4, np.zeros(26), np.zeros(26)),
        StoredRow(9, list(range(10)), 4, *[np.zeros(6)] * 2),
    ]
    for one, part, layer, token, words in (
        (
            from_layer(1, attention=True),
            "attention",
            1,
            0,
            "layer 1 is the first that differs, at token 0 of response 7",
        ),
        (
            from_layer(1, of_third),
            "experts",
            1,
            int(np.flatnonzero(of_third)[0]),
            "its expert 3, whose tokens all differ",
        ),
        (from_layer(0, np.arange(TOKENS) >= 35), "experts", 0, 35, "at token 5 of response 9"),
        (other_choice, "router", 1, 5, "its router, which chose experts"),
        (states() | {"embedded": 2 * theirs["embedded"]}, "embedding", -1, 0, "the embedding is the first"),
        (states(), "output", LAYERS, 0, "all layers agree"),
    ):
        place = first_difference(one, theirs, LAYERS, 2, 1e-3)
        assert (place.part, place.layer, place.token) == (part, layer, token)
        assert words in in_words(place, LAYERS, rows)
    dense = {name: value for name, value in from_layer(2).items() if not name.startswith("router")}
    assert "feed-forward" in in_words(first_difference(dense, theirs, LAYERS, 0, 1e-3), LAYERS, rows)


def test_transformers_says_whether_engines_or_ranks_are_wrong():
    for (engines, ranks, fresh, place), kind, words in (
        (
            (0.1, 1e-6, 0.1, "layer 1 is the first"),
            "engines",
            "engines compute other probabilities than transformers; layer 1",
        ),
        ((0.1, 1e-6, 1e-7, ""), "engines", "and a fresh engine with these weights does not"),
        ((1e-6, 0.1, 1e-7, ""), "ranks", "the ranks compute other probabilities"),
        ((0.1, 1e-6, 0.02, "layer 1"), "engines", "a fresh engine with these weights is nearer to it"),
    ):
        told = verdict(AgainstTransformers(engines, ranks, fresh, 32, place))
        assert told[0] == kind and words in told[1] and "32 responses" in told[2]
    assert verdict(AgainstTransformers(0.1, 0.12, 0.1, 32, "layer 0")) is None  # both round


def test_weights_that_a_disk_does_not_hold_are_not_begun(tmp_path, monkeypatch):
    """Neither by ranks nor, afterwards, as a copy of a checkpoint; where no copy is needed, the disk is not asked."""
    far = samples(versions=np.full(32, 11), gaps=np.full(32, 0.1))
    run = a_run(tmp_path, monkeypatch, stored=far, broken="rollout_corr/k3_kl")
    write_model(tmp_path / "made")
    shutil.copy(tmp_path / "made" / "config.json", tmp_path / "model")
    shutil.copy(run.samples / "step-16.parquet", run.samples / "step-12.parquet")
    monkeypatch.setattr(explaining, "_SURE", 0.1)  # the run is short
    replayed, given = explaining.replay, []
    monkeypatch.setattr(explaining, "replay", lambda *a, **k: given.append(k.get("served")) or replayed(*a, **k))
    full = "1e-06 GB free, and weights of the step take"
    for free, is_full in ((1e15, False), (1000, True)):
        monkeypatch.setattr(by_transformers, "free_bytes", lambda folder, free=free: free)
        said = explain(run.path).replayed
        assert (given[0] is None) == is_full == (full in said), said
        given.clear()
    stored = StoredRun.read(run.path)
    kept = run.checkpoints / "step-11"
    kept.mkdir()
    (kept / "manifest.json").write_text("{}")
    monkeypatch.setattr(by_transformers, "write_hf", lambda *_: pytest.fail("a copy is begun"))
    with pytest.raises(EnvironmentFault, match=full):
        by_transformers.folder_of_weights(stored, 12, tmp_path, ())
    assert by_transformers.folder_of_weights(stored, 1, tmp_path, ()) == tmp_path / "model"
    assert by_transformers.folder_of_weights(stored, 11, tmp_path, ()) is None


def test_a_disk_that_is_full_where_ranks_write_costs_the_comparison_alone(tmp_path, monkeypatch):
    """The rank writes to /dev/full, whose every write fails as one to a full disk does."""
    shard = SimpleNamespace(
        primary=0, is_constant=False, vp_chunk=0, megatron_name="weight", local_shape=(4, 2), pieces=()
    )
    weight = RankParameter(shard, torch.nn.Parameter(torch.ones(4, 2)), None, None)
    monkeypatch.setattr(rank_parameters, "rank_parameters", lambda actor: iter([weight]))
    actor = SimpleNamespace(rank=0, residence=SimpleNamespace(using=lambda *_: nullcontext()))
    (tmp_path / rank_file(0)).symlink_to("/dev/full")
    answer = {
        "steps": {"6": {"actor/entropy": 1.0}}, "differences": {}, "experiments": {}, "file": None, "log_probs": {},
        "served": replay_rank._weights_written(actor, tmp_path),
        "views": [{"kind": "own", "gap": 0.1}, {"kind": "router", "failed": "AttributeError: no router"}],
    }  # fmt: skip
    run = write_run(tmp_path / "run")
    (run.checkpoints / "step-5").mkdir()
    (run.checkpoints / "step-5" / "manifest.json").write_text("{}")
    monkeypatch.setattr(replaying, "_ranks", lambda *_: [json.loads(json.dumps(answer))])
    again = replay(StoredRun.read(run.path), 6, served=tmp_path)
    assert again.repeats and again.served == []
    said = explaining._replayed(again, ["a note"])
    for words in (
        "the comparison with transformers", f"{rank_file(0)} cannot be written: No space left on device",
        "1 other ways of generation (router)", "AttributeError: no router", "a note",
    ):  # fmt: skip
        assert words in said


def test_other_layouts_and_numbers_come_last(tmp_path, monkeypatch):
    """Nothing removes the break, but one tensor rank for two."""
    ways = [way.order["settings"] for way in other_ways(config_of(tmp_path, "model.dtype=bfloat16"))]
    tensor = {"actor.layout.tensor_model_parallel_size": 1, "actor.layout.sequence_parallel": False}
    expert = {"actor.layout.expert_model_parallel_size": 1}
    assert ways == [{"model.dtype": "float32"}, tensor, expert, tensor | expert]
    run = a_run(tmp_path / "run", monkeypatch)
    usual = explaining.replay

    def replayed(stored_run, step, *orders, settings=None, **further):
        if not settings:
            return usual(stored_run, step, *orders, **further)
        return Replay(6, step, {"actor/grad_norm": 1.0}, 0, {12: [("actor/grad_norm", 8.0, 1.0)]}, None, {}, {}, 1.0)

    monkeypatch.setattr(explaining, "replay", replayed)
    first = explain(run.path).verdicts[0]
    assert first.kind == "ranks" and "tensor_model_parallel_size 1" in first.cause and first.removes > 0.9
