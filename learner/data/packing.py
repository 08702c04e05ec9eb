"""Splits a step's trajectories into micro-batches of equal number on every rank, within a token budget.

numpy only: the coordinator imports no torch.
"""

from collections.abc import Sequence

# A token's cost grows with its trajectory's length: attention equals the linear layers' work at about this many tokens.
_ATTENTION_PARITY_TOKENS = 4096


def plan_step(lengths: Sequence[int], num_ranks: int, micro_batch_tokens: int) -> list[list[list[int]]]:
    """Return [rank][micro-batch][index into lengths]: every index once, as many micro-batches on each rank.

    First-fit decreasing into bins of micro_batch_tokens; a longer trajectory has a micro-batch of its own. The number
    of bins is raised to a multiple of num_ranks by splitting the costliest: with unequal numbers, a rank would enter a
    collective that the others never join. Micro-batches are empty only when there
    are fewer trajectories than micro-batches, such as one trajectory on two ranks.

    Example: lengths 5, 4, 3, 2 on two ranks with 8 tokens give [[[0, 2]], [[1, 3]]].
    Raises: ValueError when num_ranks or micro_batch_tokens is below 1.
    """
    if num_ranks < 1 or micro_batch_tokens < 1:
        raise ValueError(f"num_ranks = {num_ranks} and micro_batch_tokens = {micro_batch_tokens} must be at least 1")
    bins = _first_fit_decreasing(lengths, micro_batch_tokens)
    while len(bins) % num_ranks or not bins:
        _split_costliest(bins, lengths)
    return _balance(bins, lengths, num_ranks)


def cost(length: int) -> float:
    """Return the work of one trajectory, in tokens of a short one."""
    return length * (1.0 + length / _ATTENTION_PARITY_TOKENS)


def _first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        place = next((b for b, free in enumerate(room) if free >= length), None)
        if place is None:
            bins.append([index])
            room.append(capacity - length)
        else:
            bins[place].append(index)
            room[place] -= length
    return bins


def _split_costliest(bins: list[list[int]], lengths: Sequence[int]) -> None:
    """Halve the costliest bin of several trajectories; add an empty one when there is none."""
    splittable = [b for b in bins if len(b) > 1]
    if not splittable:
        bins.append([])
        return
    widest = max(splittable, key=lambda b: sum(cost(lengths[i]) for i in b))
    bins.remove(widest)
    halves: tuple[list[int], list[int]] = ([], [])
    for index in widest:  # decreasing lengths: the lighter half takes the next
        min(halves, key=lambda half: sum(cost(lengths[i]) for i in half)).append(index)
    bins += halves


def _balance(bins: list[list[int]], lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    """Give every rank the same number of bins, each time to the rank with the least work so far."""
    per_rank = len(bins) // num_ranks
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    work = [0.0] * num_ranks
    costs = {id(b): sum(cost(lengths[i]) for i in b) for b in bins}
    for bin_ in sorted(bins, key=lambda b: -costs[id(b)]):
        rank = min((r for r in range(num_ranks) if len(ranks[r]) < per_rank), key=lambda r: work[r])
        ranks[rank].append(sorted(bin_))
        work[rank] += costs[id(bin_)]
    return ranks
