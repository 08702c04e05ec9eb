"""A user's own loss and correction are tried before the run: what they would train wrong in silence is refused."""

from pathlib import Path

import pytest
import torch

from learner.algorithms.by_name import algorithm_of
from protocol.errors import SettingsError
from protocol.settings.learner import LearnerSettings

OWN = """
import torch
from learner.algorithms.importance import Correction
from learner.algorithms.losses.policy_loss import PolicyLoss

def ratio_of(logprobs, old):
    return (logprobs - old).exp()

def ppo(logprobs, old, advantages, counts, clip):
    ratio = ratio_of(logprobs, old)
    cut = ratio.clamp(1 - clip.low, 1 + clip.high)
    return torch.maximum(-ratio * advantages, -cut * advantages), ratio != cut

def of_verl(old_log_prob, log_prob, advantages, counts, clip):
    return ppo(log_prob, old_log_prob, advantages, counts, clip)

def no_minus(logprobs, old, advantages, counts, clip):
    return ratio_of(logprobs, old) * advantages, logprobs > 0

def reinforce(logprobs, old, advantages, counts, clip):
    return -advantages * logprobs, logprobs > 0

said = PolicyLoss(reinforce, has_ratio=False)

def of_strong(logprobs, old, advantages, counts, clip):
    return -ratio_of(logprobs, old) * advantages * (advantages.abs() > 1.5), logprobs > 0

def of_strong_and_bonus(logprobs, old, advantages, counts, clip):
    return of_strong(logprobs, old, advantages, counts, clip)[0] + 0.1 * logprobs, logprobs > 0

with_ratio = PolicyLoss(of_strong_and_bonus, has_ratio=True)

def centred(logprobs, old, advantages, counts, clip):
    return ppo(logprobs, old, advantages - advantages.mean(), counts, clip)

def only_wrong(logprobs, old, advantages, counts, clip):
    return -ratio_of(logprobs, old) * advantages.clamp(max=0.0), logprobs > 0

def tapered(logprobs, old, advantages, counts, clip):
    kept = torch.where(advantages > 0, 1.0, ratio_of(logprobs, old).detach().clamp(max=1.0))
    return -kept * advantages * logprobs, logprobs > 0

def with_bonus(logprobs, old, advantages, counts, clip):
    return ppo(logprobs, old, advantages, counts, clip)[0] + 9.0 * logprobs, logprobs > 0

def random(logprobs, old, advantages, counts, clip):
    return -ratio_of(logprobs, old) * advantages * torch.rand(len(logprobs)), logprobs > 0

def on_gpu(logprobs, old, advantages, counts, clip):
    raise RuntimeError("no kernel for the CPU")

def truncated(weight, counts, band):
    return weight.clamp(max=2.0)

def of_answers(weight, counts, band):
    return torch.cat([part.log().sum().exp().expand_as(part) for part in weight.split(counts)])

def share(weight, counts, band):
    return truncated(weight, counts, band) / weight

def mask(weight, counts, band):
    return weight < 0.9

weights = Correction(truncated, is_weighted=False)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return str(path)


@pytest.mark.parametrize("name", ["of_verl", "no_minus"])
def test_loss_that_trains_away_from_positive_advantages_is_refused(own: str, name: str) -> None:
    with pytest.raises(SettingsError, match=rf"{name} makes tokens of a positive advantage less likely"):
        algorithm_of(LearnerSettings(loss=f"{own}:{name}"))


def test_function_without_the_ratio_is_refused_where_the_correction_would_need_it(own: str) -> None:
    with pytest.raises(
        SettingsError, match=r"the same values for other old logprobs in a trial.* PolicyLoss\(of_tokens=.., has"
    ):
        algorithm_of(LearnerSettings(loss=f"{own}:reinforce"))
    algorithm_of(LearnerSettings(loss=f"{own}:reinforce", correction="none"))
    algorithm_of(LearnerSettings(loss=f"{own}:reinforce", correction="geo_mask"))
    assert not algorithm_of(LearnerSettings(loss=f"{own}:said")).loss.has_ratio


@pytest.mark.parametrize(
    "name", ["ppo", "centred", "only_wrong", "tapered", "with_bonus", "random", "on_gpu", "of_strong", "with_ratio"]
)
def test_losses_of_other_forms_are_taken(own: str, name: str) -> None:
    before = torch.get_rng_state()
    algorithm_of(LearnerSettings(loss=f"{own}:{name}"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["truncated", "of_answers"])
def test_correction_that_returns_the_weight_itself_is_refused(own: str, name: str) -> None:
    with pytest.raises(SettingsError, match=rf"{name} returned 0.8 for a weight of 0.8, expected the share of it"):
        algorithm_of(LearnerSettings(correction=f"{own}:{name}"))


@pytest.mark.parametrize("name", ["share", "mask", "weights"])
def test_corrections_that_return_a_share_are_taken(own: str, name: str) -> None:
    algorithm_of(LearnerSettings(correction=f"{own}:{name}"))
