"""What a process holds is counted by storages: each once, views and gradients included, host places left out."""

import gc
import subprocess
import sys

import pytest
import torch

from mrl.platforms import process_memory as module
from mrl.platforms.imports import many_imports
from mrl.platforms.process_memory import HEAPS, live_bytes, note_baseline, process_memory, resident_bytes

MIB = 2**20


@pytest.fixture(scope="module", autouse=True)
def only_of_these_tests():
    """What other tests and their imports left is not gone through again and again: a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def more():
    """Bytes above those at the test's begin."""
    gc.collect()
    before = live_bytes()
    return lambda **known: live_bytes(**known) - before


def test_a_storage_counts_once_whatever_views_lie_on_it(more):
    whole = torch.zeros(MIB, dtype=torch.uint8)
    views = [whole[:10], whole.view(2, -1), torch.nn.Parameter(whole.view(torch.float32))]
    assert more() == MIB, views


def test_a_view_keeps_all_of_its_storage_alive(more):
    view = torch.zeros(MIB, dtype=torch.uint8)[:1]
    assert more() == MIB and view.numel() == 1


def test_an_emptied_storage_counts_nothing_and_what_is_dropped_is_gone(more):
    tensor = torch.zeros(MIB, dtype=torch.uint8)
    tensor.untyped_storage().resize_(0)
    assert more() == 0
    tensor.untyped_storage().resize_(MIB // 2)
    assert more() == MIB // 2
    del tensor
    assert more() == 0


def test_a_gradient_that_nobody_has_looked_at_counts(more):
    weight = torch.nn.Parameter(torch.ones(MIB // 4))
    (weight * weight).sum().backward()
    assert more() == 2 * MIB


def test_host_places_are_left_out_with_every_view_of_them(more):
    place, weights = torch.zeros(MIB, dtype=torch.uint8), torch.zeros(MIB // 2, dtype=torch.uint8)
    assert more() == weights.nbytes + place.nbytes
    assert more(on_host=[place[5:6]]) == weights.nbytes


def test_what_the_collector_was_told_to_forget_has_to_be_named():
    weights = torch.zeros(MIB, dtype=torch.uint8)
    gc.freeze()
    try:
        frozen = live_bytes()
        assert live_bytes(roots=[weights]) - frozen == MIB
    finally:
        gc.unfreeze()
    assert live_bytes(roots=[weights]) == live_bytes()  # and counts once where both know it
    gc.freeze()  # for the tests that follow


def test_the_collector_looks_at_nothing_that_was_imported_and_at_what_comes_later():
    before = gc.get_freeze_count()
    with many_imports():
        imported = [[] for _ in range(5000)]
        assert not gc.isenabled()
    later = []
    assert gc.isenabled() and gc.get_freeze_count() >= before + len(imported)
    assert gc.is_tracked(later) and any(known is later for known in gc.get_objects())
    assert not any(known is imported[0] for known in gc.get_objects())


def test_tensors_without_a_storage_of_this_process_are_passed_over(more):
    kept = [torch.zeros(MIB, device="meta"), torch.zeros(4, 4).to_sparse()]
    assert 0 <= more() < MIB, kept


def test_resident_memory_is_told_with_that_after_the_imports(monkeypatch):
    monkeypatch.setattr(module, "_baseline_bytes", 0)
    gc.collect()  # what other tests left is given back now and not meanwhile
    note_baseline()
    kept = torch.ones(128 * MIB, dtype=torch.uint8)
    memory = process_memory("cpu", unseen_bytes=2)
    assert memory.free_bytes is None
    assert abs(memory.resident_bytes - memory.baseline_bytes - kept.nbytes) < 16 * MIB
    assert memory.resident_bytes == pytest.approx(resident_bytes(), rel=0.05)
    assert memory.live_bytes - live_bytes() == 2


def test_an_accelerator_is_asked_for_its_own_figures(monkeypatch):
    class Device:
        @staticmethod
        def memory_allocated() -> int:
            return 100

        @staticmethod
        def memory_reserved() -> int:
            return 120

        @staticmethod
        def mem_get_info() -> tuple[int, int]:
            return 70, 200

    monkeypatch.setattr(torch, "npu", Device, raising=False)
    awake, asleep = process_memory("npu"), process_memory("npu", absent_bytes=110)
    assert (awake.live_bytes, awake.free_bytes) == (100, 70)
    assert asleep.live_bytes == 10  # nothing more can lie in the blocks that are there


@pytest.mark.parametrize("few", [True, False])
def test_threads_share_few_heaps_where_that_is_asked(few):
    """malloc_info tells of each heap of the process."""
    code = """
import ctypes, sys, threading
from mrl.platforms.process_memory import few_heaps
libc = ctypes.CDLL(None)
if sys.argv[1] == "True" and not few_heaps() or not hasattr(libc, "malloc_info"):
    sys.exit("no glibc")
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
at_once = threading.Barrier(8)
threads = [threading.Thread(target=lambda: (at_once.wait(), libc.malloc(2000), at_once.wait())) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
file = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, file)
libc.fflush(file)
"""
    done = subprocess.run([sys.executable, "-c", code, str(few)], capture_output=True, text=True)
    if "no glibc" in done.stderr:
        pytest.skip("not glibc")
    assert (done.stdout.count("<heap nr=") <= HEAPS) == few, done.stderr
