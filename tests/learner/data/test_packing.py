"""Packing: what holds for any lengths, and the example of the docstring."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.data.packing import cost, plan_step

# No deadline: the time of one example says nothing on a busy machine.
lengths_of = st.lists(st.integers(1, 300), max_size=60)


@settings(deadline=None)
@given(lengths_of, st.integers(1, 5), st.integers(1, 400))
def test_plan_holds_every_index_once_and_as_many_micro_batches_on_each_rank(
    lengths: list[int], num_ranks: int, budget: int
) -> None:
    plan = plan_step(lengths, num_ranks, budget)
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) >= 1
    assert sorted(i for rank in plan for part in rank for i in part) == list(range(len(lengths)))


@settings(deadline=None)
@given(lengths_of, st.integers(1, 5), st.integers(1, 400))
def test_micro_batches_stay_within_the_budget_but_for_a_long_trajectory_alone(
    lengths: list[int], num_ranks: int, budget: int
) -> None:
    parts = [part for rank in plan_step(lengths, num_ranks, budget) for part in rank]
    assert all(len(part) == 1 or sum(lengths[i] for i in part) <= budget for part in parts)


@settings(deadline=None)
@given(lengths_of, st.integers(1, 5), st.integers(1, 400))
def test_micro_batches_are_empty_only_when_there_are_more_of_them_than_trajectories(
    lengths: list[int], num_ranks: int, budget: int
) -> None:
    parts = [part for rank in plan_step(lengths, num_ranks, budget) for part in rank]
    assert sum(not part for part in parts) == max(0, len(parts) - len(lengths)) or all(parts)


@settings(deadline=None)
@given(st.lists(st.integers(50, 300), min_size=64, max_size=64), st.integers(1, 4))
def test_ranks_have_similar_work(lengths: list[int], num_ranks: int) -> None:
    work = [sum(cost(lengths[i]) for p in rank for i in p) for rank in plan_step(lengths, num_ranks, 600)]
    assert max(work) - min(work) <= 2 * cost(600)


def test_plan_of_the_documented_example() -> None:
    assert plan_step([5, 4, 3, 2], 2, 8) == [[[0, 2]], [[1, 3]]]


def test_fewer_trajectories_than_ranks_leave_empty_micro_batches() -> None:
    assert plan_step([7], 3, 8) == [[[0]], [[]], [[]]]


def test_costliest_micro_batch_is_halved_for_a_rank_without_one() -> None:
    assert plan_step([5, 3, 3, 2], 3, 8) == [[[0]], [[2, 3]], [[1]]]


@pytest.mark.parametrize(("num_ranks", "budget"), [(0, 8), (1, 0)])
def test_plan_refuses_no_ranks_and_no_budget(num_ranks: int, budget: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        plan_step([1], num_ranks, budget)


def test_trajectory_of_4096_tokens_costs_as_much_again_in_attention() -> None:
    assert cost(4096) == 2 * 4096
    assert cost(1024) == 1024 * 1.25
