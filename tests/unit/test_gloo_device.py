"""Groups of gloo in one process: they compute as torch's own, and a process that waits is left alone."""

import subprocess
import sys

import pytest

from mrl.process.free_ports import free_port

GROUPS = 40
SCRIPT = f"""
import os, resource, sys, time
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d
from mrl.platforms.gloo_device import share

ranks = []
for how, port in zip(("own", "shared"), sys.argv[1:], strict=True):
    for rank in (0, 1):
        ranks.append(os.fork())
        if not ranks[-1]:
            break
    if not ranks[-1]:
        break
else:
    sys.exit(any([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]))
if how == "shared":
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
time.sleep(1)
made = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
os.write(1, f"{{how}} {{made}}\\n".encode())  # at once: four processes write
dist.barrier()
dist.destroy_process_group()
"""


def wakes() -> dict[str, list[int]]:
    """Of each of two ranks in a second of waiting, with devices of their own and with one that is shared."""
    ports: set[int] = set()
    while len(ports) < 2:
        ports.add(free_port())
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, *map(str, ports)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    found = {"own": [], "shared": []}
    for line in done.stdout.splitlines():
        how, count = line.split()
        found[how].append(int(count))
    assert [len(counts) for counts in found.values()] == [2, 2]
    return found


@pytest.mark.long
@pytest.mark.timeout(240)
def test_groups_that_share_a_device_compute_the_same_and_wake_a_tenth_as_often():
    own, shared = wakes().values()
    assert max(shared) < min(own) / 10, (own, shared)
