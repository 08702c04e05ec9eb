"""Prompts that are all given up: a run that would go on so in every epoch ends with the reason."""

from pathlib import Path

import pytest

from protocol.wire import messages as m
from tests.learner.coordinator.coordinator_script import Script, settings_of

# A window of four groups, and six prompts.
SETTINGS = settings_of(run={"max_steps": 50})


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path, SETTINGS, num_prompts=6)


def give_up(script: Script, num_groups: int) -> None:
    """Fail the first sample of so many groups as often as it is tried."""
    for _ in range(num_groups):
        for _ in range(3):
            (lease,) = script.demand("s1", num_groups=1)
            script.fail("s1", lease, 0)


def test_run_ends_when_as_many_prompts_in_a_row_were_given_up_as_there_are(script: Script) -> None:
    give_up(script, 5)
    script.advance()
    assert script.coordinator.status().gave_up is None
    give_up(script, 1)
    script.advance()
    reason = script.coordinator.status().gave_up
    assert reason is not None
    assert reason.startswith(
        "the last 6 prompts were skipped, one after the other, as many as data.train has or more. "
    )
    assert "sample 0: reward:em: 503; reward:em: 503; reward:em: 503. Repair the cause" in reason
    (answer,) = script.ask(1)
    assert isinstance(answer, m.RunEnd)


def test_group_that_came_back_begins_the_count_anew(script: Script) -> None:
    give_up(script, 5)
    (lease,) = script.demand("s1", num_groups=1)
    script.finish("s1", lease)
    give_up(script, 5)
    script.advance()
    assert script.coordinator.status().gave_up is None
