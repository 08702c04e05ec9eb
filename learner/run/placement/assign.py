"""Which node each learner rank and each rollout server gets. The same settings and nodes give the same places."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from learner.run.placement.node import Node
from protocol.settings.roles.placement import Strategy, servers_on_gpu

# Without GPUs a node holds as many processes as one wants.
_ANY_NUMBER = 1 << 30
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Wanted:
    """Processes of one role, and where they may be."""

    setting: str  # of their places: placement.ranks or placement.servers
    count: int  # of them
    gpus: float  # of each; below 1: a share of one
    strategy: Strategy  # packed: as few nodes as hold them; spread: over all
    num_nodes: int | None = None  # exactly so many; None: as they fit
    gpus_per_node: int | None = None  # that the settings name; None: as they fit
    per_node: int | None = None  # exactly so many on each of their nodes; None: as they fit
    resources: Mapping[str, float] = field(default_factory=dict)  # what each takes of its node's own names


class Room:
    """What is left of the nodes."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = sorted(nodes, key=lambda node: not node.is_head)
        self._gpus = [node.num_gpus for node in self.nodes]
        self._resources = [dict(node.resources) for node in self.nodes]

    def fits(self, wanted: Wanted, number: int) -> int:
        """Return how many of these processes node `number` still holds."""
        by_name = [
            int(self._resources[number].get(name, 0.0) / each + _ROUNDING) for name, each in wanted.resources.items()
        ]
        by_gpus = _ANY_NUMBER
        if wanted.gpus >= 1.0:
            by_gpus = self._gpus[number] // int(wanted.gpus)
        elif wanted.gpus > 0.0:
            by_gpus = self._gpus[number] * servers_on_gpu(wanted.gpus)
        return min(by_gpus, *by_name) if by_name else by_gpus

    def take(self, wanted: Wanted, number: int, count: int) -> None:
        """Give `count` of these processes their part of node `number`."""
        self._gpus[number] -= gpus_of(count, wanted.gpus)
        for name, each in wanted.resources.items():
            self._resources[number][name] = self._resources[number].get(name, 0.0) - each * count


def gpus_of(count: int, each: float) -> int:
    """Return how many GPUs of a node hold `count` processes that take `each`: what is left of a shared one is nobody's.

    Example: 5 servers of 0.4 are on 3 GPUs.
    """
    return -(-count // servers_on_gpu(each)) if 0.0 < each < 1.0 else count * int(each)


def assign(ranks: Wanted, servers: Wanted, nodes: Sequence[Node]) -> tuple[list[Node], list[Node]] | None:
    """Return each rank's node and each server's; None when they do not fit.

    Ranks come first, so that those who talk most are on as few nodes as can be; where that leaves no room for the
    servers, servers come first. Where neither has room behind the other, who has as many on each node gets those nodes
    on which the other loses least: with that, nothing is refused that fits, but where both take of nodes' own names.

    Example: 2 nodes of 8 GPUs, 8 ranks packed, 4 servers of 2 GPUs spread: all ranks on the first node, all servers
    on the second.
    """
    for beside in (False, True):
        for first, second in ((ranks, servers), (servers, ranks)):
            room = Room(nodes)
            of_first = place(first, room, second if beside else None)
            if of_first is not None and (of_second := place(second, room)) is not None:
                return (of_first, of_second) if first is ranks else (of_second, of_first)
    return None


def assign_together(ranks: Wanted, servers: Wanted, nodes: Sequence[Node]) -> tuple[list[Node], list[Node]] | None:
    """Return as `assign` does, with ranks and servers on the same nodes, each of these with as many of both.

    The ranks' strategy is that of both: packed is on as few nodes as hold both, spread on as many as can be.
    """
    fixed = ranks.num_nodes or servers.num_nodes
    numbers = range(1, len(nodes) + 1)
    for num_nodes in [fixed] if fixed else numbers if ranks.strategy == "packed" else reversed(numbers):
        if ranks.count % num_nodes or servers.count % num_nodes:
            continue
        room = Room(nodes)
        chosen: list[int] = []
        each = ((ranks, ranks.count // num_nodes), (servers, servers.count // num_nodes))
        if any(wanted.per_node not in (None, count) for wanted, count in each):
            continue
        for number in range(len(room.nodes)):
            if len(chosen) < num_nodes and _take_both(each, room, number):
                chosen.append(number)
        if len(chosen) == num_nodes:
            of_ranks, of_servers = (
                [room.nodes[number] for number in chosen for _ in range(count)] for _, count in each
            )
            return of_ranks, of_servers
    return None


def place(wanted: Wanted, room: Room, beside: Wanted | None = None) -> list[Node] | None:
    """Return a node for each of these processes, which take it from the room; None when they do not fit.

    beside: those who are placed next in an empty room, and lose least by the nodes that are chosen; None: the first
    nodes that fit are.
    """
    numbers: Sequence[int] = range(len(room.nodes))
    fits = [min(room.fits(wanted, number), wanted.count) for number in numbers]
    if wanted.per_node is not None:
        num_nodes = wanted.count // wanted.per_node
        if beside is not None:
            numbers = sorted(numbers, key=lambda number: _lost(beside, wanted, room.nodes[number]))
        chosen = [number for number in numbers if fits[number] >= wanted.per_node][:num_nodes]
        counts = dict.fromkeys(chosen, wanted.per_node)
    elif wanted.strategy == "packed":
        counts = _packed(fits, wanted.count)
    else:
        counts = _spread(fits, wanted.count)
    if sum(counts.values()) < wanted.count:
        return None
    for number, count in counts.items():
        room.take(wanted, number, count)
    return [room.nodes[number] for number in sorted(counts) for _ in range(counts[number])]


def _lost(beside: Wanted, wanted: Wanted, node: Node) -> int:
    """Return how many of `beside` an empty node holds less once it has its part of `wanted`."""
    room, number = Room([node]), 0
    before = _held(beside, room, number)
    room.take(wanted, number, wanted.per_node or 0)
    return before - _held(beside, room, number)


def _held(wanted: Wanted, room: Room, number: int) -> int:
    """Return how many of these processes a node can be given."""
    most = min(room.fits(wanted, number), wanted.count)
    return most if wanted.per_node is None else wanted.per_node * (most >= wanted.per_node)


def _packed(fits: Sequence[int], count: int) -> dict[int, int]:
    """Return node -> processes: the first node that holds all; else those that hold most, until all have a place."""
    whole = [number for number, fit in enumerate(fits) if fit >= count][:1]
    counts: dict[int, int] = {}
    for number in whole or sorted(range(len(fits)), key=lambda number: -fits[number]):
        if (taken := min(fits[number], count - sum(counts.values()))) > 0:
            counts[number] = taken
    return counts


def _spread(fits: Sequence[int], count: int) -> dict[int, int]:
    """Return node -> processes, dealt one after the other to the nodes that still hold one."""
    counts = dict.fromkeys(range(len(fits)), 0)
    while sum(counts.values()) < count:
        dealt = [number for number in counts if counts[number] < fits[number]][: count - sum(counts.values())]
        if not dealt:
            break
        for number in dealt:
            counts[number] += 1
    return {number: taken for number, taken in counts.items() if taken}


def _take_both(each: Sequence[tuple[Wanted, int]], room: Room, number: int) -> bool:
    """Take room for these counts of both roles on a node; False when it has none for both, and is of no use then."""
    for wanted, count in each:
        if room.fits(wanted, number) < count:
            return False
        room.take(wanted, number, count)
    return True
