"""The commands of launch/ as their page has them, in an empty HOME, on ports and in a folder of the test's own."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from deadlines import END_S
from world import ROOT

from mrl.process.free_ports import free_port

pytestmark = pytest.mark.real

PAGE = ROOT / "docs" / "tutorial" / "to_a_cluster.md"
STARTS = "launch/start_head.sh\n"


def commands() -> list[str]:
    """Lines of the page's block that starts a head without settings."""
    blocks = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [text for text in blocks if text.startswith(STARTS)]
    return block.splitlines()


def test_a_job_runs_on_a_head_of_an_empty_home_and_the_head_is_stopped(tmp_path):
    home, temp, dashboard = tmp_path / "home", Path(f"/tmp/ray-hour-{os.getpid()}"), free_port()
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "HOME": str(home), "TEMP": str(temp), "PORT": str(free_port()), "DASHBOARD_PORT": str(dashboard), "CPUS": "2",
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
    }  # fmt: skip

    def run(line: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=END_S, check=False
        )

    starts, job, stops = commands()
    try:
        done = run(starts)
        assert done.returncode == 0 and (home / ".ray" / "auth_token").stat().st_size == 64, done.stdout + done.stderr
        end = time.monotonic() + END_S
        while (done := run(job)).returncode and "No available agent" in done.stdout + done.stderr:
            assert time.monotonic() < end  # of a head that has just started
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
        said = done.stdout + done.stderr
        assert "megatron-core" in said and "succeeded" in said, said
    finally:
        done = run(stops)
        shutil.rmtree(temp, ignore_errors=True)
    assert done.returncode == 0 and "is stopped" in done.stdout
    assert run(stops).returncode == 4
