"""Dynamic sampling through the coordinator: who is filtered, who takes the place, what the ledger and the line say."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from learner.coordinator.accounts import Accounts, Mailbox
from learner.coordinator.groups.group import Group, mean_score
from learner.coordinator.groups.open_groups import OpenGroups
from learner.coordinator.groups.score_filter import ScoreFilter
from learner.ledger.ledger import Ledger
from protocol.errors import OperatorError
from protocol.wire import messages as m
from tests.learner.coordinator.coordinator_script import Script, settings_of

FILTER: dict[str, Any] = {"dynamic_sampling": True}


def filtering(tmp_path: Path, **changes: Any) -> Script:
    sections: dict[str, dict[str, Any]] = {"filter": FILTER | changes, "learner": {"max_staleness": 0}}
    return Script(tmp_path, settings_of(**sections))


def score(script: Script, lease: m.Lease, *rewards: float, version: int = 0) -> None:
    for index, reward in enumerate(rewards):
        assert script.deliver("s1", lease, index, version, reward).outcome == "accepted"


@pytest.mark.parametrize(
    ("rewards", "bounds", "is_told"),
    [
        ((-1.0, 1.0), {}, True),  # mixed: it would be trained with -1 as the low bound
        ((1.0, 2.0), {}, True),
        ((-1.0, -1.0), {}, False),
        ((0.0, 0.0), {}, False),
        ((0.0, 1.0), {"low": 0.5}, False),  # a bound that somebody chose
        ((-1.0, 1.0), {"low": -1.0}, False),
    ],
)
def test_operator_is_told_that_scores_of_another_range_are_filtered(
    tmp_path: Path, rewards: tuple[float, ...], bounds: dict[str, float], is_told: bool
) -> None:
    script = filtering(tmp_path, **bounds)
    first, second = script.demand()
    score(script, first, *rewards)
    score(script, second, *rewards)
    notices = script.coordinator.status().notices
    assert len(notices) == is_told
    assert all("filter.low and filter.high" in notice for notice in notices)


def test_group_at_a_bound_is_replaced_by_the_next_prompt_and_accounted(tmp_path: Path) -> None:
    script = filtering(tmp_path)
    easy, useful = script.demand()
    score(script, easy, 1.0, 1.0)
    (next_one,) = script.demand()
    score(script, useful, 0.0, 1.0)
    score(script, next_one, 0.25, 0.25)
    assert {facts.group for facts in script.batch(1).facts} == {useful.group, next_one.group}
    script.step(1, version=1)
    assert script.rows("SELECT \"group\", step, reason FROM prompts WHERE state = 'skipped'") == [
        (easy.group, None, "filtered: mean reward 1.0 is not above 0.0 and below 1.0")
    ]
    assert script.rows('SELECT "group", reason, num_tokens FROM waste') == [(easy.group, "filtered", 2)] * 2
    (line,) = script.metrics()
    assert (line["data/filtered_low"], line["data/filtered_high"], line["data/skipped"]) == (0, 1, 0)
    assert script.coordinator.counts["filtered"] == 1


@pytest.mark.parametrize(("rewards", "is_kept"), [((0, 0), False), ((1, 1), False), ((0, 1), True), ((0.5, 0.5), True)])
def test_group_is_kept_strictly_between_the_bounds(tmp_path: Path, rewards: tuple[float, ...], is_kept: bool) -> None:
    script = filtering(tmp_path)
    lease = script.demand()[0]
    score(script, lease, *rewards)
    assert ("ready" in script.states()) == is_kept


@pytest.mark.parametrize(
    ("rewards", "scores", "is_kept"),
    [((-1, 0.5), (0, 0.75), True), ((-1, 1), (1, 1), False), ((1, 1), (0, 1), True), ((0, 1), (None, 1), True)],
)
def test_score_that_was_given_decides_in_place_of_the_reward(
    tmp_path: Path, rewards: tuple[float, float], scores: tuple[float | None, float], is_kept: bool
) -> None:
    script = filtering(tmp_path)
    lease = script.demand()[0]
    for index in range(2):
        script.deliver("s1", lease, index, 0, rewards[index], reward_score=scores[index])
    assert ("ready" in script.states()) == is_kept
    # What the curriculum goes by.
    assert [score for score, _ in script.rows("SELECT reward_score, reward FROM trajectories")] == [*scores]


def test_server_forgets_a_filtered_group_and_a_late_copy_of_it_is_unknown(tmp_path: Path) -> None:
    script = filtering(tmp_path)
    lease = script.demand()[0]
    score(script, lease, 0.0, 0.0)
    assert [message.groups for message in script.take("s1", m.GroupsTrained)] == [[lease.group]]
    assert script.deliver("s1", lease, 0, reward=0.0).outcome == "unknown"


def test_every_step_still_gets_its_groups_and_the_run_ends(tmp_path: Path) -> None:
    script = filtering(tmp_path)
    filtered = 0
    for step in (1, 2, 3):
        for turn in range(3):
            for lease in script.demand(version=step - 1):
                is_filtered = turn == 0
                filtered += is_filtered
                score(script, lease, 0.0, 0.0 if is_filtered else 1.0, version=step - 1)
        script.batch(step)
        script.step(step, version=step)
    assert script.demand(version=3) == []
    assert script.states() == {"trained": 6, "skipped": filtered}
    assert isinstance(script.ask(4)[0], m.RunEnd)


def test_steps_hold_what_a_loop_over_the_prompts_in_order_would_keep(tmp_path: Path) -> None:
    """At staleness 0: DAPO's filter in a synchronous loop keeps the first two of use, prompt after prompt."""
    script = filtering(tmp_path)
    useful = {"p1", "p2", "p4", "p5", "p7"}
    order, kept = [], []
    for step in (1, 2, 3):
        leased = True
        while leased:
            leases = script.demand(version=step - 1)
            leased = bool(leases)
            order += [lease.group for lease in leases]
            for lease in reversed(leases):
                score(script, lease, 0.0, float(lease.group[3:] in useful), version=step - 1)
        kept.append({facts.group for facts in script.batch(step).facts})
        script.step(step, version=step)
    in_order = [group for group in order if group[3:] in useful]
    assert kept == [set(in_order[2 * step : 2 * step + 2]) for step in range(3)]


def test_evaluations_are_not_filtered(tmp_path: Path) -> None:
    sections: dict[str, dict[str, Any]] = {"filter": FILTER, "data": {"eval": "x"}, "eval": {"every_steps": 1}}
    script = Script(tmp_path, settings_of(**sections), num_held_out=1)
    lease = script.demand(num_groups=1)[0]
    assert lease.kind == "eval"
    script.finish("s1", lease, reward=1.0)
    assert script.metrics()[0]["eval/held_out/reward"] == 1.0


def test_run_stops_with_a_sentence_when_too_many_groups_are_filtered(tmp_path: Path) -> None:
    script = filtering(tmp_path, max_replaced=1)
    for _ in range(2):
        for lease in script.demand():
            score(script, lease, *((0.0, 0.0) if lease.group < "e0-p4" else (1.0, 1.0)))
    script.advance()
    assert isinstance(script.ask(1)[0], m.RunEnd)
    assert script.demand() == []
    why = script.coordinator.status().give_up_reason
    assert why is not None
    assert "2 groups were filtered before one step (filter.max_replaced = 1): " in why
    assert "filter.at_limit to keep" in why


def test_groups_that_come_back_while_the_run_ends_are_not_in_the_sentence() -> None:
    groups = cast(OpenGroups, SimpleNamespace(give_up_reason=None))
    settings = settings_of(filter={"dynamic_sampling": True, "max_replaced": 2}, learner={"groups_per_step": 1})
    score_filter = ScoreFilter(settings, groups, Accounts(cast(Ledger, None), Mailbox("r1", 1)))
    easy = SimpleNamespace(
        num_samples=1, trajectories=[SimpleNamespace(facts=SimpleNamespace(reward=1.0, reward_score=None))]
    )
    for _ in range(5):
        score_filter.judge(cast(Group, easy))
    assert groups.give_up_reason is not None
    assert "2 groups were filtered" in groups.give_up_reason
    assert "0 had a mean reward of 0 or less, 2 of 1 or more" in groups.give_up_reason


def test_at_the_limit_groups_are_kept_with_that_reason_when_the_settings_say_so(tmp_path: Path) -> None:
    script = filtering(tmp_path, max_replaced=1, at_limit="keep")
    for _ in range(2):
        for lease in script.demand():
            score(script, lease, 1.0, 1.0)
    script.batch(1)
    script.step(1, version=1)
    reasons = script.rows("SELECT DISTINCT reason FROM prompts WHERE state = 'trained'")
    assert reasons == [("kept: mean reward 1.0 is not above 0.0 and below 1.0; 2 groups were filtered before it",)]
    assert script.states() == {"trained": 2, "skipped": 2}


def test_a_part_of_the_reward_may_be_the_score(tmp_path: Path) -> None:
    script = filtering(tmp_path, score="em")
    solved, mixed = script.demand()
    for index, part in enumerate((1.0, 1.0)):
        script.deliver("s1", solved, index, reward=0.1 * index, reward_parts={"em": part})
    for index, part in enumerate((0.0, 1.0)):
        script.deliver("s1", mixed, index, reward=7.0, reward_parts={"em": part})
    states = dict(script.rows('SELECT "group", state FROM prompts'))
    assert (states[solved.group], states[mixed.group]) == ("skipped", "ready")


def test_a_score_that_no_reward_has_is_told(tmp_path: Path) -> None:
    script = filtering(tmp_path, score="f1")
    lease = script.demand()[0]
    script.deliver("s1", lease, 0, reward_parts={"em": 1.0})
    with pytest.raises(OperatorError, match=r"filter.score = f1 is not a part .* which has em\. Set filter.score"):
        script.deliver("s1", lease, 1, reward_parts={"em": 1.0})


def test_filtered_prompt_is_not_leased_again_after_a_kill_and_a_kept_one_is(tmp_path: Path) -> None:
    script = filtering(tmp_path)
    easy, useful = script.demand()
    score(script, easy, 1.0, 1.0)
    score(script, useful, 0.0, 1.0)
    script.advance()
    resumed = script.resume(step=0, filter=FILTER, learner={"max_staleness": 0})
    again = resumed.demand()
    assert useful.group in {lease.group for lease in again}
    assert easy.group not in {lease.group for lease in again}
    assert resumed.states() == {"skipped": 1, "leased": 2}


def test_mean_of_equal_scores_is_the_score() -> None:
    assert all(mean_score([score] * 7) == score for score in (0.1, 0.3, 1.0, -2.7))
