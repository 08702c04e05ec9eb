"""The log ratio of two log-probabilities."""

import torch

from learner.algorithms.ratio import log_ratio


def test_log_ratio_stays_within_20() -> None:
    logprobs, old = torch.tensor([0.0, -500.0, -1.0]), torch.tensor([-500.0, 0.0, -1.5])
    assert log_ratio(logprobs, old).tolist() == [20.0, -20.0, 0.5]
