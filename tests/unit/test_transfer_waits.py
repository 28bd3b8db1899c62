"""Waiting for point-to-point messages on accelerators: a peer that is lost ends in our own deadline.

Against stand-ins for works and groups that answer as NCCL's and HCCL's do (torch's _distributed_c10d.pyi; of torch_npu
v2.10.0 ProcessGroupHCCL.cpp and Init.cpp).
"""

import ast
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mrl.platforms.transfer import CudaTransfer, NpuTransfer, Transfer

DEVICES = [CudaTransfer, NpuTransfer]
WHAT = ("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT")
HANDLING = [f"{library}_{what}" for library in ("TORCH_NCCL", "HCCL") for what in WHAT]


class EnqueuedWork:
    """A message on a device's stream, in a group that waits blockingly."""

    def __init__(self, looks: float):
        self.looks, self.order = looks, []

    def is_completed(self):
        self.looks -= 1
        self.order.append("look")
        return self.looks < 0

    def wait(self, timeout=timedelta(0)):
        self.order.append("wait")
        if self.looks >= 0:
            pytest.fail("after its deadline it would abort the communicator")
        return True


class FailedWork(EnqueuedWork):
    """It is completed, and its `wait` says so (handleException of WorkNCCL and WorkHCCL)."""

    def wait(self, timeout=timedelta(0)):
        if not timeout:  # without a deadline torch 2.13 waits on the stream alone
            return True
        raise RuntimeError("NCCL communicator was aborted")


@pytest.mark.parametrize("device", DEVICES)
def test_a_message_that_never_comes_ends_in_our_deadline(device):
    work, begun = EnqueuedWork(looks=float("inf")), time.monotonic()
    assert device().wait(work, timeout_s=0.05) is False
    assert 0.05 <= time.monotonic() - begun < 5
    assert "wait" not in work.order


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_enqueued_after_a_wait_comes_after_the_message(device):
    work = EnqueuedWork(looks=3)
    assert device().wait(work, timeout_s=60) is True
    assert work.order == ["look"] * 4 + ["wait"]


@pytest.mark.parametrize("device", DEVICES)
def test_a_communicator_that_failed_says_so(device):
    with pytest.raises(RuntimeError, match="aborted"):
        device().wait(FailedWork(looks=0), timeout_s=60)


class Group:
    class Options:
        _timeout = timedelta(minutes=10)

    def __init__(self, store, rank, size, options):
        self.options, self.calls = options, []
        self.handling = [os.environ.get(variable) for variable in HANDLING]

    def abort(self):  # HCCL inherits one that does nothing
        self.calls.append("abort")

    def abort_hccl_comm(self, reason):
        self.calls.append("abort_hccl_comm")


@pytest.fixture(params=DEVICES)
def transfer(request, monkeypatch) -> Transfer:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setitem(sys.modules, "torch_npu._C._distributed_c10d", SimpleNamespace(ProcessGroupHCCL=Group))
    return request.param()


def test_the_groups_own_deadline_comes_well_after_ours(transfer):
    """Where it passes, the watchdog ends the process, and the sync is neither fenced nor done again."""
    group = transfer.point_to_point_group(None, 0, 2, 300.0, "host")
    assert group.options._timeout >= 3 * timedelta(seconds=300)


@pytest.mark.parametrize("known", [None, "1"])
def test_a_peer_that_fails_ends_no_process_of_a_sync_and_other_groups_are_as_the_user_says(
    transfer, known, monkeypatch
):
    for variable in HANDLING:
        monkeypatch.delenv(variable, raising=False)
        if known:
            monkeypatch.setenv(variable, known)
    group = transfer.point_to_point_group(None, 0, 2, 300.0, "host")
    ours, others = ["0", "1"], [known, known]
    assert group.handling == (ours + others if transfer.name == "cuda" else others + ours)
    assert [os.environ.get(variable) for variable in HANDLING] == others * 2


def test_a_group_is_ended_by_the_call_that_does_it(transfer):
    group = transfer.point_to_point_group(None, 0, 2, 300.0, "host")
    transfer.abort(group)
    assert group.calls == [{"cuda": "abort", "npu": "abort_hccl_comm"}[transfer.name]]


def test_the_stand_ins_have_what_torchs_own_classes_have():
    interface = ast.parse((Path(torch.__file__).parent / "_C/_distributed_c10d.pyi").read_text())
    classes = {node.name: node for node in interface.body if isinstance(node, ast.ClassDef)}
    methods = {
        name: {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
        for name, node in classes.items()
    }
    assert {"is_completed", "wait"} <= methods["Work"].keys() and "abort" in methods["ProcessGroupNCCL"]
    assert "if timeout is set, it will block the CPU thread" in dist.Work.wait.__doc__
    assert [part.arg for part in methods["ProcessGroupNCCL"]["__init__"].args.args] == [
        "self",
        "store",
        "rank",
        "size",
        "options",
    ]
    assert [ast.unparse(base) for base in classes["ProcessGroupNCCL"].bases] == ["Backend"]


@pytest.mark.parametrize("device", DEVICES)
def test_who_connects_in_another_thread_does_it_on_its_own_device(device, monkeypatch):
    """A thread begins on the first device that the process sees, and what it does there takes memory there."""
    chosen, by_thread = [], threading.local()
    by_thread.device = 3
    module = SimpleNamespace(
        current_device=lambda: getattr(by_thread, "device", 0),
        set_device=lambda number: chosen.append((threading.current_thread().name, number)),
    )
    monkeypatch.setattr(torch, device.name, module, raising=False)
    choose = device().device_for_thread()
    thread = threading.Thread(target=choose, name="connecting")
    thread.start()
    thread.join()
    assert chosen == [("connecting", 3)]


@pytest.mark.parametrize("device", DEVICES)
def test_who_waits_waits_for_its_stream_and_not_for_the_device(device, monkeypatch):
    marked = []
    event = SimpleNamespace(record=lambda: marked.append("record"), query=lambda: len(marked) > 1)
    monkeypatch.setattr(torch, device.name, SimpleNamespace(Event=lambda: event), raising=False)
    has_ended = device().mark()
    assert marked == ["record"] and not has_ended()
    marked.append("the stream came to it")
    assert has_ended()
