"""Who waits in shared memory for a process that has ended, or for a connection that nobody wants any more, is told so
at once, not at its deadline.
"""

import os
import signal
import time
from pathlib import Path
from threading import Timer

import pytest
from reshard_world import setup_for

from mrl.platforms.transfer import CpuTransfer
from mrl.rank.rank_worker import ActorWorker
from mrl.reshard.connect import connect_sender
from mrl.reshard.transport import TransferError, received_rounds
from mrl.reshard.transport_shm import SharedMemoryReceiver, SharedMemorySender, arena_path

DEADLINE_S = 20.0


@pytest.fixture
def setup():
    return setup_for({"world_size": 1}, {})


def in_a_process(open_end, there):
    """A child that opens one end, makes the file `there` and does nothing more."""
    child = os.fork()
    if child == 0:
        end = open_end()
        Path(there).touch()
        time.sleep(DEADLINE_S)
        os._exit(bool(end))
    deadline = time.monotonic() + DEADLINE_S
    while not there.exists():
        assert time.monotonic() < deadline, "the child never opened its end"
        time.sleep(0.01)
    return child


def end(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def raised_within(seconds, waits):
    began = time.monotonic()
    with pytest.raises(TransferError, match=r"gave up.*its process has ended"):
        waits()
    assert time.monotonic() - began < seconds


def test_a_rank_is_told_that_its_worker_has_ended(setup, tmp_path):
    child = in_a_process(lambda: SharedMemoryReceiver(setup, 0, [0], CpuTransfer()), tmp_path / "there")
    sender = SharedMemorySender(setup, 0, [0], CpuTransfer())
    message = received_rounds(setup.plan(), 0, [0])[0][0]
    sender.begin(1)
    assert not sender._arenas[0].has_left(0)
    end(child)
    raised_within(2.0, lambda: sender.slot(message))
    sender.close()
    arena_path(setup, 0).unlink()


def test_a_worker_is_told_that_its_rank_has_ended(setup, tmp_path):
    receiver = SharedMemoryReceiver(setup, 0, [0], CpuTransfer())
    rounds = received_rounds(setup.plan(), 0, [0])
    receiver.begin(1)
    receiver.ask(rounds[0])
    assert not receiver._arena.has_left(1), "one that has not come yet has not left"
    child = in_a_process(lambda: SharedMemorySender(setup, 0, [0], CpuTransfer()), tmp_path / "there")
    end(child)
    raised_within(2.0, lambda: receiver.take(rounds[0]))
    receiver.close()


def test_a_rank_whose_engine_never_comes_is_let_go_by_the_driver(setup):
    worker = ActorWorker.__new__(ActorWorker)
    name = setup.transport["name"]
    worker.rank, worker.given_up = 0, ["the connection before"]
    lets_go = Timer(0.1, lambda: worker.give_up_connecting(["another", name]))
    lets_go.start()
    began = time.monotonic()
    with pytest.raises(TransferError, match="rank 0 connects no more: the driver gave this connection up"):
        connect_sender(setup, 0, lambda name, chunk: None, check_wanted=lambda: worker._check_connecting(name))
    assert 0.1 <= time.monotonic() - began < 5.0
    lets_go.join()


def test_a_rank_does_not_begin_to_meet_others_between_hosts_for_a_connection_that_was_given_up():
    setup = setup_for({"world_size": 1}, {}, "p2p")
    worker = ActorWorker.__new__(ActorWorker)
    name = setup.transport["name"]
    worker.rank, worker.given_up = 0, [name]
    began = time.monotonic()
    with pytest.raises(TransferError, match="connects no more"):
        connect_sender(setup, 0, lambda name, chunk: None, check_wanted=lambda: worker._check_connecting(name))
    assert time.monotonic() - began < 5.0
