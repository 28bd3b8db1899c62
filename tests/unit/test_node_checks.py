"""What does not belong together between nodes is told with addresses and the cure: devices, drivers, software, shared
memory, clocks, ports.
"""

import re
import socket
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest

from mrl.platforms.inventory import host_identity_faults
from mrl.process.same_software import software
from mrl.tools.node_checks import Clock, NodeFacts, clock_faults, port_faults, reaches, unlike_faults


@pytest.mark.parametrize(
    ("shown", "skew_s"),
    [(100.0, 0.0), (103.0, 0.0), (102.0, 0.0), (99.0, -1.0), (110.0, 7.0)],
    ids=["begin", "end", "between", "behind", "ahead"],
)
def test_a_skew_is_what_the_asking_cannot_explain(shown, skew_s):
    """Asked at 100, answered at 103: whatever is shown between is no skew that anybody could know of."""
    assert Clock(100.0, shown, 103.0).skew_s == skew_s


def test_clocks_are_told_that_differ_by_more_than_the_limit():
    clocks = {"10.0.0.1": Clock(0, 0.1, 0.2), "10.0.0.2": Clock(0, 5.2, 0.2), "10.0.0.3": Clock(0, -90.0, 0.2)}
    assert clock_faults(clocks) == ["the clock of 10.0.0.2 is 5.0 s ahead", "the clock of 10.0.0.3 is 90.0 s behind"]


def test_ports_are_open_or_told():
    with socket.create_server(("127.0.0.1", 0)) as open_one, socket.create_server(("127.0.0.1", 0)) as to_close:
        opened, closed = open_one.getsockname(), to_close.getsockname()
        to_close.close()
        assert reaches([opened, closed], timeout_s=2.0) == [closed]
    assert port_faults({"10.0.0.1": [("10.0.0.2", 23456)], "10.0.0.2": []}) == [
        "10.0.0.1 does not reach 10.0.0.2:23456"
    ]


def test_ports_that_do_not_answer_are_waited_for_together():
    """As behind a firewall that drops what it does not let through: here listeners whose queues are full."""
    with ExitStack() as held:
        targets = []
        for _ in range(6):
            listener = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            held.enter_context(socket.create_connection(listener.getsockname()))
            targets.append(listener.getsockname())
        began = time.monotonic()
        assert reaches(targets, timeout_s=0.2) == targets
        assert time.monotonic() - began < 0.8


WELL = NodeFacts("NVIDIA H100 80GB HBM3", "580.65", software(), 16.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"devices": "NVIDIA H200"},
            r"several devices \(NVIDIA H100 80GB HBM3 on a, c; NVIDIA H200 on b\): give a run",
        ),
        ({"devices": "none (torch sees no CUDA device)"}, r"several devices .*none \(torch sees no CUDA device\) on b"),
        ({"driver": "535.1"}, r"several drivers .*535.1 on b\): install one"),
        ({"software": software() | {"torch": "2.12.0"}}, "torch is 2.12.0 on b .*install one version on every node"),
        ({"shm_gib": 0.0625}, r"/dev/shm is small \(b 0.06 GiB\): give containers --shm-size"),
    ],
)
def test_what_does_not_belong_together_is_told_with_its_cure(change, said):
    (fault,) = unlike_faults({"a": WELL, "b": replace(WELL, **change), "c": WELL})
    assert re.search(said, fault), fault
    assert unlike_faults({"a": WELL, "b": WELL}) == []


def test_a_node_says_what_it_is():
    here = NodeFacts.here("cpu")
    assert here.devices and here.shm_gib > 0 and here.software == software()
    assert NodeFacts.here("cuda").devices.startswith("none (")  # this machine's torch has no CUDA


def test_what_communicators_are_told_is_compared_between_nodes():
    fine = NodeFacts(
        "H100", "580", software(), 64.0, {"NCCL_SOCKET_IFNAME": "eth", "NCCL_IB_HCA": "mlx5"}, ["lo", "eth0"]
    )
    other = replace(
        fine, network={"NCCL_SOCKET_IFNAME": "=eno1,bond0", "NCCL_IB_HCA": "mlx4"}, interfaces=["lo", "eno1"]
    )
    assert unlike_faults({"10.0.0.1": fine, "10.0.0.2": other}) == []
    said = unlike_faults(
        {
            "10.0.0.1": replace(fine, network={"NCCL_HOSTID": "a", "NCCL_IB_DISABLE": "1"}),
            "10.0.0.2": replace(fine, network={"NCCL_HOSTID": "a", "NCCL_SOCKET_IFNAME": "=eth"}),
        }
    )
    assert said == [
        "NCCL_SOCKET_IFNAME==eth on 10.0.0.2, which has no such interface (it has lo, eth0): correct it",
        "NCCL_IB_DISABLE differs (1 on 10.0.0.1, unset on 10.0.0.2): set one value on every node",
        "NCCL_HOSTID=a on 10.0.0.1 and 10.0.0.2, so NCCL takes them for one host: unset it",
    ]


def test_ranks_whose_communicators_would_mistake_their_hosts_are_told_in_one_message():
    """NCCL 2.28, src/misc/utils.cc getHostHash and src/init.cc: what NCCL_HOSTID says counts, not the host."""
    four = [("10.0.0.1", ""), ("10.0.0.1", ""), ("10.0.0.2", ""), ("10.0.0.2", "")]
    assert host_identity_faults(four) == []
    assert host_identity_faults([(node, f"host of {node}") for node, _ in four]) == [], "one for each host"
    (one,) = host_identity_faults([(node, "pod") for node, _ in four])
    assert one == "NCCL_HOSTID=pod on 10.0.0.1 and 10.0.0.2, so NCCL takes them for one host: unset it"
    (several,) = host_identity_faults([*four[1:], ("10.0.0.1", "another")])
    assert several.startswith("NCCL_HOSTID differs between processes of 10.0.0.1 (unset, another), so NCCL takes")


@pytest.mark.parametrize(
    ("value", "is_there"),
    [("eth", True), ("eth0", True), ("=eth", False), ("=eth0", True), ("ib,eth", True), ("ib", False), ("^lo", True),
     ("^lo,docker", True), ("^lo,eth", False), ("^=lo,eth0", False)],
)  # fmt: skip
def test_interfaces_are_named_as_nccl_reads_them(value, is_there):
    """NCCL's user guide, NCCL_SOCKET_IFNAME: prefixes; = for whole names; ^ for all others."""
    node = NodeFacts("H100", "580", software(), 64.0, {"NCCL_SOCKET_IFNAME": value}, ["lo", "eth0"])
    assert (unlike_faults({"10.0.0.1": node}) == []) == is_there
