"""A server that lives and fails what it is leased: prompts go elsewhere before they are given up."""

from pathlib import Path

from tests.learner.coordinator.coordinator_script import Script


def test_prompt_that_failed_on_a_server_goes_out_to_another_one(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.demand("s2", num_groups=0)
    (lease,) = script.demand("s1", num_groups=1)
    script.fail("s1", lease, 0)
    assert lease.group not in {other.group for other in script.demand("s1", num_groups=100)}
    (again, *_) = script.demand("s2", num_groups=1)
    assert (again.group, again.sample_indices) == (lease.group, [0])


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
