"""A learner rank that waits for another: for rank 0's work alone, in a collective, or at the meeting of all."""

import os
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from learner.models.world import join_world
from learner.rank.solo_work import SoloWork, Store
from tests.chaos.hanging.way import Way, fork, raised_by, timed

_LIMIT_S = 4.0
_MEET_S = 60.0
_LAST_WORDS = "sealed 3 of 9 files"


def rank_ways() -> list[Way]:
    solo = ("learner rank 0: ", "rank 1", "write the checkpoint", f"last: {_LAST_WORDS}")
    return [
        Way("rank_0_stopped_while_it_saves", _LIMIT_S, solo, partial(_solo, "stopped")),
        Way("rank_0_stalls_while_it_saves", _LIMIT_S, solo, partial(_solo, "stalls")),
        Way("rank_0_killed_while_it_saves", _LIMIT_S, solo, partial(_solo, "killed")),
    ]


def _solo(fault: str, folder: Path) -> tuple[str, float]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process, pipe = fork(_rank_0, port)
    store = _HearingStore(join_world(1, 2, "127.0.0.1", port, _MEET_S))
    pipe.recv()

    def strike() -> None:
        store.has_heard.wait()
        os.kill(process.pid, signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)

    if fault != "stalls":
        threading.Thread(target=strike, daemon=True).start()
    work = SoloWork(store, 1, _LIMIT_S)
    return timed(lambda: raised_by(lambda: work.do("write the checkpoint", lambda tell: None)))


class _HearingStore:
    """The world's store, and whether the waiting rank has heard from it what rank 0 is at."""

    def __init__(self, store: Store) -> None:
        self.has_heard = threading.Event()
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        if value == _LAST_WORDS.encode():
            self.has_heard.set()
        return value

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)


def _rank_0(pipe: Connection, port: int) -> None:
    store = join_world(0, 2, "127.0.0.1", port, _MEET_S)

    def stand(tell: Callable[[str], None]) -> None:
        tell(_LAST_WORDS)
        pipe.send("saving")
        threading.Event().wait()

    SoloWork(store, 0, _LIMIT_S).do("write the checkpoint", stand)
