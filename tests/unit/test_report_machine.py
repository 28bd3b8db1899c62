"""Sections of `mrl report` about the machine: what the plan, metrics and losses say is what they show."""

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from report_run import World, write_run

from mrl.generate.lost_engines import LostEngines, Unfinished
from mrl.record.attempts import attempt
from mrl.tools.report import run_record, sections
from mrl.tools.report.page import Chart, Lanes, PageSection, Paragraph, Table
from mrl.tools.report.paired_tests import read_responses
from mrl.tools.report.run_record import RunRecord, read_run
from mrl.tools.report.sections_run import drafts, incidents, memory, staleness
from mrl.tools.report.verdict import verdict
from mrl.tools.report.write import write_report
from mrl.units import GIB

ALLOCATED, AGE = "perf/max_memory_allocated_gb", "training/off_policy/trajectory_staleness"
TRAIN = {"parameters": 10, "gradients": 20, "optimizer": 60, "activations": 5}
SYNC = {"parameters": 10, "engine_weights": 8, "sync_staging": 2, "engine_staging": 2}
ROLLOUT = {"parameters": 0, "engine_weights": 8, "kv_cache": 120}
SHARED = {"train": TRAIN | {"engine_asleep": 2}, "train_to_sync": SYNC, "sync_to_rollout": ROLLOUT, "rollout": ROLLOUT}
APART = {"train": TRAIN, "sync": {"parameters": 10, "sync_staging": 2}, "rollout": ROLLOUT, "rollout_sync": SYNC}


def planned(phases: dict[str, dict[str, int]]) -> dict:
    """The part of a plan that the section reads; terms in GiB."""
    sized = {name: {term: size * GIB for term, size in terms.items()} for name, terms in phases.items()}
    return {
        "device": {"name": "h200-141g"},
        "memory": {
            "phases": {
                name: {"terms": terms, "bytes": sum(terms.values()), "device_bytes": 127 * GIB}
                | {"fits": sum(terms.values()) <= 127 * GIB, "change": "a smaller cache"}
                for name, terms in sized.items()
            },
            "host": {"bytes_per_node": 300 * GIB, "bytes_of_a_rank": 70 * GIB, "bytes_of_a_worker": 4 * GIB},
        },
    }


def with_plan(tmp_path, phases, metrics: Mapping[str, list[float]] | None = None) -> RunRecord:
    return replace(read_run(write_run(tmp_path / "run", World(metrics=metrics)).path), plan=planned(phases))


def blocks(section: PageSection | None, kind: type) -> list:
    assert section is not None
    return [block for block in section.blocks if isinstance(block, kind)]


def words(section: PageSection | None) -> str:
    return "\n".join(block.text for block in blocks(section, Paragraph))


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("phases", [SHARED, APART], ids=["shared", "apart"])
def test_ranks_are_measured_against_what_the_plan_gives_ranks(tmp_path, phases):
    """10 + 20 + 60 + 5 of an update, whatever an engine has on the device then, or in another phase."""
    run = with_plan(tmp_path, phases, {ALLOCATED: [80.0, 90.5, 70.0, 70.0, 70.0, 70.0]})
    assert "90.5 GiB allocated at most, within the plan of 95 GiB for ranks" in words(memory(run))
    (chart,) = blocks(memory(run), Chart)
    assert [series.curve for series in chart.series] == [ALLOCATED, "perf/cpu_memory_used_gb"]


def test_every_phase_of_the_plan_is_a_lane_of_its_terms_and_a_row(tmp_path):
    section = memory(with_plan(tmp_path, SHARED))
    (lanes,), (table,) = blocks(section, Lanes), blocks(section, Table)
    assert (lanes.end, lanes.unit) == (128, "GiB") and "h200-141g" in lanes.title and "127 GiB" in lanes.note
    bars = {name: [(bar.kind, bar.start, bar.stop) for bar in row] for name, row in lanes.rows}
    assert bars["rollout"] == [("kv_cache", 0, 120), ("engine_weights", 120, 128)]  # nothing of what has no bytes
    assert table.rows[0] == ("train", "97", "127", "fits")
    assert table.rows[-1] == ("rollout", "128", "127", "does not fit: a smaller cache")


def test_a_device_without_a_count_of_its_own_names_the_host(tmp_path):
    said = words(memory(with_plan(tmp_path, SHARED)))
    assert "run's processes are 300 GiB of a node beside the devices' 128 GiB each" in said and "ranks" not in said


def test_memory_needs_a_plan(tmp_path):
    assert memory(read_run(write_run(tmp_path / "run").path)) is None


# ---------------------------------------------------------------- staleness


def test_the_oldest_age_of_the_run_is_told_with_its_bound(tmp_path):
    metrics = {f"{AGE}/mean": [0.0, 0.5, 1.0, 1.0, 1.0, 1.0], f"{AGE}/max": [0.0, 1.0, 3.0, 2.0, 2.0, 2.0]}
    settings = ["trainer.schedule=bounded", "trainer.max_staleness=4"]
    world = World(metrics=metrics | {"async/groups_ahead": [8.0] * 6}, settings=settings)
    section = staleness(read_run(write_run(tmp_path / "run", world).path))
    assert words(section).startswith("Schedule bounded, trainer.max_staleness 4: the oldest token trained on was 3 ")
    assert {chart.id: [series.curve for series in chart.series] for chart in blocks(section, Chart)} == {
        "staleness-age": [f"{AGE}/mean", f"{AGE}/max"],
        "staleness-ahead": ["async/groups_ahead"],
    }


def test_a_run_whose_weights_made_all_that_they_are_trained_on_has_no_ages(tmp_path):
    assert staleness(read_run(write_run(tmp_path / "run").path)) is None


# ---------------------------------------------------------------- drafts


def test_drafts_tell_how_their_acceptance_moved_and_what_the_plan_took(tmp_path):
    metrics = {"drafts/acceptance": [0.8, 0.7, 0.7, 0.6, 0.6, 0.5], "drafts/tokens_per_step": [2.0] * 6}
    metrics |= {"drafts/acceptance_at/1": [0.9] * 6, "drafts/acceptance_at/2": [0.5] * 6}
    run = read_run(write_run(tmp_path / "run", World(metrics=metrics)).path)
    assert words(drafts(run)).startswith("Of the drafted tokens 80.0% were accepted at step 1 and 50.0% at step 6")
    found = {"tokens_per_step": 2.3, "seconds": 50.0, "seconds_without": 110.0}
    said = words(drafts(replace(run, plan=planned(APART) | {"times": {"drafts": found}})))
    assert "The plan took 2.30, and with it 50 s of generation instead of 110" in said
    charts = {chart.id: [series.curve for series in chart.series] for chart in blocks(drafts(run), Chart)}
    assert charts["drafts-accepted"] == ["drafts/acceptance_at/1", "drafts/acceptance_at/2"]


def test_a_run_without_drafts_has_no_section_of_them(tmp_path):
    assert drafts(read_run(write_run(tmp_path / "run").path)) is None


# ---------------------------------------------------------------- incidents


def test_lost_engines_are_incidents_in_their_steps(tmp_path):
    run = write_run(tmp_path / "run")
    lost = LostEngines(run.lost_engines)
    lost.note(4, ["engine 1", "engine 2"], "it died", [Unfinished(number, 40 + number, 7) for number in range(10)])
    lost.note(2, ["engine 0"], "it stood still", [Unfinished(3, 99, 0)])
    (table,) = blocks(incidents(read_run(run.path)), Table)
    assert table.rows == (
        ("2", "lost: engine 0", "it stood still (1 unfinished group: prompts 99)"),
        (
            "4",
            "lost: engine 1, engine 2",
            "it died (10 unfinished groups: prompts 40, 41, 42, 43, 44, 45, 46, 47 and 2 more)",
        ),
    )


def test_every_start_of_a_lost_engine_is_an_incident(tmp_path):
    run = write_run(tmp_path / "run")
    with attempt(run.path, 0, {}) as notes:
        notes.engine_restarted("engine 1", 4, "it did not start within 60 s")
    (table,) = blocks(incidents(read_run(run.path)), Table)
    assert table.rows == (("4", "engine 1 was started again", "attempts.jsonl has the reason"),)


@pytest.mark.parametrize("damage", ["{}", "\x00", '{"step": 1, "engines": 3}', '[1, "torn'], ids=range(4))
def test_a_damaged_line_of_losses_costs_no_other_and_no_page(tmp_path, damage):
    run = write_run(tmp_path / "run")
    with run.lost_engines.open("w") as file:
        file.write(damage + "\n")
    LostEngines(run.lost_engines).note(3, ["engine 0"], "it died", [])
    with run.lost_engines.open("a") as file:
        file.write(json.dumps({"step": 5})[:-2])  # torn: no line yet
    (table,) = blocks(incidents(read_run(run.path)), Table)
    assert [row[:2] for row in table.rows] == [("3", "lost: engine 0"), ("6", "lost_engines.jsonl: 1 damaged line")]
    assert write_report(run.path).bytes > 10_000


# ---------------------------------------------------------------- what a page costs


def test_a_report_reads_each_validation_once_and_judges_the_run_once(tmp_path, monkeypatch):
    read, judged = [], []

    def reading(folder, step):
        read.append(step)
        return read_responses(folder, step)

    def judging(run):
        judged.append(run)
        return verdict(run)

    monkeypatch.setattr(run_record, "read_responses", reading)
    monkeypatch.setattr(sections, "verdict", judging)
    run = write_run(tmp_path / "run", World(held_out={0: [0.0] * 16, 3: [0.5] * 16, 6: [1.0] * 16}))
    written = write_report(run.path)
    assert sorted(read) == [0, 6] and len(judged) == 1
    assert written.headline == verdict(read_run(run.path)).headline
