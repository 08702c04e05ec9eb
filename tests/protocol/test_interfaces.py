"""The network interface that gloo and NCCL use."""

import socket

import psutil
import pytest

from protocol.addresses import name_interface


def interface() -> tuple[str, str]:
    """Return the name and address of an interface of this machine that is not loopback."""
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                return name, each.address
    pytest.skip("this machine has no address but loopback")


def test_loopback_is_named_for_gloo_alone() -> None:
    environment: dict[str, str] = {}
    name_interface("127.0.0.1", environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "lo"}


def test_interface_on_the_way_to_the_first_rank_is_named() -> None:
    name, address = interface()
    environment: dict[str, str] = {}
    name_interface(address, environment)
    assert environment == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


def test_interface_that_the_operator_named_stays() -> None:
    environment = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib"}
    for address in ("127.0.0.1", interface()[1]):
        name_interface(address, environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib"}
