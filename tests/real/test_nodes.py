"""The rig of several nodes on this machine (network.py), and that processes of ours meet across them by addresses,
not by names.
"""

import subprocess
import sys
import time
from pathlib import Path

import network
import pytest
from world import ROOT

pytestmark = [pytest.mark.real, pytest.mark.skipif(network.refusal() is not None, reason=str(network.refusal()))]

MIB = 1 << 20
COUNT_BYTES = """
import socket, sys
connection, _ = socket.create_server((sys.argv[1], 5000)).accept()
count = 0
while data := connection.recv(1 << 20):
    count += len(data)
print(count)
"""
SEND_BYTES = """
import socket, sys, time
while True:
    try:
        with socket.create_connection((sys.argv[1], 5000), timeout=10) as connection:
            connection.sendall(bytes(int(sys.argv[2])))
        break
    except ConnectionRefusedError:
        time.sleep(0.02)
"""
# The weight sync's own group, and the ranks' default one, meet at the first node's address; each sends its number to
# the other.
MEET = """
import datetime, os, sys
import torch
import torch.distributed as dist
from mrl.platforms.torch_platforms import CpuPlatform
from mrl.platforms.transfer import CpuTransfer
number, host = int(sys.argv[1]), sys.argv[2]
store = dist.TCPStore(host, 5001, 2, number == 0, datetime.timedelta(seconds=20), wait_for_workers=False)
transfer = CpuTransfer()
group = transfer.point_to_point_group(store, number, 2, 20.0, host)
mine, theirs = torch.full((4,), number), torch.full((4,), -1)
works = [group.send([mine], 1 - number, 7), group.recv([theirs], 1 - number, 7)]
assert all(transfer.wait(work, 20.0) for work in works)
os.environ.update(CpuPlatform().network_environment(host))
dist.init_process_group("gloo", init_method=f"tcp://{host}:5002", rank=number, world_size=2)
dist.all_reduce(mine)
print(theirs.tolist(), mine.tolist())
"""


@pytest.fixture
def nodes(tmp_path_factory):
    with network.network(2, tmp_path_factory.mktemp("nodes")) as made:
        yield made


def python(node: network.Node, program: str, *arguments: str) -> subprocess.Popen:
    return node.start(
        sys.executable, "-c", program, *arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )


def said(process: subprocess.Popen) -> str:
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text[-3000:]
    return text.strip()


def test_counters_of_a_link_count_what_crosses_it(nodes):
    """Headers are 66 bytes a packet, at worst of 1,500 bytes."""
    first, second = nodes.nodes
    receiver = python(second, COUNT_BYTES, second.address)
    sent = first.sent_bytes
    received = second.received_bytes
    said(python(first, SEND_BYTES, second.address, str(20 * MIB)))
    assert said(receiver) == str(20 * MIB)
    for crossed in (first.sent_bytes - sent, second.received_bytes - received):
        assert 20 * MIB < crossed < 1.06 * 20 * MIB


def test_groups_meet_across_nodes_whose_names_resolve_to_loopback(nodes):
    first, second = nodes.nodes
    assert "127.0.1.1" in second.run("getent", "hosts", second.run("hostname").stdout.strip()).stdout
    both = [python(node, MEET, str(node.number), first.address) for node in (first, second)]
    assert [said(process).splitlines()[-1] for process in both] == [
        "[1, 1, 1, 1] [1, 1, 1, 1]",
        "[0, 0, 0, 0] [1, 1, 1, 1]",
    ]


def test_a_lost_node_leaves_nothing_behind(nodes):
    first, second = nodes.nodes
    sleeping = second.start("sleep", "1000")
    own = Path("/proc") / str(second.pid)
    second.end()
    sleeping.wait(timeout=10)
    deadline = time.monotonic() + 10
    while own.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not own.exists()
    assert first.run("ip", "-br", "link").stdout  # the other node is as it was
