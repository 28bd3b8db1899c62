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
    assert skipped == {"peer_access", "allocator", "ipc_between_devices"}
    assert (
        lines["digest"]["gb_per_s"] > 0 and lines["log_probs"]["lean_error"] <= 1.05 * lines["log_probs"]["plain_error"]
    )


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("piece", ["A", "B", "C"])
def test_a_piece_is_run_dry_and_leaves_a_line_of_each_check(piece, tmp_path):
    out = tmp_path / "lines.jsonl"
    command = [
        "bash",
        str(ROOT / "scripts" / "hardware" / "run.sh"),
        "cpu",
        "--piece",
        piece,
        "--dry-run",
        "--out",
        out,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    ended = {line["check"]: line["status"] for line in lines if line["status"] != "part"}
    assert done.returncode == 0 and set(ended.values()) == {"ok"}, done.stdout + done.stderr[-2000:]
    assert all(line["machine"] and line["commit"] and line["versions"]["torch"] for line in lines)
