"""Packing: what holds for any lengths, and the example of the docstring."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.data.packing import cost, plan_groups, plan_step

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


groups_of = st.lists(st.tuples(st.integers(0, 200), st.lists(st.integers(1, 300), min_size=1, max_size=9)), min_size=1)


@settings(deadline=None)
@given(groups_of, st.integers(1, 5), st.integers(1, 600), st.booleans())
def test_plan_of_groups_holds_every_index_once_and_its_computed_tokens_within_the_budget(
    made: list[tuple[int, list[int]]], num_ranks: int, budget: int, are_whole: bool
) -> None:
    groups, lengths = [], []
    for prompt, answers in made:
        groups.append(list(range(len(lengths), len(lengths) + len(answers))))
        lengths += [prompt + answer for answer in answers]
    prompts = [prompt for prompt, _ in made]
    plan = plan_groups(groups, lengths, prompts, num_ranks, budget, are_whole=are_whole)
    assert len({len(rank) for rank in plan}) == 1
    assert sorted(i for rank in plan for part in rank for i in part) == list(range(len(lengths)))
    parts = [set(part) for rank in plan for part in rank]
    for part in parts:
        own = [(part.intersection(group), prompt) for group, prompt in zip(groups, prompts, strict=True)]
        computed = sum(
            sum(lengths[i] - prompt for i in each) + prompt + (len(each) - 1) * (prompt // 40)
            for each, prompt in own
            if each
        )
        # The plan is by each sample alone if that gives the busiest rank less: then nothing is shared.
        assert min(computed, sum(lengths[i] for i in part)) <= budget or len([each for each, _ in own if each]) == 1
    if are_whole:
        assert all(any(set(group) <= part for part in parts) for group in groups)


def test_samples_of_a_long_prompt_stay_together() -> None:
    plan = plan_groups([[0, 1, 2, 3], [4, 5, 6, 7]], [1100] * 8, [1000, 1000], 1, 1500)
    assert sorted(map(sorted, plan[0])) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_copies_of_a_prompts_keys_and_values_count_in_the_budget() -> None:
    """Four samples compute 1,400 tokens, and three keep the keys of 1,000 more."""
    plan = plan_groups([[0, 1, 2, 3]], [1100] * 4, [1000], 1, 1474)
    assert sorted(map(len, plan[0])) == [1, 3]


def test_groups_are_cut_for_ranks_that_would_have_none() -> None:
    plan = plan_groups([list(range(8))], [200] * 8, [100], 2, 10_000)
    assert [len(rank[0]) for rank in plan] == [4, 4]


def test_samples_are_planned_by_themselves_where_that_is_faster() -> None:
    """Three groups on four ranks: a prompt of a tenth saves less than a rank without work costs."""
    groups = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    together = plan_groups(groups, [1000] * 12, [70, 70, 70], 4, 1000)
    assert together == plan_groups(groups, [1000] * 12, [0, 0, 0], 4, 1000)
