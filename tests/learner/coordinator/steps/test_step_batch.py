"""One step's batch: who gets which trajectories, and what the data alone says."""

from typing import Any

import msgspec
import numpy as np
import pytest

from learner.coordinator.groups.group import Group
from learner.coordinator.steps.step_batch import DataMetrics, StepBatch, build_step
from learner.data.prompts import Prompt
from learner.rank.coordinator_client import open_batch
from protocol.settings.learner import LearnerSettings
from protocol.settings.rewards import RewardsSettings
from protocol.wire.trajectory import Trajectory, VersionSpan
from tests.learner.coordinator.steps.data_metrics import data_metrics
from tests.protocol.wire.examples import make_trajectory


def group_of(name: str, rewards: list[float], version: int = 3) -> Group:
    group = Group(name, Prompt(name, "?", "A", {}), "train", 0, 0, len(rewards))
    for index, reward in enumerate(rewards):
        group.receive(make_trajectory(name, index, "s1", version, reward))
    return group


def planned(batch: StepBatch) -> list[int]:
    return sorted(index for plan in batch.plans for rank in plan for part in rank for index in part)


def test_batch_numbers_trajectories_group_by_group() -> None:
    batch = build_step(1, 3, [group_of("a", [1, 0]), group_of("b", [0, 1])], LearnerSettings(groups_per_step=2))
    assert batch.group_indices == [[0, 1], [2, 3]]
    assert [(t.facts.group, t.facts.sample_index) for t in batch.trajectories] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("b", 1),
    ]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_shares_hold_every_trajectory_once_with_its_arrays(num_ranks: int) -> None:
    settings = LearnerSettings(groups_per_step=2, num_ranks=num_ranks, micro_batch_tokens=8)
    batch = build_step(1, 3, [group_of("a", [1, 0]), group_of("b", [0, 1])], settings)
    assert planned(batch) == [0, 1, 2, 3]
    for rank in range(num_ranks):
        message, frames = batch.share_of(rank, "r1", 2, 7)
        order = [index for part in message.micro_batches for index in part]
        sent = msgspec.structs.replace(message, facts=[])
        received, trajectories = open_batch(sent, frames)
        assert received == message
        assert (message.step, len(message.facts), message.groups) == (1, 4, [[0, 1], [2, 3]])
        assert (len(frames), len(order)) == (sent.num_buffers, 4 // num_ranks)
        assert list(trajectories) == order
        for index, got in trajectories.items():
            assert got.tokens.tolist() == batch.trajectories[index].tokens.tolist()


def test_groups_without_spread_are_left_out_of_the_plan_when_asked_for() -> None:
    settings = LearnerSettings(groups_per_step=2, equal_groups="skip")
    batch = build_step(1, 3, [group_of("a", [1, 1]), group_of("b", [0, 1])], settings)
    assert planned(batch) == [2, 3]
    assert data_metrics(batch)["reward/equal_group_share"] == 0.5


def test_groups_without_spread_are_planned_when_nothing_else_is_left() -> None:
    settings = LearnerSettings(groups_per_step=2, equal_groups="skip")
    assert planned(build_step(1, 3, [group_of("a", [1, 1]), group_of("b", [0, 0])], settings)) == [0, 1, 2, 3]


def test_rows_to_learn_are_never_left_out() -> None:
    """A pair with the margin -2 has two equal numbers in the place of rewards."""
    settings = LearnerSettings(groups_per_step=2, equal_groups="skip")
    assert planned(build_step(1, 3, [group_of("a", [-1, -1]), group_of("b", [0, 1])], settings, are_whole=True)) == [
        0,
        1,
        2,
        3,
    ]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_part_of_a_step_may_leave_out_all_its_groups(num_ranks: int) -> None:
    settings = LearnerSettings(groups_per_step=4, equal_groups="skip", num_ranks=num_ranks)
    batch = build_step(1, 3, [group_of("a", [1, 1]), group_of("b", [0, 0])], settings, may_be_empty=True)
    assert batch.is_empty
    assert batch.plans == [[[[]]] * num_ranks]
    message, frames = batch.share_of(num_ranks - 1, "r1", 2, 7)
    assert (message.planned, message.micro_batches, message.groups) == ([], [[]], [[0, 1], [2, 3]])
    assert len(frames) == 1


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_mini_batches_are_of_whole_groups_in_their_order_with_as_many_micro_batches_on_every_rank(
    num_ranks: int,
) -> None:
    settings = LearnerSettings(groups_per_step=6, num_ranks=num_ranks, micro_batch_tokens=8, num_mini_batches=4)
    batch = build_step(1, 3, [group_of(str(number), [1, 0]) for number in range(6)], settings)
    shares = [batch.share_of(rank, "r1", 2, 7)[0] for rank in range(num_ranks)]
    assert len({tuple(share.planned) for share in shares}) == 1
    assert shares[0].mini_batches == shares[-1].mini_batches
    found = []
    for share in shares:
        planned_at = part_at = 0
        for number, each in enumerate(share.mini_batches):
            planned_here = set(share.planned[planned_at : planned_at + each.num_planned])
            mine = {i for part in share.micro_batches[part_at : part_at + each.num_micro_batches] for i in part}
            assert mine <= planned_here
            found.append((number, sorted(mine)))
            planned_at, part_at = planned_at + each.num_planned, part_at + each.num_micro_batches
        assert (planned_at, part_at) == (len(share.planned), len(share.micro_batches))
    by_update = [sorted(i for n, mine in found if n == number for i in mine) for number in range(4)]
    assert by_update == [[0, 1], [2, 3, 4, 5], [6, 7], [8, 9, 10, 11]]


def test_there_are_no_more_mini_batches_than_groups_that_take_part() -> None:
    settings = LearnerSettings(groups_per_step=3, equal_groups="skip", num_mini_batches=3)
    batch = build_step(1, 3, [group_of("a", [1, 1]), group_of("b", [0, 1]), group_of("c", [1, 0])], settings)
    assert [each.num_planned for each in batch.share_of(0, "r1", 2, 7)[0].mini_batches] == [2, 2]


def long_group(name: str, prompts: list[int], lengths: list[int]) -> Group:
    """Return a group whose trajectories have prompts of one token repeated, each by its number, of these lengths."""
    group = Group(name, Prompt(name, "?", "A", {}), "train", 0, 0, len(prompts))
    for index, (token, length) in enumerate(zip(prompts, lengths, strict=True)):
        made = make_trajectory(name, index, "s1", 3, float(index))
        total = length + 20
        facts = msgspec.structs.replace(
            made.facts, num_tokens=total, num_prompt_tokens=length, version_spans=[VersionSpan(length, total, 3)]
        )
        mask = (np.arange(total) >= length).astype(np.uint8)
        group.receive(Trajectory(facts, np.full(total, token, np.int32), np.zeros(total, np.float32), mask))
    return group


@pytest.mark.parametrize(
    ("prompts", "lengths", "is_shared", "num_parts"),
    [
        ([1, 1, 1], [100, 100, 100], True, 1),  # 160 tokens
        ([1, 1, 1], [100, 100, 100], False, 3),  # 120 each
        ([1, 1, 2], [100, 100, 100], True, 3),
        ([1, 1, 1], [100, 100, 99], True, 3),
        ([1, 1, 1], [63, 63, 63], True, 2),  # too short, and 83 each
    ],
)
def test_micro_batches_are_filled_by_the_tokens_that_are_computed(
    prompts: list[int], lengths: list[int], is_shared: bool, num_parts: int
) -> None:
    settings = LearnerSettings(groups_per_step=1, micro_batch_tokens=170, share_prompts=is_shared)
    ((parts,),) = build_step(1, 3, [long_group("a", prompts, lengths)], settings).plans
    assert len(parts) == num_parts
    assert sorted(index for part in parts for index in part) == [0, 1, 2]


def test_metrics_say_what_the_data_says() -> None:
    settings = LearnerSettings(groups_per_step=2)
    batch = build_step(1, 5, [group_of("a", [1, 0], version=3), group_of("b", [1, 0], version=5)], settings)
    assert data_metrics(batch) == {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "data/staleness_mean": 1.0,
        "data/staleness_max": 2.0,
        "length/mean": 2.0,
        "length/turns": 2.0,
        "data/num_samples": 4,
        "data/num_model_tokens": 8,
        "reward/equal_group_share": 0.0,
        "length/truncated_share": 0.0,
        "length/better": 2.0,
        "length/worse": 2.0,
        "reward/part/exact_match": 0.5,
    }


@pytest.mark.parametrize(
    ("combine", "left", "right"), [("sum", 0.5, 0.25), ("mean", 0.5, 0.25), ("product", 1.0, 0.5), ("shard", 1.0, 0.5)]
)
def test_a_reward_part_that_a_trajectory_lacks_is_0_only_where_it_added_nothing(
    combine: Any, left: float, right: float
) -> None:
    group = Group("a", Prompt("a", "?", "A", {}), "train", 0, 0, 2)
    group.receive(make_trajectory("a", 0, "s1", 3, 1.0, reward_parts={"left": 1.0}))
    group.receive(make_trajectory("a", 1, "s1", 3, 0.5, reward_parts={"right": 0.5}))
    metrics = data_metrics(
        build_step(1, 3, [group], LearnerSettings(groups_per_step=1)), RewardsSettings(combine=combine)
    )
    assert (metrics["reward/part/left"], metrics["reward/part/right"]) == (left, right)


@pytest.mark.parametrize(("weight", "mean"), [(1.0, 0.25), (0.0, 0.5)])
def test_part_of_an_endpoint_without_weight_is_averaged_over_the_samples_that_it_scored(
    weight: float, mean: float
) -> None:
    """A resume may add such an endpoint, and trains samples from before."""
    group = Group("a", Prompt("a", "?", "A", {}), "train", 0, 0, 2)
    group.receive(make_trajectory("a", 0, "s1", 3, 1.0, reward_parts={"em": 1.0}))
    group.receive(make_trajectory("a", 1, "s1", 3, 0.5, reward_parts={"em": 0.5, "style": 0.5}))
    endpoints = [{"name": name, "url": "http://h/", "weight": each} for name, each in (("em", 1.0), ("style", weight))]
    rewards = RewardsSettings.model_validate({"endpoints": endpoints})
    metrics = data_metrics(build_step(1, 3, [group], LearnerSettings(groups_per_step=1)), rewards)
    assert (metrics["reward/part/em"], metrics["reward/part/style"]) == (0.75, mean)


@pytest.mark.parametrize("combine", ["sum", "mean", "product", "shard"])
def test_what_an_environment_gave_one_trajectory_is_spread_over_all(combine: Any) -> None:
    """A run once showed 1.0 when 1 sample of 32 had won."""
    group = Group("a", Prompt("a", "?", "A", {}), "train", 0, 0, 4)
    for index in range(4):
        parts = {"environment": 1.0} if index == 2 else {}
        group.receive(make_trajectory("a", index, "s1", 3, float(bool(parts)), reward_parts=parts))
    metrics = data_metrics(
        build_step(1, 3, [group], LearnerSettings(groups_per_step=1)), RewardsSettings(combine=combine)
    )
    assert metrics["reward/part/environment"] == metrics["reward/mean"] == 0.25


def test_scores_and_logs_of_reward_services_are_averaged_over_the_samples_that_have_them() -> None:
    group = Group("a", Prompt("a", "?", "A", {}), "train", 0, 0, 3)
    group.receive(make_trajectory("a", 0, "s1", 3, reward_score=0.5, reward_logs={"em/length": 4.0}))
    group.receive(make_trajectory("a", 1, "s1", 3, reward_score=0.0, reward_logs={"em/length": 2.0, "em/acc": 1.0}))
    group.receive(make_trajectory("a", 2, "s1", 3))
    metrics = data_metrics(build_step(1, 3, [group], LearnerSettings(groups_per_step=1)))
    shown = {key: metrics[key] for key in ("reward/score", "reward/log/em/acc", "reward/log/em/length")}
    assert shown == {"reward/score": 0.25, "reward/log/em/acc": 1.0, "reward/log/em/length": 3.0}


def test_metrics_say_what_was_cut_off_how_long_better_samples_are_and_which_groups_say_nothing() -> None:
    groups = [group_of("a", [1, 1]), group_of("b", [0, 1])]
    longer = make_trajectory("b", 0, "s1", 3, 0.0, finish="length", num_tokens=4, version_spans=[VersionSpan(2, 4, 3)])
    groups[1].trajectories[0] = longer
    metrics = data_metrics(build_step(1, 3, groups, LearnerSettings(groups_per_step=2)))
    assert (metrics["length/truncated_share"], metrics["reward/equal_group_share"]) == (0.25, 0.5)
    assert (metrics["length/better"], metrics["length/worse"]) == (2.0, 2.0)
    equal = data_metrics(build_step(1, 3, [group_of("a", [1, 1])], LearnerSettings(groups_per_step=1)))
    assert "length/better" not in equal


def test_metrics_of_a_step_that_came_in_pieces_are_those_of_the_whole_step() -> None:
    groups = [group_of(str(number), [number % 3, 1.0, 0.1 * number], version=number) for number in range(7)]
    data = DataMetrics()
    for piece in (groups[:1], groups[1:4], groups[4:]):
        data.add([trajectory for group in piece for trajectory in group.in_order()], piece)
    rewards = RewardsSettings(combine="mean")
    assert data.of_step(9, rewards) == data_metrics(
        build_step(1, 9, groups, LearnerSettings(groups_per_step=7)), rewards
    )
