"""A machine of a cluster, as Ray or a description tells it."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Node:
    """What a plan is made for."""

    node_ip: str  # its address for the other nodes, or what a description calls it
    num_gpus: int  # 0: none
    node_id: str = ""  # Ray's own; empty: of no running cluster
    resources: Mapping[str, float] = field(default_factory=dict)  # names that its operator gave for what it has
    gpu_bytes: int | None = None  # memory of each GPU; None: not known
    host_bytes: int | None = None  # memory of the machine; None: not known
    is_head: bool = False  # True: Ray's head, where commands are usually given
