"""The staleness window: small examples, and random worlds in which its bounds must hold."""

from random import Random
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.data.window import Choice, Outstanding, StalenessWindow


def test_window_size_is_groups_per_step_times_staleness_plus_one() -> None:
    assert StalenessWindow(groups_per_step=8, max_staleness=4).size == 40


def test_too_old_is_what_lies_beyond_the_bound() -> None:
    window = StalenessWindow(groups_per_step=2, max_staleness=1)
    assert [window.is_too_old(version, policy_version=3) for version in (1, 2, 3)] == [True, False, False]


@pytest.mark.parametrize(
    ("groups_per_step", "max_staleness", "version", "policy", "groups", "expected"),
    [
        # Too few groups are ready.
        (2, 1, 0, "wait", [("a", 0, True), ("b", 0, False), ("c", 0, False)], Choice((), ("b", "c"))),
        # The oldest ready groups first, in lease order among groups of one age.
        (2, 4, 2, "wait", [("a", 2, True), ("b", 1, True), ("c", 0, True), ("d", 2, True)], Choice(("c", "b"))),
        (2, 1, 0, "wait", [("a", 0, True), ("b", 0, True), ("c", 0, True)], Choice(("a", "b"))),
        # A group that can still be trained in time is overtaken.
        (2, 1, 0, "wait", [("a", 0, False), ("b", 0, True), ("c", 0, True)], Choice(("b", "c"))),
        # This is the last step for a: "wait" waits for it, "drop" overtakes it.
        (2, 1, 1, "wait", [("a", 0, False), ("b", 0, True), ("c", 1, True), ("d", 1, True)], Choice((), ("a",))),
        (2, 1, 1, "drop", [("a", 0, False), ("b", 0, True), ("c", 1, True), ("d", 1, True)], Choice(("b", "c"))),
        # Overtaking three groups would leave them two steps.
        (1, 2, 0, "wait", [*((name, 0, False) for name in "abc"), ("d", 0, True)], Choice((), ("a", "b", "c"))),
        (1, 2, 0, "wait", [*((name, 0, False) for name in "bc"), ("d", 0, True)], Choice(("d",))),
        # Staleness 0 trains whole generations.
        (2, 0, 5, "wait", [("a", 5, True), ("b", 5, False)], Choice((), ("b",))),
        (2, 0, 5, "wait", [("a", 5, True), ("b", 5, True)], Choice(("a", "b"))),
    ],
)
def test_choose_takes_or_awaits(
    groups_per_step: int,
    max_staleness: int,
    version: int,
    policy: str,
    groups: list[tuple[str, int, bool]],
    expected: Choice,
) -> None:
    window = StalenessWindow(groups_per_step, max_staleness)
    assert window.choose([Outstanding(*group) for group in groups], version, policy) == expected


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
        self.fewest: int | None = None  # of a part of a step; None: steps are taken whole
        self.taken: list[Outstanding] = []  # by the running step

    def lease(self) -> None:
        if len(self.groups) + len(self.taken) < self.window.size:
            self.num_leased += 1
            name = f"g{self.num_leased}"
            self.groups[name] = Outstanding(name, self.version, is_ready=False)
        assert len(self.groups) + len(self.taken) <= self.window.size

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
        num_taken, groups = len(self.taken), list(self.groups.values())
        choice = self.window.choose(groups, self.version, self.policy, num_taken, self.fewest)
        assert not (choice.groups and choice.awaited)
        assert all(not self.groups[name].is_ready for name in choice.awaited)
        if not choice.groups:
            return False
        self.taken += [self.groups.pop(name) for name in choice.groups]
        if self.fewest is None:
            assert len(self.taken) == self.window.groups_per_step
        elif len(self.taken) < self.window.groups_per_step:
            assert len(choice.groups) >= self.fewest
            return self.learn()
        self.staleness += [self.version - group.oldest_version for group in self.taken]
        self.taken = []
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
@given(seed=st.integers(0, 2**32), groups_per_step=st.integers(2, 6), fewest=st.integers(1, 3))
def test_steps_in_parts_train_and_drop_no_group_that_is_too_old_and_end(
    max_staleness: int, seed: int, groups_per_step: int, fewest: int
) -> None:
    world = World(seed, groups_per_step, max_staleness, "wait")
    world.fewest = fewest
    world.live(300)
    assert world.num_dropped == 0
    assert max(world.staleness, default=0) <= max_staleness
    for _ in range(2 * max_staleness + 3):
        assert world.settle()


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
