"""Work of rank 0 while the other ranks wait, for as long as it makes progress.

A collective has one time limit, and hashing a checkpoint of hundreds of GB takes longer. So the other ranks poll the
progress of rank 0 in the world's store.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from learner.checkpoint.sealed_files import Report
from protocol.errors import NeighbourError

_POLL_S = 0.1
_REPORT_EVERY_S = 0.5


class Store(Protocol):
    """The part of a torch.distributed.Store that is needed here; no call waits for another rank."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class SoloWork:
    """One object on every rank; all ranks call `do` in the same order."""

    def __init__(self, store: Store, rank: int, limit_s: float) -> None:
        """limit_s: longest time without progress of rank 0 (`learner.rank_timeout_s`)."""
        self._store = store
        self._rank = rank
        self._limit_s = limit_s
        self._num_done = 0

    def do(self, task: str, work: Callable[[Report], object]) -> None:
        """Run the work on rank 0; returns on every rank when it is done. task: a verb phrase for errors.

        Raises: on rank 0 the error of the work; elsewhere NeighbourError when rank 0 is gone or makes no progress for
        limit_s. A failure is not sent to the other ranks: rank 0's own error ends the run.
        """
        key = f"solo-work/{self._num_done}"
        self._num_done += 1
        if self._rank == 0:
            work(_ProgressWriter(self._store, key).report)
            self._store.set(f"{key}/done", "")
        else:
            self._wait(task, key)

    def _wait(self, task: str, key: str) -> None:
        progress = _ProgressReader(self._store, key)
        while not progress.has_ended.wait(_POLL_S):
            if time.monotonic() - progress.changed_at > self._limit_s:
                problem = f"made no progress for {self._limit_s:g} s (learner.rank_timeout_s) while rank {self._rank}"
                raise NeighbourError("learner rank 0", f"{problem} waited for it to {task}; last: {progress.phase}")
        if progress.error is not None:
            problem = f"is gone: rank {self._rank} waited for it to {task}; last: {progress.phase}"
            raise NeighbourError("learner rank 0", f"{problem} ({progress.error})") from None


class _ProgressReader:
    """Polls the store in a thread: a call to the store of a process that hangs never returns."""

    def __init__(self, store: Store, key: str) -> None:
        self.phase = "nothing yet"
        self.changed_at = time.monotonic()
        self.error: RuntimeError | None = None  # error of torch when the store's process, rank 0, has ended
        self.has_ended = threading.Event()  # set when rank 0 is done, or gone
        self._store = store
        self._key = key
        threading.Thread(target=self._run, name="solo-work", daemon=True).start()

    def _run(self) -> None:
        try:
            while not self._store.check([f"{self._key}/done"]):
                if self._store.check([self._key]) and (phase := self._store.get(self._key).decode()) != self.phase:
                    self.phase, self.changed_at = phase, time.monotonic()
                time.sleep(_POLL_S)
        except RuntimeError as error:
            self.error = error
        self.has_ended.set()


class _ProgressWriter:
    """Writes the work's phase into the store, at most twice a second. Several threads may call it."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._reported_at = float("-inf")
        self._lock = threading.Lock()

    def report(self, phase: str) -> None:
        with self._lock:
            if time.monotonic() - self._reported_at >= _REPORT_EVERY_S:
                self._reported_at = time.monotonic()
                self._store.set(self._key, phase)
