"""Addresses are found by routes, not by names."""

import socket

import psutil
import pytest

from mrl.errors import EnvironmentFault
from mrl.platforms.addresses import GLOO_INTERFACE, address_environment, address_towards, gloo_environment, interface_of

LOOPBACK = next(
    name for name, entries in psutil.net_if_addrs().items() if any(entry.address == "127.0.0.1" for entry in entries)
)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_is_met_on_loopback(host):
    assert address_towards(host).startswith(("127.", "::1"))


def test_each_address_of_this_host_is_reached_from_itself_and_is_held_by_the_interface_that_lists_it():
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET:
                assert address_towards(entry.address) == entry.address
                assert entry.address in [held.address for held in psutil.net_if_addrs()[interface_of(entry.address)]], (
                    name
                )


def test_all_of_loopbacks_network_is_loopbacks():
    assert interface_of("127.0.1.1") == LOOPBACK


def test_an_address_of_another_host_has_no_interface_here():
    with pytest.raises(EnvironmentFault, match=r"no interface .* 203\.0\.113\.7"):
        interface_of("203.0.113.7")


def test_a_name_that_is_none_is_told():
    with pytest.raises(EnvironmentFault, match=r"leads to no-such-host\.invalid"):
        address_towards("no-such-host.invalid")


def test_an_interface_that_was_chosen_stays(monkeypatch):
    monkeypatch.delenv(GLOO_INTERFACE, raising=False)
    assert gloo_environment("127.0.0.1") == {GLOO_INTERFACE: LOOPBACK}
    monkeypatch.setenv(GLOO_INTERFACE, "bond7")
    assert gloo_environment("127.0.0.1") == {GLOO_INTERFACE: "bond7"}


def test_an_engine_takes_the_address_that_its_node_has_and_no_translated_one(monkeypatch):
    for name in (GLOO_INTERFACE, "VLLM_HOST_IP"):
        monkeypatch.delenv(name, raising=False)
    assert address_environment("127.0.0.1") == {GLOO_INTERFACE: LOOPBACK, "VLLM_HOST_IP": "127.0.0.1"}
    assert address_environment("203.0.113.7") == {}
    monkeypatch.setenv("VLLM_HOST_IP", "10.9.9.9")
    assert address_environment("127.0.0.1")["VLLM_HOST_IP"] == "10.9.9.9"
