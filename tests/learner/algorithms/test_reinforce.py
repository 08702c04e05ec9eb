"""REINFORCE's loss."""

import torch

from learner.algorithms.losses.policy_loss import Clip
from learner.algorithms.losses.reinforce import reinforce_loss


def test_reinforce_is_the_negative_logprob_times_the_advantage() -> None:
    logprobs, old = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-9.0, 0.0, -0.5])
    loss, is_clipped = reinforce_loss(logprobs, old, torch.tensor([2.0, -3.0, 0.0]), (3,), Clip(0.2, 0.2, 3.0))
    assert loss.tolist() == [2.0, -6.0, 0.0]
    assert is_clipped.tolist() == [False, False, False]
