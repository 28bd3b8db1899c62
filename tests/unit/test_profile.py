"""Profiles of single steps: what is recorded, by which ranks, and what a configuration or a verl script asks for."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch
from test_config_rules import broken
from test_loop import World, run_of

from mrl.config.schema import ProfileConfig
from mrl.driver import loop
from mrl.platforms import get_platform
from mrl.rank.profile import StepProfile
from mrl.rank.rank_worker import ActorWorker
from mrl.tools.import_verl.translate import import_overrides


def test_a_trace_has_the_named_work_and_torchs_operations(tmp_path):
    profile = StepProfile(ProfileConfig(steps=(1,)), get_platform("cpu"))
    profile.begin()
    with profile.span("update"):
        torch.ones(8, 8) @ torch.ones(8, 8)
    file = tmp_path / "profiles" / "step-1" / "rank-0.json.gz"
    assert profile.end(file) is None
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"update", "aten::mm"} <= names and list(file.parent.iterdir()) == [file]
    (span,) = [e for e in events if e.get("name") == "update" and e.get("ph") == "X"]
    (product,) = [e for e in events if e.get("name") == "aten::mm"]
    assert span["ts"] <= product["ts"] <= product["ts"] + product["dur"] <= span["ts"] + span["dur"]


def test_a_trace_that_cannot_be_written_is_said_and_leaves_nothing(tmp_path):
    profile = StepProfile(ProfileConfig(steps=(1,)), get_platform("cpu"))
    profile.begin()
    (tmp_path / "profiles").write_text("")
    assert "no profile of a step was written" in profile.end(tmp_path / "profiles" / "step-1" / "rank-0.json.gz")


def test_nsys_is_told_when_a_step_begins_and_ends():
    told = []
    platform = SimpleNamespace(capture=told.append, synchronize=lambda: told.append("waited"))
    profile = StepProfile(ProfileConfig(steps=(1,), tool="nsys"), platform)
    profile.begin()
    assert profile.end(None) is None and told == [True, "waited", False]


@pytest.mark.parametrize(("ranks", "records"), [((0,), [True, False]), ((1,), [False, True]), ((), [True, True])])
def test_ranks_that_are_named_record(ranks, records, tmp_path, monkeypatch):
    made = []
    profile = SimpleNamespace(begin=lambda: None, end=lambda file: made.append(str(file.relative_to(tmp_path))))
    monkeypatch.setattr("mrl.rank.profile.StepProfile", lambda *_: profile)
    asked = SimpleNamespace(record=SimpleNamespace(profile=ProfileConfig(steps=(2,), ranks=ranks)))
    for rank in (0, 1):
        worker = SimpleNamespace(config=asked, rank=rank, profile=None, actor=SimpleNamespace(platform=None))
        ActorWorker.begin_profile(worker)
        ActorWorker.end_profile(worker, str(tmp_path))
        assert worker.profile is None
    assert made == [f"rank-{rank}.json.gz" for rank in (0, 1) if records[rank]]


def test_a_run_profiles_the_steps_that_are_named_and_warns_of_a_trace_that_is_not_there(tmp_path):
    world, calls = World(), []
    run = run_of(world, tmp_path, "record.profile.steps=[2]")
    run.actor.call = lambda method, *given: calls.append((run.state.step, method, *given)) or ["no disk", None]
    for _ in range(3):
        loop.train_step(run)
    folder = str((run.run_dir.profiles / "step-2").resolve())
    assert calls == [(1, "begin_profile"), (2, "end_profile", folder)]
    assert [json.loads(line) for line in run.run_dir.warnings.read_text().splitlines()] == [
        {"step": 2, "text": "no disk"}
    ]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("{steps: [0]}", "record.profile.steps"),
        ("{steps: [1], ranks: [2]}", "record.profile.ranks"),
        ("{steps: [1], ranks: [-1]}", "record.profile.ranks"),
        ("{steps: [1], tool: nsys}", "record.profile.tool"),
    ],
)
def test_a_profile_that_nobody_can_make_is_one_message(given, field):
    assert [violation.field for violation in broken(f"record.profile={given}")] == [field]
    assert broken("record.profile={steps: [1, 3], ranks: [0, 1]}") == []


def test_a_verl_script_keeps_its_profiles():
    actor = "actor_rollout_ref.actor.profiler."
    words = ["global_profiler.tool=torch", "global_profiler.steps=[2,5]", actor + "enable=True"]
    values = import_overrides([*words, actor + "ranks=[0,3]"]).values
    found = {name: values.get(f"record.profile.{name}") for name in ("steps", "ranks", "tool")}
    assert found == {"steps": [2, 5], "ranks": [0, 3], "tool": "torch"}
    assert import_overrides([*words, actor + "all_ranks=True"]).values["record.profile.ranks"] == []
    for off in (words[:2], words[1:], ["global_profiler.tool=npu", *words[1:]]):
        out = import_overrides(off)
        assert not [key for key in out.values if key.startswith("record.profile")] and not out.of("unsupported")
