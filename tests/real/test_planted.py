"""The first verdict of `mrl explain` names what was planted in a run: causes of planted_causes.py, at drawn steps."""

import json
import os
from pathlib import Path

import pytest
from planted_causes import CAUSES, OF_LAYOUTS, judged, warm_world


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return warm_world(tmp_path_factory.mktemp("planted") / "world")


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("cause", (*CAUSES, *OF_LAYOUTS), ids=lambda cause: cause.name)
def test_the_first_verdict_names_what_was_planted(world, tmp_path, cause):
    line = judged(world, tmp_path, cause, int(os.environ.get("MRL_PLANTED_SEED", "0")))
    assert line["right"], json.dumps(line)


@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
def test_of_twenty_healthy_runs_at_most_one_is_called_broken_and_all_repeat(world, tmp_path):
    lines = [judged(world, tmp_path, None, seed) for seed in range(int(os.environ.get("MRL_HEALTHY_RUNS", "20")))]
    assert all(line["repeats"] for line in lines), lines
    assert sum(not line["right"] for line in lines) <= 1, lines
