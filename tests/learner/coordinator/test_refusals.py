"""Results that are not trained: their tokens are counted, their samples leased again."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from protocol.wire import messages as m
from tests.learner.coordinator.coordinator_script import Script


def wasted(script: Script) -> list[tuple[str, int]]:
    return script.rows("SELECT reason, num_tokens FROM waste")  # type: ignore[return-value]


def deliver(script: Script, lease: m.Lease, tokens: list[int]) -> m.Ack:
    """Deliver sample 0 of a lease with these four tokens; the policy wrote the last two."""
    trajectory = replace(script.trajectory("s1", lease, 0), tokens=np.array(tokens, np.int32))
    return script.send_trajectory("s1", trajectory)


def test_tokens_before_a_failure_are_wasted_in_each_attempt_and_none_without_a_token(script: Script) -> None:
    (lease,) = script.demand(num_groups=1)
    script.fail("s1", lease, 0, num_model_tokens=412)
    script.fail("s1", lease, 1, num_model_tokens=0)
    (again,) = script.demand(num_groups=1)
    script.fail("s1", again, 0, num_model_tokens=20)
    assert wasted(script) == [("failed", 412), ("failed", 20)]


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ([1, 2, 3, 4], "holds the token 4, the policy's vocabulary has 4"),
        ([2**31 - 1, 2, 3, 3], "holds the token 2147483647, the policy's vocabulary has 4"),  # in the prompt
        ([1, 2, -1, 3], "holds the token -1, expected 0 or more"),
    ],
)
def test_token_outside_the_vocabulary_is_rejected_and_its_sample_leased_again(
    tmp_path: Path, tokens: list[int], problem: str
) -> None:
    script = Script(tmp_path, vocab_size=4)
    (lease,) = script.demand(num_groups=1)
    ack = deliver(script, lease, tokens)
    assert (ack.outcome, ack.detail) == ("rejected", f"$.facts.tokens: {problem}")
    assert script.coordinator.counts["rejected:vocabulary"] == 1
    assert wasted(script) == [("rejected", 2)]
    (again,) = script.demand(num_groups=1)
    assert (again.group, again.attempt, again.sample_indices) == (lease.group, 2, [0])


@pytest.mark.parametrize(("vocab_size", "highest"), [(4, 3), (None, 2**31 - 1)])
def test_token_of_the_vocabulary_is_accepted(tmp_path: Path, vocab_size: int | None, highest: int) -> None:
    script = Script(tmp_path, vocab_size=vocab_size)
    (lease,) = script.demand(num_groups=1)
    assert deliver(script, lease, [0, 1, 2, highest]).outcome == "accepted"
