"""kill -9 of real ranks, inside a save and outside: what is found goes on bit by bit, and to 1e-5 at another layout.

A short form of scripts/evidence/resume.py, which kills twenty times and the whole loop too.
"""

import importlib.util
import sys

import pytest
from world import ROOT, make_world


@pytest.fixture(scope="module")
def harness():
    spec = importlib.util.spec_from_file_location("resume_evidence", ROOT / "scripts" / "evidence" / "resume.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.real
@pytest.mark.long
def test_killed_twice_and_resumed_is_as_if_never_killed(harness, tmp_path):
    world = make_world(tmp_path / "world")
    found = harness.ranks_only(world / "model", tmp_path / "work", kills=2, seed=1)
    assert found.differences == []
    outside, inside = found.kills
    assert outside.resumed_from >= 2, "the first kill waits for a checkpoint"
    assert inside.resumed_from >= outside.resumed_from
    assert outside.same_bits and inside.same_bits
    assert outside.moved_error <= 1e-5 and inside.moved_error <= 1e-5


@pytest.mark.long
def test_the_harness_sees_a_start_that_went_another_way(harness):
    expected = [[[1, "a"], [2, "b"], [3, "c"]]]
    assert harness.unlike([[[2, "b"], [3, "c"]]], expected, 1) == []
    assert harness.unlike([[[2, "b"], [3, "d"]]], expected, 1) == ["rank 0, update 3: other bits"]
    assert harness.unlike([[[3, "c"]]], expected, 1) != [] and harness.unlike([[]], expected, 0) != []
