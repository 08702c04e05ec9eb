"""The run's command, which waits for ranks and servers that stand still."""

import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from learner.run.rank_watch import RankWatch
from learner.run.server import RunServer
from protocol.settings.run_spec import run_spec
from protocol.settings.settings import Settings
from tests.chaos.hanging.way import Way, fork, raised_by, stop, timed

_RANK_SILENCE_S = 3.0
_SERVER_SILENCE_S = 2.0
_POLL_S = 0.1


def command_ways() -> list[Way]:
    rank = ("learner rank 1: ", "run's command", f"for {_RANK_SILENCE_S:g} s", "last: training step 7")
    return [
        Way("rank_stopped_while_it_trains", _RANK_SILENCE_S, rank, partial(_rank, "stopped")),
        Way("rank_stalls_while_it_trains", _RANK_SILENCE_S, rank, partial(_rank, "stalls")),
        Way("server_stopped_under_a_run", _SERVER_SILENCE_S, ("server-7", "has not answered for 2 s"), _server),
    ]


class _Asked:
    """A process that answers through its pipe, one question at a time, as a rank or a server is asked through Ray."""

    def __init__(self, name: str, answer: Any) -> None:
        self.name = name
        self.num_answers = 0
        self.process, self._pipe = fork(_answer, answer)

    def ask(self, *question: Any) -> "_Asked":
        self._pipe.send(question)
        return self

    def is_done(self, reference: Any) -> bool:
        return reference._pipe.poll()

    def result(self, reference: Any, name: str) -> Any:
        reference.num_answers += 1
        return reference._pipe.recv()


def _answer(pipe: Connection, answer: Any) -> None:
    while True:
        (question, *_) = pipe.recv()
        if question == "stall":
            threading.Event().wait()
        pipe.send(answer)


def _rank(fault: str, folder: Path) -> tuple[str, float]:
    ranks = [_Asked(f"learner rank {number}", ("training step 7", False)) for number in range(2)]
    watch = RankWatch(ranks, ranks[0].is_done, ranks[0].result, _RANK_SILENCE_S)
    while not all(rank.num_answers for rank in ranks):
        watch.poll()
        time.sleep(_POLL_S)
    if fault == "stopped":
        stop(ranks[1].process.pid)
    else:
        ranks[1].ask("stall")
    return timed(lambda: raised_by(lambda: _poll_for_ever(watch)))


def _poll_for_ever(watch: RankWatch) -> None:
    while True:
        watch.poll()
        time.sleep(_POLL_S)


def _server(folder: Path) -> tuple[str, float]:
    server = _Asked("server-7", {"run": {"run_id": "run-A", "incarnation": 1, "ended": None}})

    class Calls:
        def ask(self, name: str, method: str, *arguments: Any) -> Any:
            return server.ask(method)

        is_done = staticmethod(server.is_done)
        result = staticmethod(server.result)

    spec = run_spec(Settings(), "run-A", 1, "tcp://127.0.0.1:1")
    calls: Any = Calls()
    watch = RunServer("server-7", spec, calls, lambda runs: [], silence_s=_SERVER_SILENCE_S)
    watch.begin_serving()
    watch.poll()
    stop(server.process.pid)

    def silence() -> str:
        while not (messages := watch.poll()):
            time.sleep(_POLL_S)
        return messages[0]

    return timed(silence)
