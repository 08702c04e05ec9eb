"""A learner rank's process as the driver sees it: its methods, without importing torch into the driver.

Torch and the rank (`learner.rank.rank`) are imported when a method is called, in the rank's own process.
"""

import logging
import socket
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from learner.checkpoint.manifest import Checkpoint
from learner.disk.shared_folder import Mark, sees
from learner.rank.place import RankPlace, RunPlace
from protocol.addresses import listen
from protocol.node.home import read_cluster
from protocol.node.small_model_files import SmallFiles
from protocol.settings.settings import Settings

if TYPE_CHECKING:
    from protocol.weights.controls import ServerControls


class RankProcess:
    """Call order: sees, offer_address (rank 0), take_place, prepare, train. `progress` may be asked at any time."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        models: Mapping[str, SmallFiles],
        reach_server: "Callable[[str], ServerControls]",
    ) -> None:
        """models: small files of each model, by the setting that names it. reach_server: returns the weight controls
        of a named rollout server.
        """
        self._settings = settings
        self._folder = folder
        self._small_files = models
        self._reach_server = reach_server
        self._servers: tuple[str, ...] = ()
        self._listener: socket.socket | None = None
        self._phase = "starting learner ranks"
        self._asked_phase = ""

    def offer_address(self) -> tuple[str, int]:
        """Return the address that the world meets at: this rank's node, and a port that is taken from now on."""
        host = read_cluster().node_ip
        self._listener = listen(host)
        return host, int(self._listener.getsockname()[1])

    def sees(self, mark: Mark) -> tuple[str, bool]:
        """Return this node's address, and whether it shares the run folder with the one that left a mark there."""
        return read_cluster().node_ip, sees(mark)

    def take_place(self, place: RankPlace) -> None:
        """Become this rank. What it logs stands in the run folder from now on."""
        log = logging.FileHandler(self._folder / "logs" / f"rank_{place.rank}.log", encoding="utf-8")
        log.setFormatter(logging.Formatter("%(asctime)s %(levelname)-5s %(name)s  %(message)s"))
        logging.getLogger().addHandler(log)
        logging.getLogger("learner").setLevel(logging.INFO)
        self._place = place
        # Ahead of `prepare`, all ranks at once: torch and DeepSpeed take seconds, and the driver imports this file too.
        import_module("learner.rank.rank")

    def progress(self) -> tuple[str, bool]:
        """Return what this rank is at, and whether that changed since it was last asked."""
        is_moving = self._phase != self._asked_phase
        self._asked_phase = self._phase
        return self._phase, is_moving

    def prepare(self, checkpoint: Checkpoint | None) -> None:
        """Join the world and bring the policy to where the run starts."""
        from learner.rank.start import find_models, join, load, use_threads

        # Until training begins, no rollout server is at work on these cores.
        use_threads(self._settings, self._place.world_size, num_others=0)
        self._tell("looking for the models on this node")
        folders = find_models(self._settings, self._small_files, is_first=self._place.rank == 0)
        self._model = folders["policy.model"]
        self._world = join(self._place, self._settings.learner.rank_timeout_s, self._listener)
        self._models = load(self._settings, folders, checkpoint, self._tell)

    def push_to(self, servers: tuple[str, ...]) -> None:
        """Have these be the run's rollout servers from the next push on. On rank 0."""
        self._servers = servers

    def train(self, run: RunPlace) -> str:
        """Train until the coordinator ends the run; returns how it ended, in one sentence."""
        from learner.rank.rank import train
        from learner.rank.start import use_threads

        use_threads(self._settings, self._place.world_size, num_others=run.num_servers)
        self._servers = run.servers
        place = (self._folder, self._model, run)
        reach = (self._reach_server, lambda: self._servers)
        return train(self._world, self._models, self._settings, *place, *reach, self._tell)

    def _tell(self, phase: str) -> None:
        self._phase = phase
