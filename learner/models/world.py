"""The learner's world of ranks: how they meet, and the one reduction they need.

Nothing listens beyond the address that was asked for.
"""

import os
import socket
from collections.abc import Mapping, MutableMapping
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not declared in its stubs

from protocol.addresses import family_of, own_address_toward


def free_address(host: str) -> tuple[str, int]:
    """Return host and a port that is free on it now."""
    with socket.create_server((host, 0), family=family_of(host)) as probe:
        return host, int(probe.getsockname()[1])


def join_world(
    rank: int, world_size: int, host: str, port: int, timeout_s: float, listener: socket.socket | None = None
) -> TCPStore:
    """Meet the other ranks: gloo on CPUs, nccl on GPUs; returns the world's store, which rank 0's process serves.

    timeout_s: longest wait for the others, here and in each collective from now on.
    listener: rank 0's socket at host and port, where it was opened before; taken over.
    Raises: RuntimeError (torch's) when they do not.
    """
    name_interface(host, os.environ)
    # DeepSpeed wants to know which of its node's devices is this rank's: the only one that it can see.
    os.environ["LOCAL_RANK"] = "0"
    deadline = timedelta(seconds=timeout_s)
    if rank == 0 and listener is None:
        listener = socket.create_server((host, port), family=family_of(host))
    # Without a listening socket of ours, torch's store listens on every interface.
    store = TCPStore(
        host,
        port,
        world_size,
        rank == 0,
        timeout=deadline,
        master_listen_fd=None if listener is None else listener.detach(),
        use_libuv=True,
    )
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=deadline)
    return store


def own_device() -> torch.device:
    """Return the device of this rank, on which ranks reduce."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def reduce_sums(values: Tensor) -> list[float]:
    """Return the sum over all ranks of each value, in float64. values: [N], on the device that ranks reduce on."""
    sums = values.double()
    dist.all_reduce(sums)
    return [float(value) for value in sums.tolist()]


def reduce_tensor(values: Tensor) -> Tensor:
    """Return the sum over all ranks of each value, float64 on the CPU."""
    sums = values.to(own_device(), torch.float64, copy=True)
    dist.all_reduce(sums)
    return sums.cpu()


def reduce_max(value: float, device: torch.device) -> float:
    """Return the largest value of any rank."""
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def first_problem(problem: str | None) -> str | None:
    """Return on every rank the problem of the lowest rank that has one. Collective."""
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, problem)
    return next((text for text in found if text is not None), None)


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
