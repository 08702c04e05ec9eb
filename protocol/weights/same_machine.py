"""A weight push between processes of one machine: the sender passes a bucket's address instead of its bytes.

On a GPU a receiver copies from the sender's memory on the same card (CUDA IPC). On a CPU the sender copies its bucket
into kernel memory and passes the descriptor. Both sides meet on an abstract socket with an unguessable name and accept
only processes of their own user. One sender waits for all receivers of a push (`send`), or a sender on each card admits
the receivers of its card at any time (`admit`). Torch is imported inside functions only.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import socket
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from protocol.weights.group import PEER_LOST, PeerLostError

if TYPE_CHECKING:
    from torch import Tensor

_HEAD = struct.Struct("<Q")
_TAKEN = b"\x01"
_MAX_HANDLE_BYTES = 4096  # CUDA's handle and its event are 64 bytes each
_NAME = "\0sluice-weights-{}"  # Linux keeps such names in memory: a killed process leaves no file


def listen_here(name: str) -> socket.socket:
    """Return a listening socket for processes of this machine. name: passed to `SameMachineGroup.receive`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_NAME.format(name))
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener


def card_address(name: str, number: int) -> str:
    """Return the name at which the processes on this process's card meet.

    name: of all cards of a run. number: stands for the card on CPUs. A GPU has another number in each process, so that
    its own identity is taken.
    """
    import torch

    has_card = torch.cuda.is_available()
    return f"{name}-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid if has_card else number}"


class SameMachineGroup:
    """The sender or one of the receivers. Every operation fails within `deadline_s`, and at once when a peer is gone.

    device: "cuda" when torch has a GPU, which must be the same for the whole group, else "cpu".
    """

    def __init__(self, peers: Sequence[socket.socket], deadline_s: float, *, is_sender: bool) -> None:
        """peers: connections to all receivers, or to the sender; taken over."""
        import torch

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._peers = list(peers)
        self._is_sender = is_sender
        self._shared = _KernelMemory() if is_sender and self.device == "cpu" else None
        for peer in self._peers:
            peer.settimeout(deadline_s)

    @classmethod
    def send(cls, listener: socket.socket, num_receivers: int, deadline_s: float) -> SameMachineGroup:
        """Return the sender's half once all receivers have connected. Raises: TimeoutError."""
        peers: list[socket.socket] = []
        listener.settimeout(deadline_s)
        try:
            while len(peers) < num_receivers:
                peer, _ = listener.accept()
                if _is_own(peer):
                    peers.append(peer)
                else:
                    peer.close()
            return cls(peers, deadline_s, is_sender=True)
        except BaseException:
            for peer in peers:
                peer.close()
            raise

    @classmethod
    def admit(cls, listener: socket.socket, deadline_s: float) -> tuple[str, SameMachineGroup]:
        """Return the next receiver that gives a server's name, and the sender's half for it alone.

        The receiver waits for `welcome`. Blocks until one comes. Raises: OSError when the listener is closed.
        """
        while True:
            peer, _ = listener.accept()
            with contextlib.suppress(OSError, ValueError):
                peer.settimeout(deadline_s)
                if _is_own(peer) and (length := _HEAD.unpack(_read(peer, _HEAD.size))[0]) <= _MAX_HANDLE_BYTES:
                    server = _read(peer, length).decode()
                    return server, cls([peer], deadline_s, is_sender=True)
            peer.close()

    @classmethod
    def receive(cls, name: str, deadline_s: float, server: str = "") -> SameMachineGroup:
        """Return a receiver's half. server: given to a sender that admits.

        Raises: ConnectionError when no sender of this user listens on this machine.
        """
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer.settimeout(deadline_s)
            peer.connect(_NAME.format(name))
            if not _is_own(peer):
                raise ConnectionError(f"{name} belongs to another user")
            if server:
                peer.sendall(_HEAD.pack(len(server.encode())) + server.encode())
                _read(peer, len(_TAKEN))
            return cls([peer], deadline_s, is_sender=False)
        except OSError as error:
            peer.close()
            raise ConnectionError(f"no learner of this machine listens for its weight push: {error}") from error

    def welcome(self) -> None:
        """Let an admitted receiver go on."""
        with contextlib.suppress(OSError):  # it is gone
            for peer in self._peers:
                peer.sendall(_TAKEN)

    def broadcast(self, flat: Tensor) -> None:
        """Copy `flat` to every receiver; returns when all have it. Raises: PeerLostError."""
        try:
            if self._is_sender:
                self._send(flat)
            else:
                self._receive(flat)
        except OSError as error:  # a timeout is one too
            raise PeerLostError(PEER_LOST, str(error)) from error

    def close(self) -> None:
        """Close the group: calls that wait in it, in any process, fail at once."""
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()

    def _send(self, flat: Tensor) -> None:
        if self._shared is None:
            handle, descriptors = _cuda_handle(flat), []
        else:
            handle, descriptors = b"", [self._shared.put(flat)]
        message = _HEAD.pack(len(handle)) + handle
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        for peer in self._peers:
            # A peer that has the whole message may have closed already: even an empty write would then fail.
            if (sent := peer.sendmsg([message], ancillary)) < len(message):
                peer.sendall(message[sent:])
        for peer in self._peers:
            _read(peer, len(_TAKEN))

    def _receive(self, flat: Tensor) -> None:
        (peer,) = self._peers
        head, descriptors, _, _ = socket.recv_fds(peer, _HEAD.size, 1)
        try:
            if not head:
                raise ConnectionError("the connection was closed")
            (length,) = _HEAD.unpack(head + _read(peer, _HEAD.size - len(head)))
            if length > _MAX_HANDLE_BYTES:
                raise ConnectionError(f"a handle of {length} bytes")
            handle = _read(peer, length)
            if self.device == "cuda":
                _copy_from_card(handle, flat)
            elif descriptors:
                _copy_from_kernel(descriptors[0], flat)
            else:  # the kernel discards a descriptor at the limit of open files
                raise ConnectionError("the bucket did not arrive: this process cannot open another file (ulimit -n)")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        peer.sendall(_TAKEN)


class _KernelMemory:
    """Memory without a file, freed with its last process; as large as the largest bucket so far."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("sluice-weights", os.MFD_CLOEXEC)
        self._map: mmap.mmap | None = None

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def put(self, flat: Tensor) -> int:
        """Copy the bytes to its start and return its descriptor."""
        import torch

        num_bytes = flat.numel()
        if self._map is None or len(self._map) < num_bytes:
            os.ftruncate(self._descriptor, num_bytes)
            self._map = mmap.mmap(self._descriptor, num_bytes)
        if num_bytes:
            torch.frombuffer(self._map, dtype=torch.uint8, count=num_bytes).copy_(flat)
        return self._descriptor


def _copy_from_kernel(descriptor: int, flat: Tensor) -> None:
    import torch

    if (size := os.fstat(descriptor).st_size) < flat.numel():
        raise ConnectionError(f"a bucket of {size} bytes, expected {flat.numel()}")
    if flat.numel():
        # Private and therefore writable, as torch requires; nothing is written.
        mapped = mmap.mmap(descriptor, flat.numel(), flags=mmap.MAP_PRIVATE)
        flat.copy_(torch.frombuffer(mapped, dtype=torch.uint8, count=flat.numel()))


def _cuda_handle(flat: Tensor) -> bytes:
    """Return torch's handle of `flat`, by which another process opens it on the same card."""
    import torch

    torch.cuda.synchronize()
    storage: Any = flat.untyped_storage()
    return msgspec.msgpack.encode([flat.numel(), flat.storage_offset(), *storage._share_cuda_()])


def _copy_from_card(handle: bytes, flat: Tensor) -> None:
    import torch

    num_bytes, start, _, *shared = msgspec.msgpack.decode(handle)
    if num_bytes != flat.numel():
        raise ConnectionError(f"a bucket of {num_bytes} bytes, expected {flat.numel()}")
    # A card may have another number in each process, so the sender's is left out.
    storage = torch.UntypedStorage._new_shared_cuda(flat.device.index or 0, *shared)
    sent = torch.empty(0, dtype=torch.uint8, device=flat.device).set_(storage)
    flat.copy_(sent[start : start + num_bytes])
    torch.cuda.synchronize()


def _read(peer: socket.socket, num_bytes: int) -> bytes:
    """Return exactly num_bytes bytes. Raises: ConnectionError when the peer closed; TimeoutError."""
    read = b""
    while len(read) < num_bytes:
        if not (more := peer.recv(num_bytes - len(read))):
            raise ConnectionError("the connection was closed")
        read += more
    return read


def _is_own(peer: socket.socket) -> bool:
    """Return whether a process of this user is at the other end."""
    ids = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", ids)[1] == os.geteuid())
