"""Clocks that differ and ports that are closed between nodes are told with both addresses."""

import socket

import pytest

from mrl.cluster.node_checks import Clock, clock_faults, port_faults, reaches


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
