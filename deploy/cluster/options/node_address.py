"""By which addresses a node and its head are known: as Ray compares them, in one way of writing each."""

import ipaddress

from protocol.addresses import host_and_port, own_address_toward, with_port
from protocol.errors import OperatorError, SettingsError

_WHERE_TO_LOOK = "Give this node's, on the network that the nodes share; `ip -brief address` lists them."


def is_address(text: str) -> bool:
    """Return whether this is an IP address, of IPv4 or IPv6."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def read_node_address(given: str) -> str:
    """Return what --node-ip gives: an address that other nodes can reach this one by, or 127.0.0.1.

    Raises: SettingsError for a name, an address of no single machine, and one of IPv6 that means nothing elsewhere.
    """
    try:
        address = ipaddress.ip_address(given)
    except ValueError:
        raise SettingsError(f"start_cluster: --node-ip {given} is no IP address. {_WHERE_TO_LOOK}") from None
    if address.is_unspecified or address.is_multicast:
        raise SettingsError(f"start_cluster: --node-ip {given} is not the address of one machine. {_WHERE_TO_LOOK}")
    if isinstance(address, ipaddress.IPv6Address) and (
        address.is_loopback or address.is_link_local or address.ipv4_mapped is not None
    ):
        raise SettingsError(
            f"start_cluster: --node-ip {given} is an address that means nothing to other nodes. {_WHERE_TO_LOOK}"
        )
    return str(address)


def read_head_address(given: str) -> str:
    """Return HOST:PORT of a head. Raises: SettingsError where it has another form."""
    try:
        host, port = host_and_port(given)
    except ValueError:
        raise SettingsError(
            f"start_cluster: --address {given} is not HOST:PORT. Give the head's, such as 10.0.0.1:6379 or "
            "[fd00::1]:6379."
        ) from None
    if ":" in host:
        try:
            host = str(ipaddress.IPv6Address(host))
        except ValueError:
            raise SettingsError(
                f"start_cluster: --address {given} is no IPv6 address. Give the head's, such as [fd00::1]:6379."
            ) from None
    return with_port(host, port)


def address_toward(head: str) -> str:
    """Return the address by which a head at HOST:PORT sees this node; sends nothing.

    Raises: OperatorError when there is no route.
    """
    try:
        return own_address_toward(host_and_port(head)[0])
    except OSError as error:
        raise OperatorError(f"start_cluster: --address {head}: {error}. Give an address this node can reach.") from None
