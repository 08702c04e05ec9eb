"""What a server's logprobs of the probe say about its weights."""

import math
from typing import Any, cast

import numpy as np
import pytest
import torch

from learner.models.policy import PolicyEngine
from learner.rank.push import Probe
from protocol.settings.settings import Settings

NUM = 39  # logprobs of a probe of 40 tokens


class Policy:
    """Computes `now` for every token."""

    vocab_size = 100

    def __init__(self) -> None:
        self.now = -4.0
        self.rounding = lambda: torch.zeros(NUM, dtype=torch.float64)

    def logprobs(self, batch: Any, temperature: float) -> torch.Tensor:
        return self.now + self.rounding()


def _probe(dtype: str = "float32", **weights: Any) -> tuple[Policy, Probe]:
    rollout = {"max_context_tokens": 41, "max_response_tokens": 8}
    given = {"policy": {"model": "m", "dtype": dtype}, "rollout": rollout, "weights": weights}
    policy = Policy()
    return policy, Probe(cast(PolicyEngine, policy), Settings.model_validate(given), range(100))


def _fault(probe: Probe, value: float) -> str | None:
    return probe.find_fault("s1", [value] * NUM)


def test_probe_leaves_room_for_a_token() -> None:
    assert _probe()[1].tokens == list(range(40))
    assert _probe(probe=False)[1].tokens == []


@pytest.mark.parametrize(
    ("logprobs", "fault"),
    [
        ([-4.0] * NUM, None),
        ([-4.0009] * NUM, None),
        (
            [-4.002] * NUM,
            r"differ by 0\.002 nats in the median, 0\.002 in the 95th percentile and up to 0\.002, allowed are 0\.001, "
            r"0\.003, 5\. Set weights\.probe_tolerance",
        ),
        ([-4.01] * 3 + [-4.0] * 36, r"0\.01 in the 95th percentile"),
        ([-8.9] + [-4.0] * 38, None),
        ([-9.1] + [-4.0] * 38, r"up to 5\.1,"),
        ([math.nan] + [-4.0] * 38, "up to nan,"),
        ([-4.0] * 3, r"^s1 answered 3 logprobs, expected 39$"),
    ],
)
def test_logprobs_off_by_more_than_the_tolerance_are_a_fault(logprobs: list[float], fault: str | None) -> None:
    _, probe = _probe()
    probe.compute_expected()
    found = probe.find_fault("s1", logprobs)
    if fault is None:
        assert found is None
    else:
        with pytest.raises(ValueError, match=fault):
            raise ValueError(found)


def test_weights_of_another_version_are_a_fault_far_below_the_tolerance() -> None:
    policy, probe = _probe()
    for value in (-4.0, -4.0005):
        policy.now = value
        probe.compute_expected()
        assert _fault(probe, value + 1e-6) is None
    policy.now = -4.001
    probe.compute_expected()

    assert _fault(probe, -4.00096) is None  # 8 % of the change
    assert "up to 0.0005, as if 100% of the push's change were missing" in str(_fault(probe, -4.0005))
    assert "as if 20% of the push" in str(_fault(probe, -4.0009))
    assert "as if -100% of the push" in str(_fault(probe, -4.0015))
    probe.compute_expected()  # the same weights are pushed once more
    assert "as if 100% of the push" in str(_fault(probe, -4.0005))


def test_noise_is_no_fault_where_the_push_changed_no_more_than_noise() -> None:
    policy, probe = _probe("bfloat16")
    for number in range(20):
        policy.now = -4.0 - 1e-4 * number
        probe.compute_expected()
        assert _fault(probe, policy.now + (0.004 if number == 0 else 0.2)) is None


def test_weights_that_were_left_behind_are_found_again_long_after_a_noisy_answer() -> None:
    policy, probe = _probe()
    probe.compute_expected()
    assert _fault(probe, policy.now + 9e-4) is None  # the first push: nothing to compare it with

    def left_behind() -> str | None:
        before = policy.now
        policy.now -= 5e-4
        probe.compute_expected()
        return _fault(probe, before)

    assert left_behind() is None
    for _ in range(300):
        assert _fault(probe, policy.now + 1e-6) is None
    assert "as if 100% of the push's change were missing" in str(left_behind())


def test_rounding_that_is_new_with_every_push_is_no_fault() -> None:
    rounding = np.random.default_rng(1)
    policy, probe = _probe("bfloat16")
    policy.rounding = lambda: torch.from_numpy(rounding.normal(0.0, 0.02, NUM))
    for _ in range(1000):
        probe.compute_expected()
        assert probe.find_fault("s1", (-4.0 + rounding.normal(0.0, 0.01, NUM)).tolist()) is None


def test_lone_token_that_the_server_sends_to_another_expert_is_no_fault() -> None:
    draw = np.random.default_rng(1)
    rollout = {"max_context_tokens": 300, "max_response_tokens": 8}
    policy = Policy()
    probe = Probe(
        cast(PolicyEngine, policy),
        Settings.model_validate({"policy": {"dtype": "bfloat16"}, "rollout": rollout}),
        range(136),
    )
    now = np.full(135, -8.0)
    policy.logprobs = lambda batch, temperature: torch.from_numpy(now.copy())  # type: ignore[method-assign]
    probe.compute_expected()
    assert probe.find_fault("s1", (now + draw.normal(0.0, 3e-4, 135)).tolist()) is None
    before = now.copy()
    now += draw.normal(0.0, 5e-3, 135)
    now[70] += 0.15  # through another expert than before
    probe.compute_expected()
    computed = now + draw.normal(0.0, 3e-4, 135)
    computed[70] -= 0.15  # the server does so one push later
    assert probe.find_fault("s1", computed.tolist()) is None
    assert "as if 100% of the push's change were missing" in str(probe.find_fault("s1", before.tolist()))
