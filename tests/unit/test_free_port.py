"""Ports that ranks and engines meet at: free when they are asked for, and still free when somebody comes to listen."""

import socket

import pytest

from mrl.process import free_ports
from mrl.process.free_ports import free_port


def test_a_free_port_is_none_that_the_kernel_gives_to_connections():
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first, last = map(int, file.read().split())
    ports = {free_port() for _ in range(50)}
    assert not [port for port in ports if first <= port <= last]
    assert len(ports) > 40  # drawn, so that two runs that start together do not come to the same one


def test_ports_that_are_taken_are_passed_over(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        free = free_port()
        monkeypatch.setattr(free_ports, "_own_ports", lambda: [port, free])
        assert {free_port() for _ in range(20)} == {free}


@pytest.mark.parametrize("ports", ["1024 65535", ""])
def test_without_a_range_of_its_own_any_free_port_serves(monkeypatch, tmp_path, ports):
    path = tmp_path / "ip_local_port_range"
    path.write_text(ports)
    monkeypatch.setattr(free_ports, "_EPHEMERAL", path)
    assert 1024 <= free_port() <= 65535
