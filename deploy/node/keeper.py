"""The keeper of a node: a detached Ray actor that watches the node's services and restarts those that ended.

cluster.json lists the services, and gets the new process of a restarted one. Services are not children of the keeper:
they keep running while Ray restarts it. It also answers questions about its node.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import TypedDict

from deploy.node.home import Home, mark_home_used
from deploy.node.service import WatchedService
from protocol.errors import OperatorError
from protocol.node.home import ProcessRecord, read_cluster, write_cluster
from protocol.node.identity import code_digest

KEEPER_ROOMS = ("protocol", "deploy")
SERVICES = ("retriever", "reward")
_POLL_S = 0.25  # each second without a service costs all searches or rewards of the node
_SILENT_S = 120.0  # a user's own service may be busy for long
_CONNECT_S = 5.0


class ServiceInfo(TypedDict):
    """The keeper's facts of one service."""

    name: str  # retriever or reward
    pid: int  # also of an ended process
    num_restarts: int
    trouble: str  # reason why it is not healthy; empty while it is


class Keeper:
    """Watches each service in a thread of its own: a service that hangs delays no other."""

    def __init__(self, home: str, silent_s: float = _SILENT_S) -> None:
        """home: SLUICE_HOME. silent_s: a healthy service that then does not answer for so long is restarted."""
        self._home = Home(Path(home))
        self._silent_s = silent_s
        os.environ["SLUICE_HOME"] = home  # folder of cluster.json
        self._home_lock = mark_home_used(self._home)  # held until this process ends
        self._code = code_digest(KEEPER_ROOMS)
        self._changing = threading.RLock()  # held while `_watched` or cluster.json changes
        self._watched: dict[str, tuple[WatchedService, threading.Event]] = {}
        _log_to(self._home.logs / "keeper.log")
        self.keep()

    def code(self) -> str:
        """Return the digest of this keeper's code."""
        return self._code

    def keep(self) -> None:
        """Watch the services in cluster.json; those that are watched already stay."""
        with self._changing:
            try:
                records = {record.name: record for record in read_cluster().processes if record.name in SERVICES}
            except OperatorError:
                records = {}  # Ray restarted this keeper during a start or stop
            self.forget([name for name in self._watched if name not in records])
            for name, record in records.items():
                if name not in self._watched:
                    self._watch(record)
                elif (watched := self._watched[name][0].record) != record:
                    self._save(watched)  # it was restarted while a start wrote its old process

    def forget(self, names: list[str]) -> None:
        """Stop watching these services; they keep running."""
        with self._changing:
            for name in names:
                if name in self._watched:
                    self._watched.pop(name)[1].set()

    def describe(self) -> list[ServiceInfo]:
        """Return the facts of each watched service."""
        with self._changing:
            services = [watched for watched, _ in self._watched.values()]
        return [
            ServiceInfo(
                name=service.record.name,
                pid=service.record.pid,
                num_restarts=service.restarts.num_restarts,
                trouble=service.trouble,
            )
            for service in services
        ]

    def clock(self) -> float:
        """Return this node's time, Unix seconds."""
        return time.time()

    def reach(self, host: str, port: int) -> str:
        """Connect to another node; returns the error, empty on success."""
        try:
            socket.create_connection((host, port), timeout=_CONNECT_S).close()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _watch(self, record: ProcessRecord) -> None:
        service = WatchedService(record, self._home.token_file, self._save, self._silent_s)
        stopped = threading.Event()
        self._watched[record.name] = service, stopped
        threading.Thread(target=self._poll, args=(service, stopped), daemon=True).start()

    def _poll(self, service: WatchedService, stopped: threading.Event) -> None:
        while not stopped.wait(_POLL_S):
            if service.poll():
                with self._changing:  # nothing may start once `forget` has returned
                    if not stopped.is_set():
                        service.start()

    def _save(self, record: ProcessRecord) -> None:
        """Write a service's new process into cluster.json."""
        with self._changing, contextlib.suppress(OperatorError):  # a stop has removed cluster.json
            state = read_cluster()
            processes = [record if known.name == record.name else known for known in state.processes]
            write_cluster(state.model_copy(update={"processes": processes}))


def _log_to(path: Path) -> None:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-5s keeper  %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("keeper")
    for old in logger.handlers:
        old.close()
    logger.handlers = [handler]
    logger.propagate = False
