"""Threads of an engine's worker, waiting for each other on cores that other processes use too."""

import json
import os
import subprocess
import sys

import pytest
from deadlines import END_S

from mrl.platforms.hosting import get_hosting

pytestmark = pytest.mark.real

# Two threads, at last on one core, as beside a busy process: each operation has one wait for the other.
PROGRAM = """
import json, os, time, torch
torch.set_num_threads(2)
values = torch.ones(1 << 16)
values.exp()
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), {min(os.sched_getaffinity(0))})
before = time.process_time()
for _ in range(50):
    values.exp()
print(json.dumps(time.process_time() - before))
"""


def busy_seconds(environment: dict[str, str]) -> float:
    """Of 50 small operations."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=END_S, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="libgomp itself waits so where it sees one core")
def test_a_thread_that_waits_leaves_its_core_to_others():
    unset = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    engines = get_hosting("cpu").engine_environment(0, 1, 1, 1)
    assert busy_seconds(unset | engines) < busy_seconds(unset) / 3
