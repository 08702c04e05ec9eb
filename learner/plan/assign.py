"""The node of each learner rank and each rollout server. The same settings and nodes give the same places."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from learner.plan.processes import Node
from protocol.settings.placement import Strategy, servers_on_gpu

# Without GPUs a node holds any number of processes.
_ANY_NUMBER = 1 << 30
_ROUNDING = 1e-9


@dataclass(frozen=True)
class RoleRequest:
    """The processes of one role that need places."""

    role: str  # name for people, in the plural
    setting: str  # setting of their places: placement.ranks or placement.servers
    count: int
    gpus: float  # GPUs of each process; below 1: a share of one
    strategy: Strategy  # packed: on the fewest nodes; spread: over all nodes
    num_nodes: int | None = None  # exact number of nodes; None: any
    gpus_per_node: int | None = None  # number from the settings; None: any
    per_node: int | None = None  # exact number of processes on each used node; None: any
    resources: Mapping[str, float] = field(default_factory=dict)


class FreeCapacity:
    """The unused GPUs and custom resources of each node, the head first."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = sorted(nodes, key=lambda node: not node.is_head)
        self._gpus = [node.num_gpus for node in self.nodes]
        self._resources = [dict(node.resources) for node in self.nodes]

    def fits(self, request: RoleRequest, number: int) -> int:
        """Return how many of these processes node `number` still holds."""
        by_name = [
            int(self._resources[number].get(name, 0.0) / each + _ROUNDING) for name, each in request.resources.items()
        ]
        by_gpus = _ANY_NUMBER
        if request.gpus >= 1.0:
            by_gpus = self._gpus[number] // int(request.gpus)
        elif request.gpus > 0.0:
            by_gpus = self._gpus[number] * servers_on_gpu(request.gpus)
        return min(by_gpus, *by_name) if by_name else by_gpus

    def take(self, request: RoleRequest, number: int, count: int) -> None:
        """Assign `count` of these processes to node `number`."""
        self._gpus[number] -= gpus_of(count, request.gpus)
        for name, each in request.resources.items():
            self._resources[number][name] = self._resources[number].get(name, 0.0) - each * count


def gpus_of(count: int, each: float) -> int:
    """Return how many GPUs of a node hold `count` processes of `each`; the rest of a shared GPU stays unused.

    Example: 5 servers of 0.4 are on 3 GPUs.
    """
    return -(-count // servers_on_gpu(each)) if 0.0 < each < 1.0 else count * int(each)


def assign(ranks: RoleRequest, servers: RoleRequest, nodes: Sequence[Node]) -> tuple[list[Node], list[Node]] | None:
    """Return each rank's node and each server's; None when they do not fit.

    Ranks are placed first, else servers first. If neither order fits, the role with a fixed count per node goes to the
    nodes where the other role loses the fewest places. This finds every fit unless both use custom resources.
    """
    for is_reserving in (False, True):
        for first, second in ((ranks, servers), (servers, ranks)):
            capacity = FreeCapacity(nodes)
            of_first = place(first, capacity, second if is_reserving else None)
            if of_first is not None and (of_second := place(second, capacity)) is not None:
                return (of_first, of_second) if first is ranks else (of_second, of_first)
    return None


def assign_together(
    ranks: RoleRequest, servers: RoleRequest, nodes: Sequence[Node]
) -> tuple[list[Node], list[Node]] | None:
    """Return as `assign` does, with ranks and servers on the same nodes, in equal numbers on each.

    The ranks' strategy holds for both: packed uses the fewest nodes, spread the most.
    """
    fixed = ranks.num_nodes or servers.num_nodes
    numbers = range(1, len(nodes) + 1)
    for num_nodes in [fixed] if fixed else numbers if ranks.strategy == "packed" else reversed(numbers):
        if ranks.count % num_nodes or servers.count % num_nodes:
            continue
        capacity = FreeCapacity(nodes)
        chosen: list[int] = []
        each = ((ranks, ranks.count // num_nodes), (servers, servers.count // num_nodes))
        if any(request.per_node not in (None, count) for request, count in each):
            continue
        for number in range(len(capacity.nodes)):
            if len(chosen) < num_nodes and _take_both(each, capacity, number):
                chosen.append(number)
        if len(chosen) == num_nodes:
            of_ranks, of_servers = (
                [capacity.nodes[number] for number in chosen for _ in range(count)] for _, count in each
            )
            return of_ranks, of_servers
    return None


def place(request: RoleRequest, capacity: FreeCapacity, reserve_for: RoleRequest | None = None) -> list[Node] | None:
    """Return a node for each of these processes and take it from the capacity; None when they do not fit.

    reserve_for: role that is placed next and keeps the most places; None: use the first nodes that fit.
    """
    numbers: Sequence[int] = range(len(capacity.nodes))
    fits = [min(capacity.fits(request, number), request.count) for number in numbers]
    if request.per_node is not None:
        num_nodes = request.count // request.per_node
        if reserve_for is not None:
            numbers = sorted(numbers, key=lambda number: _places_lost(reserve_for, request, capacity.nodes[number]))
        chosen = [number for number in numbers if fits[number] >= request.per_node][:num_nodes]
        counts = dict.fromkeys(chosen, request.per_node)
    elif request.strategy == "packed":
        counts = _pack(fits, request.count)
    else:
        counts = _spread(fits, request.count)
    if sum(counts.values()) < request.count:
        return None
    for number, count in counts.items():
        capacity.take(request, number, count)
    return [capacity.nodes[number] for number in sorted(counts) for _ in range(counts[number])]


def _places_lost(reserve_for: RoleRequest, request: RoleRequest, node: Node) -> int:
    """Return how many places `reserve_for` loses on an empty node that holds its part of `request`."""
    capacity = FreeCapacity([node])
    before = _num_places(reserve_for, capacity)
    capacity.take(request, 0, request.per_node or 0)
    return before - _num_places(reserve_for, capacity)


def _num_places(request: RoleRequest, capacity: FreeCapacity) -> int:
    """Return how many of these processes the first node can get."""
    most = min(capacity.fits(request, 0), request.count)
    return most if request.per_node is None else request.per_node * (most >= request.per_node)


def _pack(fits: Sequence[int], count: int) -> dict[int, int]:
    """Return node -> processes: the first node that holds all, else the largest nodes."""
    whole = [number for number, fit in enumerate(fits) if fit >= count][:1]
    counts: dict[int, int] = {}
    for number in whole or sorted(range(len(fits)), key=lambda number: -fits[number]):
        if (taken := min(fits[number], count - sum(counts.values()))) > 0:
            counts[number] = taken
    return counts


def _spread(fits: Sequence[int], count: int) -> dict[int, int]:
    """Return node -> processes, dealt round by round to the nodes that still hold one."""
    counts = dict.fromkeys(range(len(fits)), 0)
    while sum(counts.values()) < count:
        dealt = [number for number in counts if counts[number] < fits[number]][: count - sum(counts.values())]
        if not dealt:
            break
        for number in dealt:
            counts[number] += 1
    return {number: taken for number, taken in counts.items() if taken}


def _take_both(each: Sequence[tuple[RoleRequest, int]], capacity: FreeCapacity, number: int) -> bool:
    """Take these counts of both roles from a node; return whether they fit."""
    for request, count in each:
        if capacity.fits(request, number) < count:
            return False
        capacity.take(request, number, count)
    return True
