"""The broadcast group of a weight push: rank 0 is the learner, the others are workers of rollout servers.

Both halves build it here, so that rendezvous, devices and deadlines agree. Over gloo only the given address is opened:
torch's defaults would open the store on every interface.
Torch and vLLM are imported inside functions only.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from protocol.addresses import listen, own_address_toward
from protocol.errors import NeighbourError
from protocol.weights.digest import WeightDigest
from protocol.weights.wire import Bucket, bucket_num_bytes

if TYPE_CHECKING:
    from torch import Tensor, device

T = TypeVar("T")
PEER_LOST = "lost a peer of its weight group"

Store = Any
"""A torch.distributed.Store, which torch's type hints do not export."""


class PeerLostError(NeighbourError):
    """The error of a healthy rank: another member of its group failed. Its text contains PEER_LOST."""


class BroadcastGroup(Protocol):
    """A joined group. device: the device of the buckets."""

    device: str

    def broadcast(self, flat: Tensor) -> None:
        """Copy rank 0's `flat` into `flat` of all other ranks; returns when it is sent or received."""
        ...

    def close(self) -> None:
        """Close the group, from any thread, even while a broadcast blocks another thread."""
        ...


def open_store(address: str, deadline_s: float) -> tuple[Store, int]:
    """Return a store that listens only on `address`, and its port."""
    listener = listen(address)
    port = int(listener.getsockname()[1])
    store = _torch_distributed().TCPStore(
        address,
        port,
        None,
        True,
        timeout=timedelta(seconds=deadline_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )
    return store, port


def reach_store(address: str, port: int, deadline_s: float) -> Store:
    """Return a client of the learner's store. Raises: RuntimeError when it does not answer in time."""
    return _torch_distributed().TCPStore(
        address, port, None, False, timeout=timedelta(seconds=deadline_s), wait_for_workers=False
    )


class GlooGroup:
    """A group on the CPU. Every operation fails within `deadline_s`, and at once when a peer is gone.

    key: name of the group inside the store; each new group needs a new one.
    """

    device = "cpu"

    def __init__(self, store: Store, key: str, rank: int, world_size: int, address: str, deadline_s: float) -> None:
        """Blocks until all ranks have joined. Raises: RuntimeError after `deadline_s`."""
        dist = _torch_distributed()
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=deadline_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address_toward(address))]
        options._threads = 1
        self._group = dist.ProcessGroupGloo(dist.PrefixStore(key, store), rank, world_size, options)

    @classmethod
    def join(cls, init: Mapping[str, Any], worker: int = 0) -> GlooGroup:
        """Return the group of a worker of a server, as __init__ does.

        init: address, port, key, world_size and deadline_s, and rank_offset: the rank of the server's first worker.
        """
        store, rank = reach_store(init["address"], init["port"], init["deadline_s"]), init["rank_offset"] + worker
        return cls(store, init["key"], rank, init["world_size"], init["address"], init["deadline_s"])

    def broadcast(self, flat: Tensor) -> None:
        """Raises: PeerLostError with gloo's reason."""
        options = _torch_distributed().BroadcastOptions()
        options.rootRank = 0
        try:
            self._group.broadcast([flat], options).wait()
        except RuntimeError as error:
            raise PeerLostError(PEER_LOST, str(error)) from error

    def close(self) -> None:
        """Do nothing: the connections close with the last reference to this object, and peers then fail at once."""


class NcclGroup:
    """A group of GPUs, joined by vLLM's protocol. NCCL has no deadline: a broadcast that is late is aborted."""

    device = "cuda"

    def __init__(self, listener: socket.socket, world_size: int, deadline_s: float) -> None:
        """Join as rank 0; blocks until all ranks have joined. listener: the rendezvous' socket, taken over.

        deadline_s: for each broadcast.
        """
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.utils.nccl import unpinned_nccl_env

        self._deadline_s = deadline_s
        self._closing = threading.Lock()
        met = meet_as_first(listener, world_size)
        with unpinned_nccl_env():
            self._communicator: Any = PyNcclCommunicator(met, device=torch.accelerator.current_device_index())

    def broadcast(self, flat: Tensor) -> None:
        nccl_broadcast(self._communicator, flat, self._deadline_s, self.close)

    def close(self) -> None:
        """Abort a broadcast under way and free the communicator, some 100 MB of GPU memory; blocks at most 5 s."""
        # A link that is late closes the group while its own thread aborts the broadcast: NCCL frees memory only once.
        with self._closing:
            self._communicator.destroy()


class ReceivedPush:
    """The digest of the buckets that one push sent to a worker.

    is_confirmed: whether the digest equals the learner's.
    """

    def __init__(self) -> None:
        self.digest: str | None = None
        self.is_confirmed = False

    def buckets(
        self, plan: Sequence[Bucket], device: str | device, broadcast: Callable[[Tensor], None]
    ) -> Iterator[tuple[Bucket, Tensor]]:
        """Yield each bucket with its bytes, uint8, as they arrive."""
        import torch

        digest = WeightDigest(plan)
        for bucket in plan:
            flat = torch.empty(bucket_num_bytes(bucket), dtype=torch.uint8, device=device)
            broadcast(flat)
            digest.add(flat)
            yield bucket, flat
            del flat  # before the next one is allocated
        self.digest = digest.hexdigest()

    def confirm(self, expected: str) -> None:
        """Accept the push. Raises: ValueError when the received bytes differ from the sent ones."""
        if self.digest is None or self.digest != expected:
            raise ValueError(f"weight digest differs: sent {expected or 'nothing'}, received {self.digest}")
        self.is_confirmed = True


def in_thread(name: str, call: Callable[[], T]) -> Future[T]:
    """Return the call's future result. The thread is a daemon: an executor's thread would block the process's exit."""
    made: Future[T] = Future()
    made.set_running_or_notify_cancel()  # the call completes even if its caller stops waiting

    def run() -> None:
        try:
            made.set_result(call())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return made


def meet_as_first(listener: socket.socket, world_size: int) -> Any:
    """Return rank 0's half of vLLM's rendezvous on a listening socket; blocks until all ranks have joined."""
    from vllm.distributed.utils import StatelessProcessGroup

    host, port = listener.getsockname()[:2]
    return StatelessProcessGroup.create(host, port, 0, world_size, listen_socket=listener)


def nccl_broadcast(communicator: Any, flat: Tensor, deadline_s: float, abort: Callable[[], None] | None = None) -> None:
    """Broadcast `flat` from rank 0 over one of vLLM's NCCL communicators and wait for the GPU.

    Raises: PeerLostError after `deadline_s`. The communicator is then aborted, by `abort` if given: a kernel never
    stops to wait for a lost peer.
    """
    import torch

    stream, done = torch.cuda.current_stream(), torch.cuda.Event()  # type: ignore[no-untyped-call]
    communicator.broadcast(flat, src=0, stream=stream)
    done.record(stream)
    if not _is_true_within(deadline_s, done.query):
        (abort or communicator.destroy)()
        raise PeerLostError(PEER_LOST, f"a broadcast did not end within {deadline_s:g} s")


def _is_true_within(deadline_s: float, is_true: Callable[[], bool]) -> bool:
    """Return whether it became true in time; asks every 0.2 ms."""
    deadline = time.monotonic() + deadline_s
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0002)
    return True


def _torch_distributed() -> Any:
    import torch.distributed

    return torch.distributed
