"""The textbook: a synchronous loop over single trajectories, for GRPO and for PPO with a critic.

Forward passes are the learner's own; all that makes an algorithm of them is written out here. Adam is torch's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.models.critic import load_value_model
from learner.models.gradient import score_tokens
from learner.models.model_loading import load_model
from learner.models.settings import PolicySettings
from learner.packing.micro_batch import LearnerSample, MicroBatch, make_micro_batch

LR, CRITIC_LR = 1e-3, 2e-3
NUM_MINI_BATCHES, NUM_EPOCHS = 2, 2
KL_COEFFICIENT, KL_TARGET, KL_HORIZON = 0.05, 0.02, 40.0


@dataclass(frozen=True)
class Answer:
    """One sampled trajectory."""

    tokens: NDArray[np.int32]  # [T]
    mask: NDArray[np.bool_]  # [T], true where the model wrote the token
    reward: float

    def batch(self) -> MicroBatch:
        return make_micro_batch([LearnerSample(self.tokens, self.mask, np.zeros(len(self.tokens), np.float32))])


class Textbook:
    def __init__(self, settings: PolicySettings, with_critic: bool) -> None:
        self.policy: Any = load_model(settings)
        self.policy_adam = _adam(self.policy, LR)
        self.reference: Any = load_model(settings)
        self.critic: Any = load_value_model(settings) if with_critic else None
        self.critic_adam = _adam(self.critic, CRITIC_LR) if with_critic else None
        self.beta = KL_COEFFICIENT

    def logprobs(self, model: Any, answer: Answer) -> Tensor:
        return score_tokens(model, answer.batch(), 1.0, with_entropy=False)[0]

    def grpo_step(self, groups: Sequence[Sequence[Answer]]) -> None:
        """One update on all groups: the clipped ratio with its group's normalised reward, a mean over tokens."""
        old = {id(a): self.logprobs(self.policy, a).detach() for group in groups for a in group}
        losses = {}
        for group in groups:
            rewards = torch.tensor([a.reward for a in group], dtype=torch.float64)
            for a, advantage in zip(group, (rewards - rewards.mean()) / (rewards.std() + 1e-6), strict=True):
                losses[id(a)] = (old[id(a)], advantage.float().expand(len(old[id(a)])))
        self._update_policy([a for group in groups for a in group], losses)

    @torch.no_grad()
    def ppo_prepare(self, answers: Sequence[Answer]) -> tuple[dict[int, Any], dict[int, Any]]:
        """Return what PPO's updates compare with: (old logprobs, advantages) and (old values, returns) by answer."""
        old = {id(a): self.logprobs(self.policy, a) for a in answers}
        values = {id(a): self.critic(a.batch()) for a in answers}
        kl = {id(a): old[id(a)] - self.logprobs(self.reference, a) for a in answers}
        advantages, for_critic = {}, {}
        for a in answers:
            rewards = -self.beta * kl[id(a)].double()
            rewards[-1] += a.reward
            value = values[id(a)].double()
            advantage, following, behind = torch.zeros_like(value), 0.0, 0.0
            for t in reversed(range(len(value))):  # gamma = lambda = 1
                behind = float(rewards[t] + following - value[t]) + behind
                advantage[t], following = behind, float(value[t])
            advantages[id(a)] = advantage
            for_critic[id(a)] = (values[id(a)], (advantage + value).float())
        together = torch.cat([advantages[id(a)] for a in answers])
        mean = together.sum() / len(together)
        deviation = ((together - mean).square().sum() / (len(together) - 1) + 1e-8).rsqrt()
        for_policy = {id(a): (old[id(a)], ((advantages[id(a)] - mean) * deviation).float()) for a in answers}
        measured = float(torch.cat([kl[id(a)] for a in answers]).double().sum()) / len(together)
        error = min(0.2, max(-0.2, measured / KL_TARGET - 1.0))
        self.beta *= 1.0 + error * len(answers) / KL_HORIZON
        return for_policy, for_critic

    def ppo_step(self, groups: Sequence[Sequence[Answer]]) -> None:
        """Mini-batches times epochs of updates of the critic and of the policy."""
        size = len(groups) // NUM_MINI_BATCHES
        parts = [[a for g in groups[i * size : (i + 1) * size] for a in g] for i in range(NUM_MINI_BATCHES)]
        for_policy, for_critic = self.ppo_prepare([a for part in parts for a in _long_first(part)])
        for _ in range(NUM_EPOCHS):
            for part in parts:
                self._update_critic(part, for_critic)
        for _ in range(NUM_EPOCHS):
            for part in parts:
                self._update_policy(part, for_policy)

    def _update_policy(self, answers: Sequence[Answer], compared: dict[int, Any]) -> None:
        num_tokens = sum(int(a.mask.sum()) for a in answers)
        for a in _long_first(answers):
            old, advantages = compared[id(a)]
            ratio = (self.logprobs(self.policy, a) - old).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            (-gain.sum() * (1.0 / num_tokens)).backward()
        _step(self.policy, self.policy_adam)

    def _update_critic(self, answers: Sequence[Answer], compared: dict[int, Any]) -> None:
        num_tokens = sum(int(a.mask.sum()) for a in answers)
        for a in _long_first(answers):
            old, returns = compared[id(a)]
            values = self.critic(a.batch())
            near = torch.minimum(torch.maximum(values, old - 0.5), old + 0.5)
            error = torch.maximum((values - returns).square(), (near - returns).square())
            ((0.5 * error).sum() * (1.0 / num_tokens)).backward()
        _step(self.critic, self.critic_adam)


def _long_first(answers: Sequence[Answer]) -> list[Answer]:
    """Return the answers in the order in which the learner adds their gradients: sums round by their order."""
    return sorted(answers, key=lambda a: -len(a.tokens))


def _adam(model: Any, lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def _step(model: Any, adam: Any) -> None:
    torch.nn.utils.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
    adam.step()
    adam.zero_grad()
