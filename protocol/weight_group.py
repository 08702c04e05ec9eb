"""The gloo broadcast group of a weight push: rank 0 is the learner, the others are the workers of one rollout server.

Both halves build it through `GlooGroup`, so that rendezvous, devices and deadlines cannot drift apart. Nothing listens
beyond the address that was asked for: torch's own defaults would open the store on every interface.
Torch is imported inside functions only.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store


def open_store(address: str, deadline_s: float) -> tuple[Store, int]:
    """Return a store that listens on `address` alone, and the port the system chose for it."""
    from torch.distributed import TCPStore

    listener = socket.create_server((address, 0))
    port = int(listener.getsockname()[1])
    store = TCPStore(
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
    """Return a client of the store that the learner opened. Raises: RuntimeError when it does not answer in time."""
    from torch.distributed import TCPStore

    return TCPStore(address, port, None, False, timeout=timedelta(seconds=deadline_s), wait_for_workers=False)


class GlooGroup:
    """A group in which rank 0 broadcasts; every operation fails within `deadline_s`, at once when a peer is gone.

    key: names the group inside the store; each rebuilt group needs a new one.
    """

    def __init__(self, store: Store, key: str, rank: int, world_size: int, address: str, deadline_s: float) -> None:
        """Blocks until all ranks have met. Raises: RuntimeError after `deadline_s`."""
        from torch.distributed import PrefixStore, ProcessGroupGloo

        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=deadline_s)
        options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(address))]
        options._threads = 1
        self._group = ProcessGroupGloo(PrefixStore(key, store), rank, world_size, options)

    def broadcast(self, flat: Tensor) -> None:
        """Send `flat` from rank 0 into everyone else's `flat`. Raises: RuntimeError naming gloo's reason."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([flat], options).wait()


def _own_address(peer: str) -> str:
    """Return this machine's address on the route to `peer`, without sending anything."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
