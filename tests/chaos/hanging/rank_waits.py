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
from learner.rank.solo_work import SoloWork
from tests.chaos.hanging.way import Way, fork, raised_by, timed

_LIMIT_S = 4.0
_HEARD_S = 0.5  # by then the waiting rank has heard what rank 0 is at


def rank_ways() -> list[Way]:
    solo = ("learner rank 0: ", "rank 1", "write the checkpoint", "last: sealed 3 of 9 files")
    return [
        Way("rank_0_stopped_while_it_saves", _LIMIT_S, solo, partial(_solo, "stopped")),
        Way("rank_0_stalls_while_it_saves", _LIMIT_S, solo, partial(_solo, "stalls")),
        Way("rank_0_killed_while_it_saves", _LIMIT_S, solo, partial(_solo, "killed")),
    ]


def _solo(fault: str, folder: Path) -> tuple[str, float]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process, pipe = fork(_rank_0, port)
    store = join_world(1, 2, "127.0.0.1", port, _LIMIT_S)
    pipe.recv()
    if fault != "stalls":
        number = signal.SIGSTOP if fault == "stopped" else signal.SIGKILL
        threading.Timer(_HEARD_S, os.kill, (process.pid, number)).start()
    work = SoloWork(store, 1, _LIMIT_S)
    return timed(lambda: raised_by(lambda: work.do("write the checkpoint", lambda tell: None)))


def _rank_0(pipe: Connection, port: int) -> None:
    store = join_world(0, 2, "127.0.0.1", port, _LIMIT_S)

    def stand(tell: Callable[[str], None]) -> None:
        tell("sealed 3 of 9 files")
        pipe.send("saving")
        threading.Event().wait()

    SoloWork(store, 0, _LIMIT_S).do("write the checkpoint", stand)
