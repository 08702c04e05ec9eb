"""A server that lives and fails what it is leased: prompts go elsewhere before they are given up."""

from pathlib import Path

import pytest

from protocol.wire import messages as m
from tests.learner.coordinator.coordinator_script import Script, settings_of


def test_server_that_fails_all_at_once_costs_no_prompt_while_another_one_works(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.demand("s2", num_groups=0)
    for _ in range(10):  # it always has room
        for lease in script.demand("s1"):
            for index in lease.sample_indices:
                script.fail("s1", lease, index, "no module named numpy")
    for lease in script.demand("s2"):
        script.finish("s2", lease)
    assert "skipped" not in script.states()
    assert script.states()["ready"] == 4  # the whole window


def test_prompt_that_fails_everywhere_is_given_up_after_three_failures(tmp_path: Path) -> None:
    script = Script(tmp_path)
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


def test_prompt_that_failed_waits_no_longer_for_a_server_that_is_gone(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.demand("s2", num_groups=0)
    (lease,) = script.demand("s1", num_groups=1)
    script.fail("s1", lease, 0)
    script.coordinator.lose_server("s2", "it died")
    (again, *_) = script.demand("s1", num_groups=1)
    assert again.group == lease.group


def test_prompt_that_failed_waits_for_a_server_that_stands_still_for_half_a_minute_at_most(tmp_path: Path) -> None:
    script = Script(tmp_path)
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
    assert reason.startswith(
        "the last 6 prompts were skipped, one after the other, as many as data.train has or more. "
    )
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
