"""What two ranks remember of their collectives: the same groups, numbers and sizes, in the order of their calls."""

import json
import subprocess
import sys

import pytest
import torch

from mrl.platforms.collective_trail import KEPT, Entry, RankGroup, _row_bytes, trail
from mrl.process.free_ports import free_port
from mrl.rank.rank_worker import ActorWorker

SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
from mrl.platforms.collective_trail import keep_trail, trail

port, skipped = sys.argv[1:]
other = os.fork()
rank = int(other == 0)
asked = []
def leaves_out():
    asked.append(1)
    return rank == 1 and len(asked) == int(skipped)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
before = len(trail().recent)
keep_trail(leaves_out)
keep_trail()
pair = dist.new_group([0, 1], group_desc="A_PAIR")
values = torch.ones(3)
dist.all_reduce(torch.ones(3, 5), group=pair)
dist.all_gather([torch.empty(3), torch.empty(3)], values, group=pair)
if rank == 0:
    dist.send(values, 1, group=pair)
else:
    dist.recv(values, 0, group=pair)
work = dist.all_reduce(torch.ones(2), group=pair, async_op=True)
if not int(skipped):
    work.wait()
    dist.barrier()
told = [[each.group.name.split()[0], each.group.ranks, each.group.is_pair, each.number, each.operation, each.row_bytes]
        for each in trail().recent]
os.write(1, (json.dumps([rank, before, told, trail().total, str(trail().recent[0])]) + "\\n").encode())
if other:
    os.waitpid(other, 0)
os._exit(0)
"""
PAIR = [
    ["A_PAIR", [0, 1], False, 1, "allreduce", 20],
    ["A_PAIR", [0, 1], False, 2, "allgather", 0],
    ["A_PAIR", [0, 1], True, 1, "send", 0],
    ["A_PAIR", [0, 1], False, 3, "allreduce", 4],
]


def ranks(skipped: int) -> list[list]:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(free_port()), str(skipped)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return sorted(map(json.loads, done.stdout.splitlines()))


@pytest.fixture(scope="module")
def whole() -> list[list]:
    """Both ranks, of which none leaves anything out."""
    return ranks(0)


def of_pair(told: list) -> list:
    """Without torch's own group, whose barriers are in its new groups, too."""
    return [entry for entry in told if entry[0] == "A_PAIR"]


def test_both_ranks_remember_the_same_and_a_message_by_its_two_ends(whole):
    first, second = whole
    assert first[1] == second[1] == 0, "nothing is counted before it is asked for"
    assert of_pair(first[2]) == PAIR
    assert of_pair(second[2]) == [[*entry[:4], entry[4].replace("send", "receive"), entry[5]] for entry in PAIR]
    assert first[3] == second[3] == len(first[2]) == len(second[2])
    last = first[2][-1]
    assert last[4] == "barrier" and last[1:3] == [[0, 1], False]


def test_a_collective_that_is_left_out_is_not_counted(whole):
    """It is the last of the pair, which is the third, for messages are none; before them are those that torch made."""
    made_by_torch = len(whole[1][2]) - len(PAIR) - len(["barrier"])
    first, second = ranks(made_by_torch + 3)
    assert of_pair(first[2]) == PAIR
    assert len(of_pair(second[2])) == 3 and second[2][-1][4] == "receive"


@pytest.mark.parametrize(
    ("given", "row_bytes"),
    [
        (torch.ones(3, 5), 20),
        ([torch.ones(3, 5)], 20),
        ((torch.ones(3, 5),), 20),
        (torch.tensor(1.0), 4),
        ((torch.ones(3), torch.ones(3)), 0),
        ([], 0),
        ((None,), 0),
        (7, 0),
        (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), 0),
    ],
)
def test_counting_takes_whatever_torch_takes(given, row_bytes):
    assert _row_bytes(given) == row_bytes


def test_a_collective_is_told_with_its_number_and_ranks():
    group = RankGroup("TENSOR_MODEL_PARALLEL_GROUP 7", (0, 1))
    said = str(Entry(group, 57, "allreduce", 4096))
    assert said == "allreduce 57 of TENSOR_MODEL_PARALLEL_GROUP 7 (ranks 0, 1) with rows of 4096 bytes"
    assert str(Entry(RankGroup("x", (3, 5), is_pair=True), 2, "receive")) == "receive 2 of x (ranks 3 to 5)"
    assert str(RankGroup("x", tuple(range(8)))) == "x (ranks 0, 1, 2, 3, 4, 5, 6, 7)"
    assert str(RankGroup("x", tuple(range(64)))) == "x (64 ranks, 0 to 63)"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_rank_that_cannot_write_its_stacks_hands_out_its_trail_all_the_same(tmp_path, is_there):
    worker = ActorWorker.__new__(ActorWorker)
    worker._log = tmp_path / "logs" / "actor-rank-0.log"
    if is_there:
        worker._log.parent.mkdir()
    assert worker.write_stacks() == trail() and worker.collectives() == trail().total
    stacks = tmp_path / "logs" / "actor-rank-0.stacks"
    assert stacks.exists() is is_there
    assert not is_there or "test_collective_trail.py" in stacks.read_text()


@pytest.mark.parametrize("of", ["counts", "recent"])
def test_where_nobody_counts_there_is_nothing(of):
    assert not getattr(trail(), of) and KEPT > 1000
