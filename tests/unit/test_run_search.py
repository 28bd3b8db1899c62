"""Whole steps are searched and predicted by one function, and no preset is far from what the planner finds."""

import importlib.util
import json
import re
import sys
import time
from pathlib import Path

import pytest
from seldom import seldom

from mrl.cli.main import main
from mrl.config.load import ResolvedConfig, load_config
from mrl.config.rules import violations
from mrl.config.schema import with_values
from mrl.model import planning_model_spec
from mrl.plan.memory import memory_section
from mrl.plan.plan_inputs import PlanInputs, device_for
from mrl.plan.run_plan import plan_of, seconds_text
from mrl.platforms.versions import MEGATRON
from mrl.tools.run_search import differing, fastest_run, settings_between, step_of
from mrl.tools.search import recomputes, search
from mrl.tools.search_report import run_with, search_problem
from mrl.units import GIB

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "evidence"))  # what its scripts import of each other
_spec = importlib.util.spec_from_file_location("presets", ROOT / "scripts" / "evidence" / "presets.py")
presets = sys.modules["presets"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(presets)
SMALL = "qwen3-30b-a3b/h100-1x8"
LIMIT = 1.10  # of the planner's best
# a document by its number, or a layout that somebody published, by whom
SOURCE = re.compile(r"\bsource \d{3}\b|\b[\w.-]+'s published layout\b")
PLAIN = [
    "rollout.data_parallel_size=1",
    "rollout.expert_parallel_size=1",
    "rollout.tensor_model_parallel_size=4",
    "rollout.num_engines=2",
    "rollout.gpu_memory_utilization=0.7",
]


@pytest.mark.parametrize("name", [SMALL, "qwen3-8b/h100-1x8"])
def test_a_preset_is_near_the_best_that_the_planner_finds(name):
    """The two that take least time, together within ten seconds; scripts/evidence/presets.py has them all."""
    begun = time.process_time()  # of this process alone, however busy the machine is
    row = presets.row_of(name)
    assert time.process_time() - begun < 5
    near(row)


def near(row: dict) -> None:
    """Checks one preset. What fails names it, and the settings that would be faster."""
    assert row["over_best"] <= LIMIT, f"{row['preset']} takes {row['over_best']} times the seconds of {row['best']}"


def test_a_preset_that_is_made_slower_is_told_the_layout_that_is_faster(found, monkeypatch):
    """Its engines have four tensor ranks each and no experts apart. The search is that of the tests below."""
    config, _, _, best = found
    monkeypatch.setattr(presets, "load_config", lambda _: ResolvedConfig(config, {}))
    monkeypatch.setattr(presets, "search", lambda _: None)
    monkeypatch.setattr(presets, "fastest_run", lambda *_: best)
    with pytest.raises(AssertionError) as failed:
        near(presets.row_of(SMALL))
    said = str(failed.value).splitlines()[0]
    assert said.startswith(f"{SMALL} takes 1.") and repr(best.settings["actor.layout"]) in said
    assert all(f"'rollout.{key}_parallel_size': 8" in said for key in ("data", "expert"))


def test_all_presets_are_near_the_planners_best_or_say_why_not():
    """As stored; of at most a third the header gives a reason, and of none that has no need of it."""
    rows = {row["preset"]: row for row in json.loads(presets.OUT.read_text(encoding="utf-8"))["rows"]}
    assert set(rows) == set(presets.names())
    slower = {name for name, row in rows.items() if row["over_best"] > LIMIT}
    with_reason = {name for name in presets.names() if presets.reason_of(name)}
    assert slower <= with_reason, {name: rows[name]["best"] for name in slower - with_reason}  # settings that would do
    assert slower == with_reason
    assert 3 * len(slower) <= len(rows)
    assert not {name: presets.reason_of(name) for name in with_reason if not named_source(name)}


def named_source(name: str) -> str:
    """What the reason of a preset's header names, where its provenance names it as well; else empty."""
    found = SOURCE.search(presets.reason_of(name))
    head = (presets.FOLDER / f"{name}.yaml").read_text(encoding="utf-8").partition("\nextends")[0]
    told = head.partition("Provenance: ")[2].partition(presets.SLOWER)[0]
    return found[0] if found and found[0] in told else ""


@pytest.mark.parametrize(
    ("provenance", "reason", "source"),
    [
        ("engines of source 004", "its engines are source 004's.", "source 004"),
        ("verl's published layout, batch of ours", "it has verl's published layout.", "verl's published layout"),
        ("batch and loss of source 002", "its engines are source 004's.", ""),
        ("engines of source 004", "its engines are older than the search.", ""),
    ],
)
def test_a_reason_counts_where_it_names_a_source_of_the_same_header(tmp_path, monkeypatch, provenance, reason, source):
    monkeypatch.setattr(presets, "FOLDER", tmp_path)
    (tmp_path / "one.yaml").write_text(f"# Provenance: {provenance}.\n{presets.SLOWER}{reason}\nextends: a.yaml\n")
    assert named_source("one") == source


def test_a_stored_preset_is_the_one_that_is_shipped():
    """Its seconds are those that `mrl plan` says now."""
    for row in json.loads(presets.OUT.read_text(encoding="utf-8"))["rows"]:
        config = load_config(ROOT / "parallel_configs" / f"{row['preset']}.yaml").config
        now = step_of(config, planning_model_spec(config.model.path)[0], device_for(config))
        assert sum(now.values()) == pytest.approx(row["seconds"], rel=0.01), row["preset"]


@pytest.fixture(scope="module")
def found():
    """The best for a preset whose engines are as they would be without this search."""
    config = load_config(ROOT / "parallel_configs" / f"{SMALL}.yaml", None, PLAIN).config
    model, device = planning_model_spec(config.model.path)[0], device_for(config)
    problem = search_problem(config, model, device, 8, 8, MEGATRON)
    return config, model, device, fastest_run(config, problem, search(problem))


def test_what_is_found_fits_breaks_no_rule_and_is_faster(found):
    config, model, device, best = found
    assert violations(ResolvedConfig(best.config, {}), model) == []
    assert memory_section(PlanInputs.of(best.config, model, device))["fits"]
    assert best.seconds == pytest.approx(sum(step_of(best.config, model, device).values()))
    assert best.seconds < 0.8 * sum(step_of(config, model, device).values())


def test_what_is_found_has_the_same_devices_batch_and_limits(found):
    config, _, _, best = found
    assert (best.config.cluster, best.config.data, best.config.algorithm) == (
        config.cluster, config.data, config.algorithm,
    )  # fmt: skip
    assert best.config.rollout.n == config.rollout.n
    assert best.config.actor.layout.world_size == config.actor.layout.world_size
    assert best.config.actor.ppo_mini_batch_size == config.actor.ppo_mini_batch_size


def test_engines_of_several_data_parallel_ranks_are_looked_at(found):
    assert found[3].settings["rollout.data_parallel_size"] > 1
    assert found[3].settings["rollout.expert_parallel_size"] == 8


def test_settings_make_one_configuration_of_the_other(found):
    config, _, _, best = found
    assert with_values(config, {}) == config
    assert differing(config, config) == {} and settings_between(best.config, best.config) == []
    values = [f"{key}={json.dumps(value)}" for key, value in differing(config, best.config).items()]
    file = ROOT / "parallel_configs" / f"{SMALL}.yaml"
    again = load_config(file, None, [*PLAIN, *values]).config
    model, device = found[1], found[2]
    assert sum(step_of(again, model, device).values()) == pytest.approx(best.seconds)


THREE = ["qwen3-8b/h100-1x8", "qwen3-30b-a3b/h100-1x8", "qwen3-8b/a3-1x16"]  # dense, experts, and NPUs


@pytest.mark.parametrize("name", seldom(THREE, THREE[1]))
def test_init_plan_and_search_say_the_same_of_a_presets_model_and_devices(name, tmp_path, capsys):
    """Seconds of a step and of an update, and the fullest phase; seconds as the plan's page prints them."""
    config = load_config(ROOT / "parallel_configs" / f"{name}.yaml").config
    world, file = config.actor.layout.world_size, tmp_path / "first.yaml"
    devices = f"{world} x {config.cluster.accelerator}"
    main(["init", "--model", config.model.path, "--devices", devices, "--data", "elsewhere/a.parquet", "-o", str(file)])
    printed = capsys.readouterr().out
    plan = _answer(capsys, str(file))
    searched = _answer(capsys, "--search", str(file), "--top", "3")
    phases, most = plan["times"]["phase_seconds"], _fullest(plan)
    assert searched["run"]["seconds"] == pytest.approx(sum(phases.values()))
    assert searched["run"]["best_seconds"] == pytest.approx(sum(phases.values()), rel=0.02)  # init wrote the best
    said = re.search(r"a step about (\S+) s.*update (\S+) s,.*\nlayout: (\S+) of \S+ GiB in (\w+)", printed)
    step, gib = (pytest.approx(float(said[place]), rel=0.006) for place in (1, 3))
    assert (sum(phases.values()), most["bytes"] / GIB) == (step, gib)
    assert f"{said[2]} s" == seconds_text(phases["update"])
    assert plan["memory"]["phases"][said[4]] == most
    (own,) = [row for row in searched["layouts"] if _has(load_config(file).config, row["degrees"])]
    assert own["seconds"] * searched["updates"] == pytest.approx(phases["update"]) and own["bytes"] == most["bytes"]


@pytest.mark.parametrize("name", THREE)
def test_a_plan_says_of_every_layout_found_what_the_search_said(name, capsys):
    """For the preset's own batch: seconds of an update, and bytes of the actor's fullest phase."""
    config = load_config(ROOT / "parallel_configs" / f"{name}.yaml").config
    searched = _answer(capsys, "--search", str(ROOT / "parallel_configs" / f"{name}.yaml"), "--top", "3")
    assert len(searched["layouts"]) == 3
    model = planning_model_spec(config.model.path)[0]
    for row in searched["layouts"]:
        (recompute,) = [way for way in recomputes(model) if str(way) == row["recompute"]]
        plan = plan_of(run_with(config, row["degrees"], recompute), model, device_for(config))
        assert row["seconds"] * searched["updates"] == pytest.approx(plan["times"]["phase_seconds"]["update"])
        assert row["bytes"] == _fullest(plan)["bytes"]
    now = sum(step_of(config, planning_model_spec(config.model.path)[0], device_for(config)).values())
    assert searched["run"]["seconds"] == pytest.approx(now)


def _fullest(plan: dict) -> dict:
    """Of the phases that the actor's devices are in."""
    phases = [phase for phase in plan["memory"]["phases"].values() if phase["stage"] is not None]
    return max(phases, key=lambda phase: phase["bytes"])


def _has(config, degrees: dict) -> bool:
    """Whether the actor's layout has these degrees, and no other ones above 1."""
    layout = config.actor.layout.model_dump()
    return all(layout[key] == degrees.get(key, value) for key, value in layout.items())


def _answer(capsys, *arguments: str) -> dict:
    main(["plan", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)
