"""The staleness window: small examples, and random worlds in which its bounds must hold."""

from random import Random
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.coordinator.window import Choice, Outstanding, StalenessWindow


def outstanding(*groups: tuple[str, int, bool]) -> list[Outstanding]:
    return [Outstanding(*group) for group in groups]


def test_window_size_is_groups_per_step_times_staleness_plus_one() -> None:
    assert StalenessWindow(groups_per_step=8, max_staleness=4).size == 40


@pytest.mark.parametrize(("num_outstanding", "num_free"), [(0, 4), (3, 1), (4, 0), (5, 0)])
def test_num_free_is_what_the_window_leaves(num_outstanding: int, num_free: int) -> None:
    assert StalenessWindow(groups_per_step=2, max_staleness=1).num_free(num_outstanding) == num_free


def test_too_old_is_what_lies_beyond_the_bound() -> None:
    window = StalenessWindow(groups_per_step=2, max_staleness=1)
    assert [window.is_too_old(version, policy_version=3) for version in (1, 2, 3)] == [True, False, False]


def test_choose_waits_for_the_groups_that_are_missing() -> None:
    window = StalenessWindow(groups_per_step=2, max_staleness=1)
    groups = outstanding(("a", 0, True), ("b", 0, False), ("c", 0, False))
    assert window.choose(groups, 0, "wait") == Choice((), ("b", "c"))


def test_choose_takes_the_oldest_ready_groups_first() -> None:
    window = StalenessWindow(groups_per_step=2, max_staleness=4)
    groups = outstanding(("a", 2, True), ("b", 1, True), ("c", 0, True), ("d", 2, True))
    assert window.choose(groups, 2, "wait") == Choice(("c", "b"))


def test_choose_keeps_lease_order_among_groups_of_one_age() -> None:
    window = StalenessWindow(groups_per_step=2, max_staleness=1)
    groups = outstanding(("a", 0, True), ("b", 0, True), ("c", 0, True))
    assert window.choose(groups, 0, "wait") == Choice(("a", "b"))


def test_choose_overtakes_a_group_that_can_still_be_trained_in_time() -> None:
    window = StalenessWindow(groups_per_step=2, max_staleness=1)
    groups = outstanding(("a", 0, False), ("b", 0, True), ("c", 0, True))
    assert window.choose(groups, 0, "wait") == Choice(("b", "c"))


def test_choose_waits_for_a_group_whose_last_step_this_is() -> None:
    window = StalenessWindow(groups_per_step=2, max_staleness=1)
    groups = outstanding(("a", 0, False), ("b", 0, True), ("c", 1, True), ("d", 1, True))
    assert window.choose(groups, 1, "wait") == Choice((), ("a",))


def test_choose_overtakes_a_group_whose_last_step_this_is_when_dropping() -> None:
    window = StalenessWindow(groups_per_step=2, max_staleness=1)
    groups = outstanding(("a", 0, False), ("b", 0, True), ("c", 1, True), ("d", 1, True))
    assert window.choose(groups, 1, "drop") == Choice(("b", "c"))


def test_choose_waits_when_more_groups_have_a_deadline_than_steps_are_left() -> None:
    window = StalenessWindow(groups_per_step=1, max_staleness=2)
    # Overtaking both at version 0 would leave two groups to be trained at versions 1 and 2, and a third at none.
    groups = outstanding(("a", 0, False), ("b", 0, False), ("c", 0, False), ("d", 0, True))
    assert window.choose(groups, 0, "wait") == Choice((), ("a", "b", "c"))
    assert window.choose(groups[1:], 0, "wait") == Choice(("d",))


def test_choose_with_staleness_zero_trains_whole_generations() -> None:
    window = StalenessWindow(groups_per_step=2, max_staleness=0)
    assert window.choose(outstanding(("a", 5, True), ("b", 5, False)), 5, "wait") == Choice((), ("b",))
    assert window.choose(outstanding(("a", 5, True), ("b", 5, True)), 5, "wait") == Choice(("a", "b"))


class World:
    """Servers that lease and finish in any order, and a learner, around one window."""

    def __init__(self, seed: int, groups_per_step: int, max_staleness: int, policy: Literal["wait", "drop"]) -> None:
        self.random = Random(seed)
        self.window = StalenessWindow(groups_per_step, max_staleness)
        self.policy = policy
        self.version = 0
        self.num_leased = self.num_dropped = 0
        self.groups: dict[str, Outstanding] = {}
        self.staleness: list[int] = []

    def lease(self) -> None:
        if self.window.num_free(len(self.groups)):
            self.num_leased += 1
            name = f"g{self.num_leased}"
            self.groups[name] = Outstanding(name, self.version, is_ready=False)
        assert len(self.groups) <= self.window.size

    def finish_one(self) -> None:
        running = [g for g in self.groups.values() if not g.is_ready]
        if running:
            group = self.random.choice(running)
            # All of its tokens may be newer than its lease, none older.
            oldest = self.random.randint(group.oldest_version, self.version)
            self.groups[group.group] = Outstanding(group.group, oldest, is_ready=True)

    def learn(self) -> bool:
        for name in [g.group for g in self.groups.values() if self.window.is_too_old(g.oldest_version, self.version)]:
            self.num_dropped += 1
            self.groups[name] = Outstanding(name, self.version, is_ready=False)
        choice = self.window.choose(list(self.groups.values()), self.version, self.policy)
        assert not (choice.groups and choice.awaited)
        assert all(not self.groups[name].is_ready for name in choice.awaited)
        if not choice.groups:
            return False
        assert len(choice.groups) == self.window.groups_per_step
        self.staleness += [self.version - self.groups.pop(name).oldest_version for name in choice.groups]
        if self.random.random() > 0.1:  # else the step was not applied
            self.version += 1
        return True

    def live(self, num_turns: int) -> None:
        weights = [self.random.random() + 0.05 for _ in range(3)]
        for _ in range(num_turns):
            self.random.choices([self.lease, self.finish_one, self.learn], weights)[0]()

    def settle(self) -> bool:
        """Fill the window and let everything become ready; True when the learner can then take a step."""
        for _ in range(self.window.size):
            self.lease()
        for _ in range(self.window.size):
            self.finish_one()
        return self.learn()


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), groups_per_step=st.integers(1, 4))
def test_waiting_never_trains_nor_drops_a_group_that_is_too_old(
    max_staleness: int, seed: int, groups_per_step: int
) -> None:
    world = World(seed, groups_per_step, max_staleness, "wait")
    world.live(300)
    assert world.num_dropped == 0
    assert max(world.staleness, default=0) <= max_staleness


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), groups_per_step=st.integers(1, 4))
def test_dropping_never_trains_a_group_that_is_too_old(max_staleness: int, seed: int, groups_per_step: int) -> None:
    world = World(seed, groups_per_step, max_staleness, "drop")
    world.live(300)
    assert max(world.staleness, default=0) <= max_staleness


@pytest.mark.parametrize("policy", ["wait", "drop"])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), groups_per_step=st.integers(1, 4))
def test_a_step_can_be_taken_once_everything_is_ready(
    max_staleness: int, policy: Literal["wait", "drop"], seed: int, groups_per_step: int
) -> None:
    world = World(seed, groups_per_step, max_staleness, policy)
    world.live(100)
    for _ in range(2 * max_staleness + 3):
        assert world.settle()
