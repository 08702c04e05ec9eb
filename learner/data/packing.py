"""Splits a step's trajectories into micro-batches of equal number on every rank, within a token budget.

The coordinator computes it, and imports no torch. N trajectories take N log N operations.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

# A token's cost grows with its trajectory's length: attention equals the linear layers' work at about this many tokens.
_ATTENTION_PARITY_TOKENS = 4096
# Each trajectory after the first keeps its own copy of the prompt's keys and values for the backward pass: 1 to 2 % of
# what the prompt itself keeps in Qwen 2.5 and Llama 3, 9 % in models with as many heads of keys as of queries.
_OF_KEYS = 40


def plan_groups(
    groups: Sequence[Sequence[int]],
    lengths: Sequence[int],
    prompts: Sequence[int],
    num_ranks: int,
    micro_batch_tokens: int,
    *,
    are_whole: bool = False,
) -> list[list[list[int]]]:
    """Return [rank][micro-batch][index into lengths], as `plan_step`, of groups that share prompts.

    prompts: tokens that all trajectories of a group begin with and that are computed once, or 0; one for each group.
    Trajectories of a prompt stay together as far as they fit, unless the busiest rank has less to do with each of them
    by itself. are_whole: each group is whole in one micro-batch.
    """
    size = num_ranks, micro_batch_tokens
    if are_whole:
        whole = [_unit(group, lengths, prompt) for group, prompt in zip(groups, prompts, strict=True)]
        # By their lengths alone: sums round in the order of the micro-batches.
        return _plan_units([unit._replace(cost=cost(unit.length)) for unit in whole], *size)[0]
    if not any(prompts):
        order = [index for group in groups for index in group]
        plan = plan_step([lengths[index] for index in order], *size)
        return [[[order[place] for place in part] for part in rank] for rank in plan]
    # Whole groups, or two parts of them for each rank, so that they can be balanced, or each trajectory by itself.
    candidates = [
        [
            _unit([group[place] for place in part], lengths, prompt)
            for group, prompt in zip(groups, prompts, strict=True)
            for part in _cut(
                [lengths[index] - _saved_tokens(prompt) for index in group],
                micro_batch_tokens - _saved_tokens(prompt),
                num_parts,
            )
        ]
        for num_parts in sorted({1, -(-2 * num_ranks // len(groups))} if num_ranks > 1 else {1})
    ]
    plans = [_plan_units(units, *size) for units in candidates]
    alone = [_Unit([i], lengths[i], cost(lengths[i])) for group in groups for i in group]
    if min(busiest for _, busiest in plans) * num_ranks > sum(unit.cost for unit in alone):
        plans.append(_plan_units(alone, *size))
    return min(plans, key=lambda each: each[1])[0]


def plan_step(
    lengths: Sequence[int], num_ranks: int, micro_batch_tokens: int, costs: Sequence[float] | None = None
) -> list[list[list[int]]]:
    """Return [rank][micro-batch][index into lengths]: every index once, as many micro-batches on each rank.

    First-fit decreasing into bins of micro_batch_tokens; a longer trajectory has a micro-batch of its own. The number
    of bins is raised to a multiple of num_ranks by splitting the costliest: with unequal numbers, a rank would enter a
    collective that the others never join. Micro-batches are empty only when there are fewer trajectories than
    micro-batches.

    costs: work of each trajectory; None: by its length.
    Example: lengths 5, 4, 3, 2 on two ranks with 8 tokens give [[[0, 2]], [[1, 3]]].
    Raises: ValueError when num_ranks or micro_batch_tokens is below 1.
    """
    if num_ranks < 1 or micro_batch_tokens < 1:
        raise ValueError(f"num_ranks = {num_ranks} and micro_batch_tokens = {micro_batch_tokens} must be at least 1")
    bins = _first_fit_decreasing(lengths, micro_batch_tokens)
    costs = [cost(length) for length in lengths] if costs is None else costs
    _split_until_divisible(bins, costs, num_ranks)
    return _balance(bins, costs, num_ranks)


def cost(length: int) -> float:
    """Return the work of one trajectory, in tokens of a short one."""
    return length * (1.0 + length / _ATTENTION_PARITY_TOKENS)


class _Unit(NamedTuple):
    """Trajectories of one micro-batch that share a prompt."""

    indices: list[int]
    length: int  # tokens to compute, and copies of the prompt's keys and values in tokens of equal memory
    cost: float


def _unit(indices: Sequence[int], lengths: Sequence[int], prompt: int) -> _Unit:
    whole = sum(lengths[index] for index in indices)
    shared = len(indices) - 1
    work = sum(cost(lengths[index]) for index in indices)
    return _Unit(list(indices), whole - shared * _saved_tokens(prompt), work - shared * cost(prompt))


def _saved_tokens(prompt: int) -> int:
    """Return the tokens whose memory a trajectory saves that shares a prompt with another one."""
    return prompt - prompt // _OF_KEYS


def _cut(answers: Sequence[int], capacity: int, num_parts: int) -> list[list[int]]:
    """Return places of answers in about num_parts parts or more, none of more tokens than the capacity."""
    limit = max(1, min(capacity, -(-sum(answers) // num_parts)))
    if sum(answers) <= limit:
        return [_decreasing(answers)]
    return _first_fit_decreasing(answers, limit)


def _plan_units(units: Sequence[_Unit], num_ranks: int, micro_batch_tokens: int) -> tuple[list[list[list[int]]], float]:
    """Return (plan of the units' indices, work of the busiest rank)."""
    costs = [unit.cost for unit in units]
    plan = plan_step([unit.length for unit in units], num_ranks, micro_batch_tokens, costs)
    busiest = max(sum(costs[place] for part in rank for place in part) for rank in plan)
    return [[[i for place in part for i in units[place].indices] for part in rank] for rank in plan], busiest


def _first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    # At most one bin stays half empty or emptier: two such would be one.
    num_bins = min(len(lengths), 2 * sum(min(length, capacity) for length in lengths) // capacity + 1)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    num_leaves = 1 << max(0, num_bins - 1).bit_length()
    # A binary tree: room[1] is the root, the last half has the bins in order, and a node has the larger of its two.
    room = [capacity] * (2 * num_leaves)
    for index in _decreasing(lengths):
        length = min(lengths[index], capacity)  # a longer trajectory fills an empty bin
        node = 1
        while node < num_leaves:
            node = 2 * node + (room[2 * node] < length)
        bins[node - num_leaves].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            left, right = room[2 * node], room[2 * node + 1]
            largest = left if left > right else right
            if room[node] == largest:
                break  # the nodes above have not changed either
            room[node] = largest
    return [indices for indices in bins if indices]


def _decreasing(lengths: Sequence[int]) -> list[int]:
    """Return the places of lengths, the longest first."""
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)


def _split_until_divisible(bins: list[list[int]], costs: Sequence[float], num_ranks: int) -> None:
    """Halve the costliest bin of several trajectories, or add an empty one, until every rank gets as many bins."""
    costliest = [(-sum(costs[i] for i in b), number, b) for number, b in enumerate(bins) if len(b) > 1]
    heapify(costliest)
    number = len(bins)
    while len(bins) % num_ranks or not bins:
        if not costliest:
            bins.append([])
            continue
        widest = heappop(costliest)[2]
        bins.remove(widest)
        halves: tuple[list[int], list[int]] = ([], [])
        work = [0.0, 0.0]
        for index in widest:  # decreasing lengths: the lighter half takes the next
            lighter = int(work[1] < work[0])
            halves[lighter].append(index)
            work[lighter] += costs[index]
        for half in halves:
            bins.append(half)
            number += 1
            if len(half) > 1:
                heappush(costliest, (-sum(costs[i] for i in half), number, half))


def _balance(bins: list[list[int]], costs: Sequence[float], num_ranks: int) -> list[list[list[int]]]:
    """Give every rank the same number of bins, each time to the rank with the least work so far."""
    per_rank = len(bins) // num_ranks
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    least = [(0.0, rank) for rank in range(num_ranks)]
    of_bins = [(sum(costs[i] for i in indices), indices) for indices in bins]
    for of_bin, indices in sorted(of_bins, key=lambda each: -each[0]):
        work, rank = heappop(least)
        ranks[rank].append(sorted(indices))
        if len(ranks[rank]) < per_rank:
            heappush(least, (work + of_bin, rank))
    return ranks
