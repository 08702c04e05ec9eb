"""The data of a plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from protocol.settings.placement import Strategy

Backend = Literal["nccl", "gloo", "ipc"]
Where = Literal["here"] | Strategy  # "here" is the command's own node


@dataclass(frozen=True)
class Node:
    """A machine of a running or described cluster."""

    node_ip: str  # address, or the name in a description
    num_gpus: int
    node_id: str = ""  # Ray's name; empty in a description
    resources: Mapping[str, float] = field(default_factory=dict)
    gpu_bytes: int | None = None  # memory of each GPU; None: unknown
    host_bytes: int | None = None  # memory of the machine; None: unknown
    num_cpus: int | None = None  # CPU cores that Ray counts; None: unknown
    is_head: bool = False  # Ray's head


@dataclass(frozen=True)
class Processes:
    """Processes of one role."""

    role: str  # name for people
    count: int
    num_gpus: float  # GPUs of each process; below 1: a shared GPU
    where: Where  # strategy from the settings
    memory_bytes: int  # known device memory of each process
    besides: str  # further memory, in words
    host_bytes: int = 0  # host memory of each process on a GPU
    push_bytes: int = 0  # what a push adds to the state of each process, per GPU
    copy_bytes: int = 0  # part of host_bytes: a push's second copy of the weights
    loading_bytes: int = 0  # host memory of the first process while it loads a model
    state_bytes: int = 0  # permanent part of memory_bytes: a process with less does not start
    resources: Mapping[str, float] = field(default_factory=dict)
    places: tuple[Node, ...] = ()  # node of each process, in order; empty without a cluster


@dataclass(frozen=True)
class Topology:
    """All processes of a run."""

    coordinator: Processes  # one, on the command's node
    ranks: Processes  # learner.num_ranks
    servers: Processes  # rollout.num_servers; 0 where nothing is sampled
    backend: Backend  # transport of the weights
    nodes: tuple[Node, ...] = ()  # the head first; empty without a cluster
    shares_devices: bool = False  # each rank takes turns with a server's worker

    @property
    def has_gpus(self) -> bool:
        """True when each learner rank has a GPU."""
        return self.ranks.num_gpus > 0
