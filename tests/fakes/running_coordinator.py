"""A real coordinator behind a real encrypted socket, in this process: what chaos commands and benchmarks talk to."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from learner.coordinator.coordinator import Coordinator
from learner.coordinator.loop import CoordinatorLoop
from learner.coordinator.steps.record import RunRecord
from learner.data.prompts import Prompt
from learner.ledger.ledger import Ledger
from learner.ledger.snapshots import LedgerCopies, Work, run_in_thread
from protocol.settings.settings import Settings
from protocol.wire.channel import KeyPair, RouterChannel

RUN_ID = "r1"
STAMP: dict[str, Any] = {"run_id": RUN_ID, "incarnation": 1}


@dataclass(frozen=True)
class Place:
    """What an allowed peer must know to reach a coordinator. It can be handed to another process."""

    address: str
    coordinator_key: bytes
    peer_keys: KeyPair

    def connect(self, context: "zmq.Context[Any]", name: str) -> "zmq.Socket[Any]":
        """Return a new DEALER socket of a peer of this name, on its way to the coordinator."""
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        socket.identity = name.encode()
        socket.curve_publickey, socket.curve_secretkey = self.peer_keys.public, self.peer_keys.secret
        socket.curve_serverkey = self.coordinator_key
        socket.connect(self.address)
        return socket


class RunningCoordinator:
    """`coordinator`, `loop` and `ledger` of a run that has just begun, and the place where it is reached."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, dict[str, Any]],
        num_prompts: int,
        start_copy: Callable[[Work], None],
        last_step: int,
    ) -> None:
        keys, peer_keys = KeyPair(*zmq.curve_keypair()), KeyPair(*zmq.curve_keypair())
        self.ledger = Ledger(folder / "ledger.sqlite")
        prompts = [Prompt(f"p{i}", f"question {i}", f"answer {i}", {}) for i in range(num_prompts)]
        self.copies = LedgerCopies(self.ledger.begin_copy, start_copy)
        self.coordinator = Coordinator(
            Settings.model_validate(settings),
            RUN_ID,
            self.ledger,
            prompts,
            [],
            RunRecord(folder, 0),
            last_step=last_step,
            copies=self.copies,
        )
        channel = RouterChannel("127.0.0.1", keys, [peer_keys.public])
        self.place = Place(channel.address, keys.public, peer_keys)
        self.loop = CoordinatorLoop(self.coordinator, channel)


@contextmanager
def running_coordinator(
    folder: Path,
    settings: dict[str, dict[str, Any]],
    num_prompts: int = 1000,
    start_copy: Callable[[Work], None] = run_in_thread,
    last_step: int = 0,
) -> Iterator[RunningCoordinator]:
    """Yield a coordinator at work; it is closed afterwards, and what ended its loop before is raised.

    last_step: of the checkpoint that this start goes on from.
    """
    run = RunningCoordinator(folder, settings, num_prompts, start_copy, last_step)
    run.loop.start()
    try:
        yield run
    finally:
        run.loop.close()
        run.copies.close()
        run.ledger.close()
    if run.loop.failure is not None:
        raise run.loop.failure
