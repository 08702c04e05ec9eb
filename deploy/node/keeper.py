"""The keeper of a node: a detached Ray actor that watches the node's services and starts again what ended.

cluster.json says which services there are; a service that was started again is written there with its new process. A
keeper that Ray restarted reads it and goes on. Services outlive their keeper: they are not its children.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import TypedDict

from deploy.node.home import Home, hold_home
from deploy.node.machine import MachineLoad, machine_load
from deploy.node.watched_service import WatchedService
from protocol.errors import OperatorError
from protocol.node.code_digest import code_digest
from protocol.node.home import ProcessRecord, read_cluster, write_cluster

KEEPER_ROOMS = ("protocol", "deploy")
SERVICES = ("retriever", "reward")
# An ended service costs every search or reward of the node: it is looked for four times a second.
_LOOK_S = 0.25
# A service that was well and has not answered for so long is taken for hung. Long: a user's own may be busy.
_SILENT_S = 120.0
_CONNECT_S = 5.0


class KeptInfo(TypedDict):
    """What the keeper knows of one service."""

    name: str  # retriever or reward
    pid: int  # of its process, or of the last one
    num_restarts: int  # by this keeper
    trouble: str  # why it is not well, empty while it is


class Keeper:
    """Each service has a thread of its own: one that hangs at a question delays no other.

    home: SLUICE_HOME. silent_s: a service that was well and does not answer for so long is ended and started again.
    """

    def __init__(self, home: str, silent_s: float = _SILENT_S) -> None:
        self._home = Home(Path(home))
        self._silent_s = silent_s
        os.environ["SLUICE_HOME"] = home  # where cluster.json is read and written
        self._held = hold_home(self._home)  # until this process ends
        self._code = code_digest(KEEPER_ROOMS)
        self._changing = threading.RLock()  # held while `_watched` or cluster.json changes
        self._watched: dict[str, tuple[WatchedService, threading.Event]] = {}
        _log_to(self._home.logs / "keeper.log")
        self.keep()

    def code(self) -> str:
        """Return the digest of the code that this keeper runs."""
        return self._code

    def keep(self) -> None:
        """Watch the services that cluster.json names now. One that is watched already stays as it is."""
        with self._changing:
            try:
                records = {record.name: record for record in read_cluster().processes if record.name in SERVICES}
            except OperatorError:
                records = {}  # a keeper that Ray restarts while a start or stop is under way
            self.forget([name for name in self._watched if name not in records])
            for name, record in records.items():
                if name not in self._watched:
                    self._watch(record)
                elif (watched := self._watched[name][0].record) != record:
                    self._note_change(watched)  # started again while a start wrote what it had known

    def forget(self, names: list[str]) -> None:
        """Stop watching these services; they go on as they are."""
        with self._changing:
            for name in names:
                if name in self._watched:
                    self._watched.pop(name)[1].set()

    def describe(self) -> list[KeptInfo]:
        """Return what is known of each service that is watched."""
        with self._changing:
            services = [watched for watched, _ in self._watched.values()]
        return [
            KeptInfo(
                name=service.record.name,
                pid=service.record.pid,
                num_restarts=service.restarts.num_restarts,
                trouble=service.trouble,
            )
            for service in services
        ]

    def load(self) -> MachineLoad:
        """Return how busy this node's machine and its GPUs are."""
        return machine_load()

    def clock(self) -> float:
        """Return what this node's clock says, Unix seconds."""
        return time.time()

    def reach(self, host: str, port: int) -> str:
        """Connect to another node; returns why that failed, empty when it did not."""
        try:
            socket.create_connection((host, port), timeout=_CONNECT_S).close()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def read_file(self, path: str, offset: int, size: int) -> bytes:
        """Return up to `size` bytes of a file of this node: other nodes copy a model that they lack.

        Whoever can ask has the cluster's token, and so may run any code here.
        Raises: OperatorError when it cannot be read.
        """
        try:
            with open(path, "rb") as file:
                return os.pread(file.fileno(), size, offset)
        except OSError as error:
            raise OperatorError(f"{path} cannot be read: {error.strerror}.") from None

    def _watch(self, record: ProcessRecord) -> None:
        service, over = (
            WatchedService(record, self._home.token_file, self._note_change, self._silent_s),
            threading.Event(),
        )
        self._watched[record.name] = service, over
        threading.Thread(target=self._look_until, args=(service, over), daemon=True).start()

    def _look_until(self, service: WatchedService, over: threading.Event) -> None:
        while not over.wait(_LOOK_S):
            if service.look():
                with self._changing:  # so that nothing is started any more once `forget` has returned
                    if not over.is_set():
                        service.start()

    def _note_change(self, record: ProcessRecord) -> None:
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
