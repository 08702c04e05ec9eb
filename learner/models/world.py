"""The learner's process group: joining, network interface, reductions. Sockets listen on the given address only."""

import os
import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not declared in its stubs

from protocol.addresses import family_of, name_interface
from protocol.errors import OperatorError

T = TypeVar("T")


def join_world(
    rank: int, world_size: int, host: str, port: int, timeout_s: float, listener: socket.socket | None = None
) -> TCPStore:
    """Join the process group (gloo on CPUs, nccl on GPUs); returns its store, which rank 0 serves.

    timeout_s: longest wait for the other ranks, here and in each collective. listener: rank 0's open socket at host and
    port, or None. Raises: RuntimeError of torch after timeout_s; OperatorError where torch cannot use the rank's GPU.
    """
    _check_device()
    name_interface(host, os.environ)
    # Each rank sees one device only, which DeepSpeed finds by this number.
    os.environ["LOCAL_RANK"] = "0"
    deadline = timedelta(seconds=timeout_s)
    if rank == 0 and listener is None:
        listener = socket.create_server((host, port), family=family_of(host))
    # Without our socket torch's store listens on every interface.
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


def _check_device() -> None:
    """Raise OperatorError when Ray gave this process a GPU that torch does not see: it would train on the CPU."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) and not torch.cuda.is_available():
        raise OperatorError(
            f"This rank has GPU {given} of {socket.gethostname()}, and torch {torch.__version__} sees none (its CUDA: "
            f"{torch.version.cuda or 'none'}). Run deploy/setup.sh there with SLUICE_LOCK=gpu, update the NVIDIA "
            "driver, or start the cluster with --num-gpus 0 to train on CPUs."
        )


def own_device() -> torch.device:
    """Return this rank's device for models and collectives."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def share(tensors: Iterable[Tensor]) -> None:
    """Give rank 0's values to every rank, one tensor at a time. Collective."""
    for tensor in tensors:
        data = tensor.detach().to(own_device()).contiguous()
        dist.broadcast(data.view(-1).view(torch.uint8), 0)
        tensor.detach().copy_(data)


def share_object(value: T) -> T:
    """Return rank 0's value on every rank. Collective."""
    held = [value]
    dist.broadcast_object_list(held, src=0, device=own_device())
    return held[0]


def reduce_sums(values: Tensor) -> list[float]:
    """Return the sum over all ranks of each value, in float64. values: [N], on `own_device`."""
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
