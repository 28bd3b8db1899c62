"""Ranks that give each other what they have through memory, as threads of one process; with torch's groups in
tests/real/test_cpu_patches.py.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from mrl.platforms import host_memory_collectives
from mrl.platforms.host_memory_collectives import SLOT_BYTES, HostExchange, SharedSlots

ROUNDS = 300


def exchanges(ranks: int, processes: list[int] | None = None, timeout_s: float = 30) -> list[HostExchange]:
    descriptors = [SharedSlots.make() for _ in range(ranks)]
    try:
        opened = [[SharedSlots(f"/proc/self/fd/{d}") for d in descriptors] for _ in range(ranks)]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    processes = processes or [os.getpid()] * ranks
    return [HostExchange(rank, slots, processes, timeout_s) for rank, slots in enumerate(opened)]


def on_threads(ranks: int, work: Callable[[int], None]) -> None:
    """Runs `work` of each rank; raises the first error."""
    errors = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_reads_what_the_others_have_for_it_round_after_round(ranks):
    of = exchanges(ranks)

    def work(rank: int) -> None:
        for turn in range(ROUNDS):
            if turn % 7 == rank:
                time.sleep(0.001)  # each is late at times
            sizes = [(rank + other + turn) % 3 for other in range(ranks)]
            ends = [sum(sizes[:i]) for i in range(ranks + 1)]
            sent = torch.tensor([(rank + turn) % 250] * ends[-1], dtype=torch.uint8)
            for other, part in enumerate(of[rank].parts(sent, ends)):
                assert part.tolist() == [(other + turn) % 250] * ((rank + other + turn) % 3)

    on_threads(ranks, work)


def test_all_ranks_see_that_one_has_more_than_a_slot_holds():
    of, answers = exchanges(2), [[], []]

    def work(rank: int) -> None:
        for size in (SLOT_BYTES + rank, SLOT_BYTES, 1):
            parts = of[rank].parts(torch.full((size,), rank, dtype=torch.uint8), (0, size))
            answers[rank].append(parts and [(len(part), int(part[-1])) for part in parts])

    on_threads(2, work)
    expected = [None, [(SLOT_BYTES, 0), (SLOT_BYTES, 1)], [(1, 0), (1, 1)]]
    assert answers == [expected, expected]


def test_a_rank_that_is_gone_is_told(monkeypatch):
    monkeypatch.setattr(host_memory_collectives, "LOOK_S", 0.05)
    ended = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    ended.stdout.read()  # nobody has asked yet how it ended: the system still knows it
    with pytest.raises(RuntimeError, match="rank 1 of a group of 2 has ended"):
        exchanges(2, [os.getpid(), ended.pid])[0].parts(torch.zeros(1, dtype=torch.uint8), (0, 1))


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_groups_time(monkeypatch):
    monkeypatch.setattr(host_memory_collectives, "LOOK_S", 0.05)
    with pytest.raises(RuntimeError, match=r"rank 1 of a group of 2 did not arrive within 0.2 s"):
        exchanges(2, timeout_s=0.2)[0].parts(torch.zeros(1, dtype=torch.uint8), (0, 1))
