"""The coordinator's thread: it owns the ROUTER socket, decodes messages, and sends the coordinator's answers.

Other threads use `submit` and `status` only.
"""

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from learner.coordinator.coordinator import Coordinator
from learner.live.status import RunStatus
from protocol.errors import FrameError
from protocol.wire.channel import RouterChannel
from protocol.wire.codec import Decoder, Limits, encode, read_refused_sample
from protocol.wire.messages import Message, ToCoordinator

_log = logging.getLogger(__name__)
_LONGEST_WAIT_S = 0.05
_LONGEST_RECEIVING_S, _LONGEST_RECEIVING_BUSY_S = 0.01, 0.002
_STATUS_EVERY_S = 0.5


def tune_garbage_collector() -> None:
    """Exclude what this process has so far from collections of garbage, and make complete ones rare.

    A complete collection walks every trajectory that is out: it would stop the loop for 0.05 s at 40,000.
    """
    gc.freeze()
    gc.set_threshold(700, 10, 100)


class CoordinatorLoop:
    """`failure`: the error that ended the thread; the process must end then."""

    def __init__(self, coordinator: Coordinator, channel: RouterChannel) -> None:
        self._coordinator = coordinator
        self._channel = channel
        self._limits = Limits()
        self._decoder: Decoder[Message] = Decoder(ToCoordinator, self._limits)
        self._commands: queue.SimpleQueue[Callable[[Coordinator], None]] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="coordinator")
        self.status: RunStatus = coordinator.status()
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def submit(self, command: Callable[[Coordinator], None]) -> None:
        """Run a command in the owning thread, at its next turn."""
        self._commands.put(command)

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop the thread and close the socket. Raises TimeoutError when the thread does not end."""
        self._is_closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the coordinator's thread did not end within {timeout_s:g} s")

    def _run(self) -> None:
        try:
            status_at = 0.0
            while self._coordinator.is_ending_step or not self._is_closing.is_set():
                self._receive_all()
                self._run_commands()
                self._coordinator.advance(time.monotonic())
                # A rank learns that its step is recorded from _send_all. The status has the step then.
                if self._coordinator.step != self.status.step or time.monotonic() - status_at > _STATUS_EVERY_S:
                    self.status, status_at = self._coordinator.status(), time.monotonic()
                self._send_all()
        except BaseException as error:
            self.failure = error
            _log.exception("the coordinator's loop ended")
        finally:
            self._channel.close()

    def _receive_all(self) -> None:
        """Receive the arrived messages, for a limited time so that a flood does not block the loop's other work.

        Waits for the first one unless the coordinator has more to do.
        """
        is_busy = self._coordinator.has_more_to_do
        received = self._channel.receive(0.0 if is_busy else _LONGEST_WAIT_S)
        until = time.monotonic() + (_LONGEST_RECEIVING_BUSY_S if is_busy else _LONGEST_RECEIVING_S)
        while received is not None:
            self._receive(*received)
            received = self._channel.receive(0.0) if time.monotonic() < until else None

    def _receive(self, peer: bytes, frames: Sequence[bytes]) -> None:
        name = peer.decode("utf-8", errors="replace")
        try:
            message, buffers = self._decoder.decode(frames)
        except FrameError as error:
            self._coordinator.refuse(name, error, sample=read_refused_sample(frames, self._limits))
            return
        self._coordinator.receive(name, message, buffers, time.monotonic())

    def _run_commands(self) -> None:
        while not self._commands.empty():
            self._commands.get()(self._coordinator)

    def _send_all(self) -> None:
        for peer, message, buffers in self._coordinator.take_outgoing():
            if self._channel.send(peer.encode(), encode(message, buffers)):
                continue
            self._coordinator.on_undeliverable(peer, message, time.monotonic())
