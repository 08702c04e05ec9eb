"""Addresses with ports are read as they are written, of both kinds; nodes know by which one a peer sees them."""

import socket

import pytest

from protocol.addresses import family_of, host_and_port, own_address_toward, with_port
from tests.fakes.ipv6 import needs_ipv6


@pytest.mark.parametrize(
    ("host", "address"), [("10.0.0.1", "10.0.0.1:6379"), ("head", "head:6379"), ("fd00::1", "[fd00::1]:6379")]
)
def test_address_is_read_as_it_was_written(host: str, address: str) -> None:
    assert with_port(host, 6379) == address
    assert host_and_port(address) == (host, 6379)


@pytest.mark.parametrize(
    "address", ["", "head", "head:", ":6379", "head:0", "head:65536", "head:x", "fd00::1:6379", "[fd00::1]", "a b:1"]
)
def test_what_is_no_host_and_port_is_refused_with_its_text(address: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT") as refused:
        host_and_port(address)
    assert str(refused.value).startswith(address)


def test_family_is_that_of_the_address() -> None:
    assert family_of("10.0.0.1") is socket.AF_INET
    assert family_of("fd00::1") is socket.AF_INET6


def test_peer_on_this_machine_sees_it_by_loopback() -> None:
    assert own_address_toward("127.0.0.1") == "127.0.0.1"
    assert own_address_toward("localhost") == "127.0.0.1"  # by IPv4, though many machines know ::1 by that name too


def test_name_that_has_no_address_is_no_way_to_anybody() -> None:
    with pytest.raises(OSError, match=r"."):
        own_address_toward("no-such-machine.invalid")


@needs_ipv6
def test_peer_over_ipv6_sees_this_machine_by_ipv6() -> None:
    assert own_address_toward("::1") == "::1"
