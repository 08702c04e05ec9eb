"""What rank 0 does alone while the other ranks wait: for as long as it makes progress, however long that takes.

A collective has one limit, and work such as hashing a checkpoint of hundreds of GB takes longer. So the others do not
wait in a collective, but ask the world's store what rank 0 is at.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from learner.checkpoint.sealed_files import Tell
from protocol.errors import NeighbourError

T = TypeVar("T")
_POLL_S = 0.1
_TELL_EVERY_S = 0.5


class Store(Protocol):
    """The part of a torch.distributed.Store that is needed here; no call waits for another rank."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class SoloWork:
    """One of these on every rank; `do` is called by all ranks, in the same order.

    limit_s: longest time without anything new from rank 0 (`learner.rank_timeout_s`).
    """

    def __init__(self, store: Store, rank: int, limit_s: float) -> None:
        self._store = store
        self._rank = rank
        self._limit_s = limit_s
        self._num_done = 0

    def do(self, what: str, work: Callable[[Tell], object]) -> None:
        """Have rank 0 do the work; returns on every rank when it is done.

        Raises: on rank 0 what the work raised; elsewhere NeighbourError when rank 0 is gone or tells nothing new for
        limit_s. The others are not told of a failure: rank 0's own error, which says more, ends the run.
        """
        key = f"solo-work/{self._num_done}"
        self._num_done += 1
        if self._rank == 0:
            work(_Teller(self._store, key).tell)
            self._store.set(f"{key}/done", "")
        else:
            self._wait(what, key)

    def _wait(self, what: str, key: str) -> None:
        listener = _Listener(self._store, key)
        while not listener.has_ended.wait(_POLL_S):
            if time.monotonic() - listener.told_at > self._limit_s:
                problem = f"told nothing new for {self._limit_s:g} s (learner.rank_timeout_s) while rank {self._rank}"
                raise NeighbourError("learner rank 0", f"{problem} waited for it to {what}; last: {listener.told}")
        if listener.error is not None:
            problem = f"is gone: it was to {what} while rank {self._rank} waited; last: {listener.told}"
            raise NeighbourError("learner rank 0", f"{problem} ({listener.error})") from None


class _Listener:
    """Asks the store what rank 0 is at, in a thread: no question to a store whose process stands still ever ends."""

    def __init__(self, store: Store, key: str) -> None:
        self.told = "nothing yet"
        self.told_at = time.monotonic()
        self.error: RuntimeError | None = None  # torch's, when the store's process has ended: it is rank 0's
        self.has_ended = threading.Event()  # rank 0 is done, or gone
        self._store = store
        self._key = key
        threading.Thread(target=self._run, name="solo-work", daemon=True).start()

    def _run(self) -> None:
        try:
            while not self._store.check([f"{self._key}/done"]):
                if self._store.check([self._key]) and (now := self._store.get(self._key).decode()) != self.told:
                    self.told, self.told_at = now, time.monotonic()
                time.sleep(_POLL_S)
        except RuntimeError as error:
            self.error = error
        self.has_ended.set()


class _Teller:
    """Puts into the store what the work is at, at most twice a second. May be called from several threads."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._told_at = float("-inf")
        self._lock = threading.Lock()

    def tell(self, phase: str) -> None:
        with self._lock:
            if time.monotonic() - self._told_at >= _TELL_EVERY_S:
                self._told_at = time.monotonic()
                self._store.set(self._key, phase)
