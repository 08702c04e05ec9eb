"""A server that lives and fails what it is leased: prompts go elsewhere before they are given up."""

from pathlib import Path

import msgspec
import pytest

from protocol.wire import messages as m
from tests.learner.coordinator.coordinator_script import Script, settings_of


def test_server_that_fails_all_at_once_costs_no_prompt_while_another_one_works(script: Script) -> None:
    script.demand("s2", num_groups=0)
    for _ in range(10):  # it always has room
        for lease in script.demand("s1"):
            for index in lease.sample_indices:
                script.fail("s1", lease, index, "no module named numpy")
    script.demand_and_finish("s2")
    assert "skipped" not in script.states()
    assert script.states()["ready"] == 4  # the whole window


def test_prompt_that_fails_everywhere_is_given_up_after_three_failures(script: Script) -> None:
    (lease,) = script.demand("s1", num_groups=1)
    script.fail("s1", lease, 0)
    script.demand("s1", num_groups=0)
    (again,) = script.demand("s2", num_groups=1)
    assert again.group == lease.group
    script.fail("s2", again, 0)
    script.demand("s2", num_groups=0)
    (last,) = script.demand("s1", num_groups=1)  # there is no third server
    assert last.group == lease.group
    script.fail("s1", last, 0)
    assert script.rows("SELECT \"group\" FROM prompts WHERE state = 'skipped'") == [(lease.group,)]


def test_prompt_that_failed_waits_no_longer_for_a_server_that_is_gone(script: Script) -> None:
    script.demand("s2", num_groups=0)
    (lease,) = script.demand("s1", num_groups=1)
    script.fail("s1", lease, 0)
    script.coordinator.lose_server("s2", "it died")
    (again, *_) = script.demand("s1", num_groups=1)
    assert again.group == lease.group


def test_prompt_that_failed_waits_for_a_server_that_stands_still_for_half_a_minute_at_most(script: Script) -> None:
    script.demand("s2", num_groups=0)  # it says no more
    (lease,) = script.demand("s1", num_groups=1)
    script.fail("s1", lease, 0)
    script.advance(29.0)
    assert lease.group not in {other.group for other in script.demand("s1", num_groups=1)}
    script.advance(2.0)
    assert lease.group in {other.group for other in script.demand("s1", num_groups=1)}


# A window of four groups, and six prompts.
SETTINGS = settings_of(run={"max_steps": 50})


@pytest.fixture
def six_prompts(tmp_path: Path) -> Script:
    return Script(tmp_path, SETTINGS, num_prompts=6)


def give_up(script: Script, num_groups: int) -> None:
    """Fail the first sample of so many groups as often as it is tried."""
    for _ in range(num_groups):
        for _ in range(3):
            (lease,) = script.demand("s1", num_groups=1)
            script.fail("s1", lease, 0)


def test_run_ends_when_as_many_prompts_in_a_row_were_given_up_as_there_are(six_prompts: Script) -> None:
    give_up(six_prompts, 5)
    six_prompts.advance()
    assert six_prompts.coordinator.status().give_up_reason is None
    give_up(six_prompts, 1)
    six_prompts.advance()
    reason = six_prompts.coordinator.status().give_up_reason
    assert reason is not None
    assert reason.startswith("the last 6 prompts were skipped, one after the other. ")
    assert "sample 0: reward:em: 503; reward:em: 503; reward:em: 503. Repair the cause" in reason
    (answer,) = six_prompts.ask(1)
    assert isinstance(answer, m.RunEnd)


def test_group_that_came_back_begins_the_count_anew(six_prompts: Script) -> None:
    give_up(six_prompts, 5)
    (lease,) = six_prompts.demand("s1", num_groups=1)
    six_prompts.finish("s1", lease)
    give_up(six_prompts, 5)
    six_prompts.advance()
    assert six_prompts.coordinator.status().give_up_reason is None


DETAIL = "ZeroDivisionError: division by zero (/home/me/reward.py:6)"


def fail_samples(script: Script, number: int, place: str | msgspec.UnsetType) -> None:
    """Fail samples, one after the other, of as many prompts as it takes."""
    end = script.coordinator.counts["failed:reward:em"] + number
    while script.coordinator.counts["failed:reward:em"] < end:
        for lease in script.demand("s1", num_groups=1):
            script.fail("s1", lease, lease.sample_indices[0], DETAIL, place=place)


def give_up_reason(script: Script) -> str | None:
    script.advance()
    return script.coordinator.status().give_up_reason


@pytest.mark.parametrize(("place", "is_fatal"), [("/home/me/reward.py:6", True), (msgspec.UNSET, False)])
def test_run_ends_after_32_failures_at_one_line_of_a_users_code(
    tmp_path: Path, place: str | msgspec.UnsetType, is_fatal: bool
) -> None:
    script = Script(tmp_path, SETTINGS, num_prompts=80)
    fail_samples(script, 31, place)
    assert give_up_reason(script) is None
    fail_samples(script, 1, place)
    expected = (
        f"reward:em failed for 32 samples in a row at /home/me/reward.py:6: {DETAIL}. "
        "Repair the code, and start the run again."
    )
    assert give_up_reason(script) == (expected if is_fatal else None)


def test_success_begins_the_count_of_failures_again(tmp_path: Path) -> None:
    script = Script(tmp_path, SETTINGS, num_prompts=80)
    for _ in range(3):
        fail_samples(script, 31, "/home/me/reward.py:6")
        lease = script.demand("s1", num_groups=1)[0]
        script.deliver("s1", lease, lease.sample_indices[0])
    assert give_up_reason(script) is None


def test_operator_hears_once_of_a_neighbour_that_fails_every_sample(tmp_path: Path) -> None:
    script = Script(tmp_path, SETTINGS, num_prompts=80)
    numbers = []
    for number in (1, 1, 10):
        fail_samples(script, number, msgspec.UNSET)
        numbers.append(len(script.coordinator.status().notices))
    assert numbers == [0, 1, 1]
    assert script.coordinator.status().notices == (f"reward:em failed for 2 samples in a row: {DETAIL}",)


@pytest.mark.parametrize(
    ("log", "begins"),
    [
        ("environment/changed_turns", "An agent sent a turn of the policy back in other words"),
        ("environment/dropped_conversations", "An agent had several conversations in a sample"),
        ("rm/cut_texts", "A text was longer than a reward model reads"),
        ("rm/foreign_marks", "A reward model reads marks of the policy's chat template as plain text"),
    ],
)
def test_operator_hears_once_of_a_log_that_spoils_samples(tmp_path: Path, log: str, begins: str) -> None:
    script = Script(tmp_path, SETTINGS)
    (lease,) = script.demand("s1", num_groups=1)
    for index in lease.sample_indices[:2]:
        assert script.deliver("s1", lease, index, reward_logs={log: 1.0}).outcome == "accepted"
    (notice,) = script.coordinator.status().notices
    assert notice.startswith(begins)
