"""The data of a plan: nodes, the processes of each role, and the whole topology."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from protocol.settings.placement import Strategy

Backend = Literal["nccl", "gloo", "ipc"]
Where = Literal["here"] | Strategy  # "here" is the command's own node


@dataclass(frozen=True)
class Node:
    """A machine of a running or a described cluster."""

    node_ip: str  # address for the other nodes, or the name in a description
    num_gpus: int  # 0: no GPU
    node_id: str = ""  # Ray's name; empty in a described cluster
    resources: Mapping[str, float] = field(default_factory=dict)  # custom resources that the operator named
    gpu_bytes: int | None = None  # memory of each GPU; None: unknown
    host_bytes: int | None = None  # memory of the machine; None: unknown
    is_head: bool = False  # True: Ray's head, where commands are usually given


@dataclass(frozen=True)
class Processes:
    """Processes of one role."""

    role: str  # name for people
    count: int  # number of processes; 0: the run needs none
    num_gpus: float  # GPUs of each process; below 1: several processes share one
    where: Where  # strategy from the settings
    memory_bytes: int  # known device memory of each process
    besides: str  # further memory, in words
    host_bytes: int = 0  # host memory of each process on a GPU
    copy_bytes: int = 0  # part of the host memory: a push's second copy of the weights
    state_bytes: int = 0  # permanent part of memory_bytes: a process with less does not start
    resources: Mapping[str, float] = field(default_factory=dict)  # custom resources of each process
    places: tuple[Node, ...] = ()  # node of each process, in order; empty without a cluster


@dataclass(frozen=True)
class Topology:
    """All processes of a run."""

    coordinator: Processes  # one, on the command's node
    ranks: Processes  # learner.num_ranks processes
    servers: Processes  # rollout.num_servers processes; 0 where nothing is sampled
    backend: Backend  # transport of the weights
    nodes: tuple[Node, ...] = ()  # nodes of the cluster, the head first; empty without a cluster
    shares_devices: bool = False  # True: each rank takes turns with the server of its number

    @property
    def has_gpus(self) -> bool:
        """True when each learner rank has a GPU."""
        return self.ranks.num_gpus > 0
