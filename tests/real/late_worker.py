"""One of a few ranks over gloo, of which one leaves out a collective or stops in the midst; see test_late_ranks.

A thread beside answers where the rank is, as a Ray actor does for a rank: every file `ask-N` by `trail-N-RANK`.
"""

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import agree_on_port

from mrl.platforms.collective_trail import keep_trail, trail

STEPS = 6
LAYERS = 3


def main(rank: int, world_size: int, out: Path, how: str, culprit: int, at: int) -> None:
    threading.Thread(target=answer, args=(rank, out), daemon=True).start()
    port = agree_on_port(out, rank, 0)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    keep_trail()
    keep_trail()  # twice is once
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
    every = dist.new_group(list(range(world_size)))
    for number, call in enumerate(calls(pairs[rank // 2], every)):
        if rank == culprit and number == at:
            if how == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            continue
        call()
    time.sleep(600)  # the test ends it


def calls(pair: dist.ProcessGroup, every: dist.ProcessGroup) -> Iterator:
    """Updates of a small model: two groups, three operations."""
    values = torch.ones(8)
    for _ in range(STEPS):
        for _ in range(LAYERS):
            yield lambda: dist.all_reduce(values, group=pair)
            yield lambda: gather(values, pair)
            yield lambda: dist.all_reduce(values, op=dist.ReduceOp.MAX, group=pair)
        yield lambda: gather(values, every)
        yield lambda: dist.all_reduce(values, group=every)


def gather(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_gather([torch.empty_like(values) for _ in range(group.size())], values, group=group)


def answer(rank: int, out: Path) -> None:
    """Until the process ends."""
    number = 0
    while True:
        if (out / f"ask-{number}").exists():
            file = out / f"trail-{number}-{rank}"
            file.with_suffix(".part").write_bytes(pickle.dumps(trail()))
            file.with_suffix(".part").rename(file)
            number += 1
        time.sleep(0.01)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
