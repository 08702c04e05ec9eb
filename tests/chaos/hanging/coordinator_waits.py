"""A rank that waits for the coordinator, which stands still, is out of reach, is gone, or has nothing to give."""

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from learner.ledger.snapshots import run_in_thread
from learner.rank.coordinator_client import CoordinatorClient, Patience
from protocol.wire import messages as m
from protocol.wire.channel import DealerChannel
from protocol.wire.codec import encode
from tests.chaos.hanging.way import Way, fork, raised_by, stop, timed
from tests.fakes.cuttable_link import CuttableLink
from tests.fakes.running_coordinator import RUN_ID, STAMP, Place, running_coordinator

_ANSWER_S = 4.0
_BATCH_S = 2.0
_COPY_S = 2.0
_PATIENCE = Patience(retry_s=2.0, answer_s=_ANSWER_S, copy_s=_COPY_S)
_SETTINGS: dict[str, dict[str, Any]] = {
    "learner": {"groups_per_step": 2, "max_staleness": 0},
    "rollout": {"group_size": 2},
    "eval": {"every_steps": 0},
}
_QUESTIONS: dict[str, Callable[[CoordinatorClient, Path], object]] = {
    "NextBatch": lambda client, folder: client.next_batch(1, 0, 60.0),
    "StepEnd": lambda client, folder: client.report_step(1, 1, True, "", {}),
    "SaveLedger": lambda client, folder: client.save_ledger(folder / "copy.sqlite", 1),
}


def coordinator_ways() -> list[Way]:
    ways = [
        Way(
            f"coordinator_{fault}_at_{question}",
            _ANSWER_S,
            ("coordinator: ", "rank-0", question, f"within {_ANSWER_S:g} s", "last answer was Wait"),
            partial(_unanswered, fault, question),
        )
        for fault in ("stopped", "cut", "killed")
        for question in _QUESTIONS
    ]
    return [
        *ways,
        Way("no_server_ever_comes", _BATCH_S, ("coordinator: ", "step 1", "batch_timeout_s"), partial(_no_batch, None)),
        Way("server_never_delivers", _BATCH_S, ("step 1", "2 groups on server-7"), partial(_no_batch, "server-7")),
        Way(
            "ledger_copy_stands_still", _COPY_S, ("coordinator: ", "rank-0", "ledger", "copied to"), _copy_stands_still
        ),
    ]


def _serve(pipe: Connection, folder: Path, has_copies: bool) -> None:
    start_copy = run_in_thread if has_copies else (lambda work: None)
    with running_coordinator(folder, _SETTINGS, start_copy=start_copy) as run:
        pipe.send(run.place)
        threading.Event().wait()


def _begin(folder: Path, has_copies: bool = True) -> tuple[int, Place]:
    """Return the coordinator's process and where it is reached."""
    process, pipe = fork(_serve, folder, has_copies)
    return process.pid, pipe.recv()


def _client(place: Place, address: str) -> CoordinatorClient:
    channel = DealerChannel(address, "rank-0", place.peer_keys, place.coordinator_key)
    return CoordinatorClient(channel, RUN_ID, 1, _PATIENCE)


def _unanswered(fault: str, question: str, folder: Path) -> tuple[str, float]:
    pid, place = _begin(folder)
    link = CuttableLink("127.0.0.1", int(place.address.rpartition(":")[2]))
    client = _client(place, link.address)
    client._patience = Patience()
    raised_by(lambda: client.next_batch(1, 0, 0.1))  # so that there is something that it last answered
    client._patience = _PATIENCE
    if fault == "cut":
        link.cut()
    elif fault == "stopped":
        stop(pid)
    else:
        os.kill(pid, signal.SIGKILL)
    return timed(lambda: raised_by(lambda: _QUESTIONS[question](client, folder)))


def _no_batch(server: str | None, folder: Path) -> tuple[str, float]:
    _, place = _begin(folder)
    client = _client(place, place.address)
    if server is not None:
        channel = DealerChannel(place.address, server, place.peer_keys, place.coordinator_key)
        channel.send(encode(m.Demand(**STAMP, num_groups=9, policy_version=0, heard_of_lease=0, leases={})), 5.0)
        time.sleep(0.5)  # it is leased what there is, and brings nothing
    return timed(lambda: raised_by(lambda: client.next_batch(1, 0, _BATCH_S)))


def _copy_stands_still(folder: Path) -> tuple[str, float]:
    _, place = _begin(folder, has_copies=False)
    client = _client(place, place.address)
    return timed(lambda: raised_by(lambda: client.save_ledger(folder / "copy.sqlite", 1)))
