"""Groups of gloo in one process: they compute as torch's own, and a process that waits is left alone."""

import subprocess
import sys

import pytest

from mrl.cluster.prerequisites import free_port

GROUPS = 40
SCRIPT = f"""
import os, resource, sys, time
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d
from mrl.platforms.gloo_device import share

rank, port, shares = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "shared"
if shares:
    share()
    share()
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=2)
groups = [dist.new_group([0, 1]) for _ in range({GROUPS})]
for number, group in enumerate(groups):
    values = torch.full((3,), float(number + rank))
    dist.all_reduce(values, group=group)
    assert values.tolist() == [2 * number + 1.0] * 3
    others = [torch.zeros(2) for _ in range(2)]
    dist.all_gather(others, torch.full((2,), float(rank)), group=group)
    assert [each.tolist() for each in others] == [[0.0, 0.0], [1.0, 1.0]]
distributed_c10d._set_pg_timeout(__import__("datetime").timedelta(seconds=77), groups[0])
assert groups[0]._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 77
before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
time.sleep(2)
print(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before)
dist.barrier()
dist.destroy_process_group()
"""


def wakes(port: int, how: str) -> list[int]:
    """Of each of two ranks in two seconds of waiting."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    ranks = [
        subprocess.Popen([*command, str(rank), str(port), how], stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [int(output) for output in outputs]


@pytest.mark.timeout(240)
def test_groups_that_share_a_device_compute_the_same_and_wake_a_tenth_as_often():
    own, shared = wakes(free_port(), "own"), wakes(free_port(), "shared")
    assert max(shared) < min(own) / 10, (own, shared)
