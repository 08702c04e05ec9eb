"""A learner rank's process as the driver sees it, without importing torch into the driver.

Torch and the rank (`learner.rank.rank`) are imported when a method is called, in the rank's own process.
"""

import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Thread

from learner.checkpoint.manifest import Checkpoint
from learner.disk.shared_folder import Mark, sees
from protocol.addresses import listen
from protocol.errors import NeighbourError, OperatorError
from protocol.node.home import read_cluster
from protocol.node.small_model_files import SmallFiles
from protocol.one_line import describe_error, user_line
from protocol.settings.settings import Settings
from protocol.weights.controls import ServerControls

_log = logging.getLogger(__name__)
WAITING_FOR_BATCH = "waiting for the batch of step"
"""A rank's phase while servers generate, before a step's number."""


@dataclass(frozen=True)
class RankPlace:
    """A rank's place among the learner ranks."""

    rank: int  # number from 0; rank 0 saves, and calls the rollout servers
    world_size: int
    host: str  # address of rank 0, where ranks and rollout servers meet
    port: int  # of rank 0's store
    ranks_here: int = 1  # learner ranks on this rank's node


@dataclass(frozen=True)
class RunPlace:
    """Addresses and names that a rank needs to reach its run."""

    run_id: str
    incarnation: int  # number of the run's start, from 1
    coordinator_address: str  # tcp://HOST:PORT
    servers: tuple[str, ...]  # names of the actors that receive the first push
    weights_backend: str  # nccl, ipc or gloo
    shares_devices: bool = False  # ranks and servers use the same devices alternately


class RankProcess:
    """Call order: sees, offer_address (rank 0), take_place, prepare, train. `progress` may be called at any time."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        models: Mapping[str, SmallFiles],
        reach_server: Callable[[str], ServerControls],
    ) -> None:
        """models: small files by the setting that names the model. reach_server: returns a server's weight controls."""
        self._settings = settings
        self._folder = folder
        self._small_files = models
        self._reach_server = reach_server
        self._servers: tuple[str, ...] = ()
        self._listener: socket.socket | None = None
        self._phase = "starting learner ranks"
        self._reported_phase = ""

    def offer_address(self) -> tuple[str, int]:
        """Return the address where the ranks meet, with a port that is reserved from now on."""
        host = read_cluster().node_ip
        self._listener = listen(host)
        return host, int(self._listener.getsockname()[1])

    def sees(self, mark: Mark) -> tuple[str, bool]:
        """Return this node's address, and whether it shares the run folder with the node that wrote the mark."""
        return read_cluster().node_ip, sees(mark)

    def take_place(self, place: RankPlace) -> None:
        """Become this rank, with a log file in the run folder."""
        log = logging.FileHandler(self._log_path(place), encoding="utf-8")
        log.setFormatter(logging.Formatter("%(asctime)s %(levelname)-5s %(name)s  %(message)s"))
        logging.getLogger().addHandler(log)
        logging.getLogger("learner").setLevel(logging.INFO)
        self._place = place
        # All ranks import torch and DeepSpeed in parallel here: it takes seconds.
        import_module("learner.rank.rank")

    def progress(self) -> tuple[str, bool]:
        """Return this rank's phase, and whether it changed since the last call."""
        is_moving = self._phase != self._reported_phase
        self._reported_phase = self._phase
        return self._phase, is_moving

    def prepare(self, checkpoint: Checkpoint | None) -> list[str]:
        """Meet the other ranks and load the models where the run starts; returns sentences for the user."""
        from learner.rank.start import find_models, join, load, record_models, use_threads

        with self._keeping_tracebacks():
            use_threads(self._settings, self._place.ranks_here)
            self._set_phase("finding the models on this node")
            folders = find_models(self._settings, self._small_files, is_first=self._place.rank == 0)
            self._model = folders["policy.model"]
            if self._place.rank == 0 and checkpoint is None:
                Thread(target=record_models, args=(self._folder, folders), daemon=True).start()
            self._world = join(self._place, self._settings.learner.rank_timeout_s, self._listener)
            notes: list[str] = []
            self._models = load(self._settings, folders, checkpoint, self._set_phase, notes.append)
            return notes

    def push_to(self, servers: tuple[str, ...]) -> None:
        """Use these rollout servers from the next push on. On rank 0."""
        self._servers = servers

    def train(self, run: RunPlace) -> str:
        """Train until the coordinator ends the run; returns one sentence about the end."""
        from learner.rank.rank import train

        self._servers = run.servers
        place = (self._folder, self._model, run)
        reach = (self._reach_server, lambda: self._servers)
        with self._keeping_tracebacks():
            return train(self._world, self._models, self._settings, *place, *reach, self._set_phase)

    @contextmanager
    def _keeping_tracebacks(self) -> Iterator[None]:
        """Write the traceback of an exception into this rank's log, because exceptions lose it between processes.

        Raises: NeighbourError with the log's path and, when a user's function raised it, the line of that function.
        """
        try:
            yield
        except (OperatorError, NeighbourError):
            raise
        except Exception as error:
            _log.exception("this rank failed")
            detail = f"failed: {describe_error(error)}. Traceback: {self._log_path(self._place)}"
            raise NeighbourError(f"learner rank {self._place.rank}", detail, user_line(error) or "") from None

    def _log_path(self, place: RankPlace) -> Path:
        return self._folder / "logs" / f"rank_{place.rank}.log"

    def _set_phase(self, phase: str) -> None:
        self._phase = phase
