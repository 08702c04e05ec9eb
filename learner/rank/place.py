"""What a learner rank is told by the driver: its place among the ranks, and where its run is. Plain data, no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands in the learner's world. host, port: of rank 0's store."""

    rank: int
    world_size: int
    host: str
    port: int


@dataclass(frozen=True)
class RunPlace:
    """What a rank needs to reach its run."""

    run_id: str
    incarnation: int
    coordinator_address: str
    servers: tuple[str, ...]
    weights_backend: str
