"""Seconds until 512 encrypted peers that connect at once have each heard from the coordinator.

    python -m tests.benchmarks.many_peers [--seed N] [--short] [--peers N]

The peers are DEALER sockets of another process; each says `Hello` and waits for `Done` from a running coordinator with
its ledger. Several rounds, each with a new coordinator. holds: the median round took at most 30 s. --short: one round,
which may take longer, since the machine may be busy; no peer is left without its answer for 120 s.
"""

import resource
import statistics
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import zmq

from protocol.wire import messages as m
from protocol.wire.codec import Decoder, encode
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.running_coordinator import STAMP, Place, running_coordinator

TARGET_S = 30.0
_GIVE_UP_S = 120.0


def main() -> int:
    chosen = options(__doc__, peers=512)
    seconds = []
    for _ in range(1 if chosen.short else 5):
        seconds.append(greet_all(chosen.peers))
        print(f"{chosen.peers} peers were answered within {seconds[-1]:.2f} s", flush=True)
    median_s = statistics.median(seconds)
    holds = chosen.short or median_s <= TARGET_S
    return conclude("many_peers", holds, peers=chosen.peers, median_s=median_s, slowest_s=max(seconds))


def greet_all(num_peers: int) -> float:
    """Return the seconds from the first connection to the last answer. Raises TimeoutError when one is missing."""
    allow_descriptors()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_coordinator(Path(folder), {}) as run,
        get_context("spawn").Pool(1) as processes,
    ):
        seconds: float = processes.apply(connect_all, (run.place, num_peers))
    return seconds


def connect_all(place: Place, num_peers: int) -> float:
    """Connect peers and return the seconds until each has its answer. Runs in a process of its own."""
    allow_descriptors()
    decoder: Decoder[m.Message] = Decoder(m.ToServer | m.Done)
    with zmq.Context() as context:
        context.max_sockets = num_peers + 10
        started = time.monotonic()
        poller = zmq.Poller()
        for i in range(num_peers):
            socket = place.connect(context, f"s{i}")
            socket.send_multipart(encode(m.Hello(**STAMP, server=f"s{i}", policy_version=None)))
            poller.register(socket, zmq.POLLIN)
        num_missing = num_peers
        while num_missing:
            if time.monotonic() - started > _GIVE_UP_S:
                raise TimeoutError(f"{num_missing} of {num_peers} peers had no answer after {_GIVE_UP_S:g} s")
            for socket, _ in poller.poll(1000):
                message, _buffers = decoder.decode(socket.recv_multipart())
                num_missing -= isinstance(message, m.Done)
        seconds = time.monotonic() - started
        for socket, _ in list(poller.sockets):
            socket.close()
    return seconds


def allow_descriptors() -> None:
    """Let this process open as many descriptors as the system lets it: a peer takes two or three."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    sys.exit(main())
