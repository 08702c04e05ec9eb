"""Through which of its network interfaces a rank reaches the others, where a node has several."""

from collections.abc import Mapping, MutableMapping

import psutil

from protocol.addresses import own_address_toward

_LIBRARIES = ("NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_", "IB_")


def name_interface(host: str, environment: MutableMapping[str, str]) -> None:
    """Tell gloo and NCCL to use the interface that reaches `host`, unless the operator has named one.

    By themselves gloo takes the one that the host's name means, which Debian says is loopback, and NCCL the first that
    is up: a management network or a virtual one. environment: changed in place.
    """
    interface = _interface_of(own_address_toward(host))
    if interface is None:
        return
    if interface == "lo":
        environment["GLOO_SOCKET_IFNAME"] = interface
        return
    environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=": this one, not all whose names begin so


def network_settings(environment: Mapping[str, str]) -> str:
    """Return the settings of communication libraries that an environment has, NAME=VALUE, in order of their names."""
    return " ".join(f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith(_LIBRARIES))


def _interface_of(address: str) -> str | None:
    if address.startswith("127."):
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None
