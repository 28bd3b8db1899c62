"""Measurements of docs/evidence.md run, in small: what they take of mrl moves with it."""

import json
import subprocess
import sys

import pytest
from deadlines import RUN_S
from world import ROOT

pytestmark = [pytest.mark.real, pytest.mark.long]


def found(name: str, *arguments: str) -> dict:
    """What a script of scripts/bench prints."""
    command = [sys.executable, str(ROOT / "scripts" / "bench" / f"{name}.py"), "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * RUN_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("routes", [(), ("--routes",)], ids=["plain", "with routes"])
def test_the_drivers_part_of_a_step(routes):
    (row,) = found("data_plane", "--responses", "32", *routes)["rows"]
    assert row["driver_peak_bytes"] > 0 and row["received_over_needed"] >= 1


def test_seconds_of_a_sync():
    told = found("reshard", "--layers", "2", "--repeat", "1")
    assert told["bytes_moved"] == told["bytes_required"] and told["shm"]["total_s"] > 0


def test_log_probs_without_logits():
    told = found("logprob", "--tokens", "64", "--hidden", "64", "--vocab", "4096", "--rounds", "1")
    assert told["time_ratio"] > 0
