"""The part of scripts/hardware that needs neither Megatron nor vLLM, on the CPU: the same scripts that a machine with
devices runs.
"""

import json
import subprocess

import pytest
from world import ROOT


@pytest.mark.real
def test_the_ladders_first_rungs_hold_on_the_cpu():
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "hardware" / "run.sh"), "cpu", "--fast"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    lines = {line["check"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    skipped = {name for name, line in lines.items() if line["status"] == "skipped"}
    assert skipped == {"peer_access", "allocator", "ipc", "ipc_between_devices"}
    assert (
        lines["digest"]["gb_per_s"] > 0 and lines["log_probs"]["lean_error"] <= 1.05 * lines["log_probs"]["plain_error"]
    )
