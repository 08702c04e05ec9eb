"""A learner rank's place among the ranks, and where its run is. Plain data, no torch."""

from dataclasses import dataclass

# What a rank says that it is at while servers generate, before a step's number.
WAITING_FOR_BATCH = "waiting for the batch of step"


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands in the learner's world."""

    rank: int  # from 0; rank 0 saves, and speaks to the rollout servers
    world_size: int  # learner ranks
    host: str  # of rank 0: where the ranks meet, and where pushes meet the rollout servers
    port: int  # of rank 0's store


@dataclass(frozen=True)
class RunPlace:
    """What a rank needs to reach its run."""

    run_id: str  # the run's name
    incarnation: int  # which start of the run this is, from 1
    coordinator_address: str  # tcp://HOST:PORT
    servers: tuple[str, ...]  # names of the rollout servers' actors that weights are pushed to, from the first step on
    num_servers: int  # with those that are still being started
    weights_backend: str  # nccl, ipc or gloo
    shares_devices: bool = False  # True: ranks and servers take turns on the same devices
