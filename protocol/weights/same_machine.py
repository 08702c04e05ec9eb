"""A weight push between processes of one machine: what travels is where a bucket lies, not the bucket.

On a GPU a receiver opens the sender's memory of the same card (CUDA IPC) and copies from it. On a CPU the sender copies
its bucket into memory of the kernel's, whose descriptor it passes, and a receiver copies from there. Both sides meet on
a socket without a file, under a name that cannot be guessed, and talk to processes of their own user alone. Torch is
imported inside functions only.
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

from protocol.weights.group import PEER_LOST

if TYPE_CHECKING:
    from torch import Tensor

_HEAD = struct.Struct("<Q")
_TAKEN = b"\x01"
_MAX_HANDLE_BYTES = 4096  # CUDA's handle and its event are 64 bytes each
_NAME = "\0sluice-weights-{}"  # Linux keeps names that begin so in memory: a killed process leaves nothing


def listen_here(name: str) -> socket.socket:
    """Return a socket that this machine's processes reach by this name."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_NAME.format(name))
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener


class SameMachineGroup:
    """The sender, or one of the receivers. Every operation fails within `deadline_s`, at once when a peer is gone.

    device: "cuda" where torch sees a GPU, which has to be one for all of the group, else "cpu".
    """

    def __init__(self, peers: Sequence[socket.socket], deadline_s: float, *, is_sender: bool) -> None:
        """peers: connections to all receivers, or the one to the sender; taken over."""
        import torch

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._peers = list(peers)
        self._is_sender = is_sender
        self._shared = _KernelMemory() if is_sender and self.device == "cpu" else None
        for peer in self._peers:
            peer.settimeout(deadline_s)

    @classmethod
    def send(cls, listener: socket.socket, num_receivers: int, deadline_s: float) -> SameMachineGroup:
        """Return the sender's half once so many receivers have come. Raises: TimeoutError when they do not."""
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
    def receive(cls, name: str, deadline_s: float) -> SameMachineGroup:
        """Return a receiver's half. Raises: ConnectionError when no process of this machine and user sends there."""
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer.settimeout(deadline_s)
            peer.connect(_NAME.format(name))
            if not _is_own(peer):
                raise ConnectionError(f"{name} belongs to another user")
            return cls([peer], deadline_s, is_sender=False)
        except OSError as error:
            peer.close()
            raise ConnectionError(f"no learner of this machine is at the place of its weight push: {error}") from error

    def broadcast(self, flat: Tensor) -> None:
        """Have every receiver copy `flat`; returns when all have. Raises: ConnectionError, PEER_LOST and why."""
        try:
            if self._is_sender:
                self._send(flat)
            else:
                self._receive(flat)
        except OSError as error:  # a time that ran out is one too
            raise ConnectionError(f"{PEER_LOST}: {error}") from error

    def close(self) -> None:
        """Give the group up: who waits in it, in this process or another, fails at once."""
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
            # One that has all of it may be done and gone already: even a write of nothing would fail then.
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
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        peer.sendall(_TAKEN)


class _KernelMemory:
    """Memory without a file, which ends with its last process; as large as the largest bucket so far."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("sluice-weights", os.MFD_CLOEXEC)
        self._map: mmap.mmap | None = None

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def put(self, flat: Tensor) -> int:
        """Copy flat bytes to the front of it and return its descriptor."""
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
        raise ConnectionError(f"a bucket of {size} bytes where {flat.numel()} were to come")
    if flat.numel():
        # Private and so writable, as torch wants it; nothing is written.
        mapped = mmap.mmap(descriptor, flat.numel(), flags=mmap.MAP_PRIVATE)
        flat.copy_(torch.frombuffer(mapped, dtype=torch.uint8, count=flat.numel()))


def _cuda_handle(flat: Tensor) -> bytes:
    """Return where `flat` lies on its card, for another process of it, in torch's own terms."""
    import torch

    torch.cuda.synchronize()
    storage: Any = flat.untyped_storage()
    return msgspec.msgpack.encode([flat.numel(), flat.storage_offset(), *storage._share_cuda_()])


def _copy_from_card(handle: bytes, flat: Tensor) -> None:
    import torch

    num_bytes, start, _, *shared = msgspec.msgpack.decode(handle)
    if num_bytes != flat.numel():
        raise ConnectionError(f"a bucket of {num_bytes} bytes where {flat.numel()} were to come")
    # The card has a number of its own in each process: the sender's is left out.
    storage = torch.UntypedStorage._new_shared_cuda(flat.device.index or 0, *shared)
    sent = torch.empty(0, dtype=torch.uint8, device=flat.device).set_(storage)
    flat.copy_(sent[start : start + num_bytes])
    torch.cuda.synchronize()


def _read(peer: socket.socket, num_bytes: int) -> bytes:
    """Return exactly so many bytes. Raises: ConnectionError when the peer closed; TimeoutError."""
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
