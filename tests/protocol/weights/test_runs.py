"""Cutting into runs: nothing is lost or moved, and a run is no larger than it has to be."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.weights.runs import cut_into_runs


@settings(deadline=None)
@given(st.lists(st.integers(0, 50)), st.integers(1, 60))
def test_runs_hold_everything_in_order_within_the_limit_and_are_as_few_as_that_allows(
    sizes: list[int], limit: int
) -> None:
    runs = cut_into_runs(sizes, lambda size: size, limit)
    assert [size for run in runs for size in run] == sizes
    assert all(run and (len(run) == 1 or sum(run) <= limit) for run in runs)
    assert all(sum(run) + following[0] > limit for run, following in pairwise(runs))


def test_example_of_the_docstring() -> None:
    assert cut_into_runs([48, 48, 48, 208], lambda size: size, 100) == [[48, 48], [48], [208]]
