"""The bytes of one push, which a thread receives. This file does not import vLLM."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch

from protocol.weights.digest import WeightDigest
from protocol.weights.wire import Bucket, bucket_num_bytes

T = TypeVar("T")


class ReceivedPush:
    """The digest of the buckets that one push sent to a worker.

    is_confirmed: whether the digest equals the learner's.
    """

    def __init__(self) -> None:
        self.digest: str | None = None
        self.is_confirmed = False

    def buckets(
        self, plan: Sequence[Bucket], device: str | torch.device, broadcast: Callable[[torch.Tensor], None]
    ) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Yield each bucket with its bytes, uint8, as they arrive."""
        digest = WeightDigest(plan)
        for bucket in plan:
            flat = torch.empty(bucket_num_bytes(bucket), dtype=torch.uint8, device=device)
            broadcast(flat)
            digest.add(flat)
            yield bucket, flat
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
