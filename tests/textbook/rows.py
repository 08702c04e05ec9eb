"""The textbook of learning from rows: supervised fine-tuning and DPO, one row or pair at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from learner.models.gradient import score_tokens
from learner.models.micro_batch import LearnerSample, make_micro_batch
from learner.models.model_loading import load_model
from learner.models.settings import policy_settings
from learner.models.world import own_device
from protocol.settings.settings import Settings
from tests.textbook.answer import Answer


class Rows:
    """A row is a group of one answer; a pair is a group of two, the chosen one first (arXiv:2305.18290)."""

    critic = None

    def __init__(self, settings: Settings, model: Path) -> None:
        self.settings, of_policy = settings, policy_settings(settings, model)
        self.policy: Any = load_model(of_policy).to(own_device())
        self.reference: Any = load_model(of_policy).to(own_device())
        given = settings.learner
        parameters = list(self.policy.parameters())
        self.adam = torch.optim.AdamW(parameters, given.lr, given.betas, weight_decay=given.weight_decay, fused=True)

    def step(self, groups: Sequence[Sequence[Answer]]) -> None:
        """Take a step on these rows or pairs; the longest come first, because sums round by their order."""
        loss_of, num = (self._of_pair, len(groups)) if self.settings.objective == "dpo" else (self._of_row, 0)
        num = num or sum(int(answer.mask.sum()) for group in groups for answer in group)
        for group in sorted(groups, key=lambda group: -sum(len(answer.tokens) for answer in group)):
            torch.autograd.backward(loss_of(group) * (1.0 / num))
        torch.nn.utils.clip_grad_norm_(
            list(self.policy.parameters()), self.settings.learner.max_grad_norm, foreach=True
        )
        self.adam.step()
        self.adam.zero_grad()

    def _of_row(self, row: Sequence[Answer]) -> Tensor:
        return -torch.cat(self._logprobs(self.policy, row)).sum()

    def _of_pair(self, pair: Sequence[Answer]) -> Tensor:
        with torch.no_grad():
            before = self._logprobs(self.reference, pair)
        gains = [
            now.double().sum() - first.double().sum()
            for now, first in zip(self._logprobs(self.policy, pair), before, strict=True)
        ]
        return -logsigmoid(self.settings.preference.beta * (gains[0] - gains[1]))

    def _logprobs(self, model: Any, answers: Sequence[Answer]) -> list[Tensor]:
        """Return the logprobs of each answer's tokens, from one forward pass of all."""
        samples = [
            LearnerSample(each.tokens, each.mask, np.zeros(len(each.tokens), np.float32), number=number)
            for number, each in enumerate(answers)
        ]
        batch = make_micro_batch(samples).to(own_device())
        found = torch.split(score_tokens(model, batch, 1.0, with_entropy=False)[0], list(batch.counts))
        return [part for _, part in sorted(zip(batch.numbers, found, strict=True), key=lambda pair: pair[0])]
