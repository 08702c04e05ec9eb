"""A learner rank's process: what the driver places and calls, without importing torch into the driver.

Placed by `learner.cluster` as an actor; everything is done by `learner.rank`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from learner.checkpoint import Checkpoint
from protocol.settings import Settings

if TYPE_CHECKING:
    from learner.weight_link import ServerControl


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands in the learner's world. host, port: of rank 0's store."""

    rank: int
    world_size: int
    host: str
    port: int


@dataclass(frozen=True)
class RunPlace:
    """What a rank needs to reach its run. host: the address under which rank 0 offers weights."""

    run_id: str
    incarnation: int
    coordinator_address: str
    servers: tuple[str, ...]
    weights_backend: str
    host: str


class RankProcess:
    """Call order: offer_address (rank 0), take_place, prepare, train. `progress` may be asked at any time."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        model: Path,
        host: str,
        reach_server: "Callable[[str], ServerControl]",
    ) -> None:
        """host: this node's address. reach_server: returns the weight controls of a named rollout server."""
        self._settings = settings
        self._folder = folder
        self._model = model
        self._reach_server = reach_server
        self._host = host
        self._phase = "starting learner ranks"
        self._asked_phase = ""

    def offer_address(self) -> tuple[str, int]:
        """Return the address that the world meets at, of this rank's node."""
        from learner.world import free_address

        return free_address(self._host)

    def take_place(self, place: RankPlace) -> None:
        """Become this rank."""
        from learner.rank import LearnerRank

        self._rank = LearnerRank(place, self._settings, self._folder, self._model, self._reach_server, self._tell)

    def progress(self) -> tuple[str, bool]:
        """Return what this rank is at, and whether that changed since it was last asked."""
        is_moving = self._phase != self._asked_phase
        self._asked_phase = self._phase
        return self._phase, is_moving

    def prepare(self, checkpoint: Checkpoint | None) -> None:
        """Join the world and bring the policy to where the run starts."""
        self._rank.prepare(checkpoint)

    def train(self, run: RunPlace) -> str:
        """Train until the coordinator ends the run; returns how it ended, in one sentence."""
        return self._rank.train(run)

    def _tell(self, phase: str) -> None:
        self._phase = phase
