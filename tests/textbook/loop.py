"""The textbook: a synchronous loop over single trajectories, for GRPO, for DAPO and for PPO with a critic.

Forward passes are the learner's own, float32; all that makes an algorithm of them is written out here. Adam is torch's.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learner.models.critic import load_value_model
from learner.models.gradient import score_tokens
from learner.models.model_loading import load_model
from learner.models.settings import policy_settings
from learner.models.world import own_device
from protocol.settings.settings import Settings
from tests.textbook.answer import Answer


class Textbook:
    """GRPO, DAPO and PPO as their papers have them (arXiv:2402.03300, 2503.14476, 1707.06347)."""

    def __init__(self, settings: Settings, model: Path) -> None:
        self.settings = settings
        of_policy, has_critic = policy_settings(settings, model), settings.learner.recipe == "ppo"
        torch.manual_seed(of_policy.seed)  # adapters are drawn; a reference's own add nothing, their second half is 0
        self.policy: Any = load_model(of_policy).to(own_device())
        self.policy_adam = self._adam(self.policy, settings.learner.lr)
        self.reference: Any = load_model(of_policy).to(own_device()) if settings.kl.coefficient else None
        self.critic: Any = load_value_model(of_policy).to(own_device()) if has_critic else None
        self.critic_adam = self._adam(self.critic, settings.critic.lr) if has_critic else None
        self.beta = settings.kl.coefficient

    def logprobs(self, model: Any, answer: Answer) -> Tensor:
        return score_tokens(model, answer.batch(), self.settings.rollout.temperature, with_entropy=False)[0]

    def groups_of_use(self, groups: Iterator[Sequence[Answer]]) -> list[Sequence[Answer]]:
        """Return the step's groups: the next ones, of DAPO the next whose samples are not all right or all wrong."""
        kept: list[Sequence[Answer]] = []
        while len(kept) < self.settings.learner.groups_per_step:
            group, bounds = next(groups), self.settings.filter
            mean = sum(a.reward for a in group) / len(group)
            if not bounds.dynamic_sampling or bounds.low < mean < bounds.high:
                kept.append(group)
        return kept

    def step(self, groups: Sequence[Sequence[Answer]]) -> None:
        """Take a step's updates: mini-batches times epochs, of the critic first."""
        num_parts, num_epochs = self.settings.learner.num_mini_batches, self.settings.learner.num_epochs
        size = len(groups) // num_parts
        parts = [[a for g in groups[i * size : (i + 1) * size] for a in g] for i in range(num_parts)]
        for_critic: dict[int, Any] = {}
        if self.critic is None:
            for_policy = self._of_groups(groups)
        else:
            for_policy, for_critic = self._of_tokens([a for part in parts for a in _long_first(part)])
        for part in parts * num_epochs if for_critic else []:
            self._update_critic(part, for_critic)
        for part in parts * num_epochs:
            self._update_policy(part, for_policy)

    def step_in_parts(self, parts: Sequence[Sequence[Sequence[Answer]]]) -> None:
        """Take a step of one update whose groups come in parts: its gradient is divided when all are there."""
        for groups in parts:
            compared = self._of_groups(groups)
            self._add_gradient([a for group in groups for a in group], compared, 1.0)
        num_tokens = sum(int(a.mask.sum()) for groups in parts for group in groups for a in group)
        for weight in self.policy.parameters():
            weight.grad *= 1.0 / num_tokens
        self._update(self.policy, self.policy_adam)

    @torch.no_grad()
    def _of_groups(self, groups: Sequence[Sequence[Answer]]) -> dict[int, Any]:
        """Return (old logprobs, advantages) by answer: its reward among its group's, the same for each token."""
        found = {}
        for group in groups:
            rewards = torch.tensor([a.reward for a in group], dtype=torch.float64)
            for a, advantage in zip(group, (rewards - rewards.mean()) / (rewards.std() + 1e-6), strict=True):
                old = self.logprobs(self.policy, a)
                found[id(a)] = (old, advantage.float().to(old.device).expand(len(old)))
        return found

    @torch.no_grad()
    def _of_tokens(self, answers: Sequence[Answer]) -> tuple[dict[int, Any], dict[int, Any]]:
        """Return (old logprobs, advantages) and (old values, returns) by answer: GAE, gamma = lambda = 1, whitened."""
        old = {id(a): self.logprobs(self.policy, a) for a in answers}
        values = {id(a): self.critic(a.batch()) for a in answers}
        kl = {id(a): old[id(a)] - self.logprobs(self.reference, a) for a in answers}
        advantages, for_critic = {}, {}
        for a in answers:
            rewards = -self.beta * kl[id(a)].double().cpu()
            rewards[-1] += a.reward
            value = values[id(a)].double().cpu()
            advantage, following, behind = torch.zeros_like(value), 0.0, 0.0
            for t in reversed(range(len(value))):
                behind = float(rewards[t] + following - value[t]) + behind
                advantage[t], following = behind, float(value[t])
            advantages[id(a)] = advantage
            for_critic[id(a)] = (values[id(a)], (advantage + value).float().to(own_device()))
        together = torch.cat([advantages[id(a)] for a in answers])
        mean = together.sum() / len(together)
        deviation = ((together - mean).square().sum() / (len(together) - 1) + 1e-8).rsqrt()
        whitened = {key: ((a - mean) * deviation).float().to(own_device()) for key, a in advantages.items()}
        if self.settings.kl.target is not None:
            measured = float(torch.cat([kl[id(a)] for a in answers]).double().sum()) / len(together)
            error = min(0.2, max(-0.2, measured / self.settings.kl.target - 1.0))
            self.beta *= 1.0 + error * len(answers) / self.settings.kl.horizon
        return {key: (old[key], whitened[key]) for key in old}, for_critic

    def _update_policy(self, answers: Sequence[Answer], compared: dict[int, Any]) -> None:
        self._add_gradient(answers, compared, 1.0 / sum(int(a.mask.sum()) for a in answers))
        self._update(self.policy, self.policy_adam)

    def _add_gradient(self, answers: Sequence[Answer], compared: dict[int, Any], weight: float) -> None:
        given = self.settings.learner
        for a in _long_first(answers):
            old, advantages = compared[id(a)]
            ratio = (self.logprobs(self.policy, a) - old).exp()
            clipped = ratio.clamp(1.0 - given.clip_low, 1.0 + given.clip_high)
            gain = torch.minimum(ratio * advantages, clipped * advantages)
            if given.dual_clip is not None:
                gain = torch.where(advantages < 0, torch.maximum(gain, given.dual_clip * advantages), gain)
            torch.autograd.backward(-gain.sum() * weight)

    def _update_critic(self, answers: Sequence[Answer], compared: dict[int, Any]) -> None:
        num_tokens, reach = sum(int(a.mask.sum()) for a in answers), self.settings.critic.value_clip
        for a in _long_first(answers):
            old, returns = compared[id(a)]
            values = self.critic(a.batch())
            near = torch.minimum(torch.maximum(values, old - reach), old + reach)
            error = torch.maximum((values - returns).square(), (near - returns).square())
            torch.autograd.backward((0.5 * error).sum() * (1.0 / num_tokens))
        self._update(self.critic, self.critic_adam)

    def _adam(self, model: Any, lr: float) -> torch.optim.AdamW:
        given = self.settings.learner
        return torch.optim.AdamW(model.parameters(), lr, given.betas, weight_decay=given.weight_decay, fused=True)

    def _update(self, model: Any, adam: Any) -> None:
        torch.nn.utils.clip_grad_norm_(list(model.parameters()), self.settings.learner.max_grad_norm, foreach=True)
        adam.step()
        adam.zero_grad()


def _long_first(answers: Sequence[Answer]) -> list[Answer]:
    """Return the answers in the order in which the learner adds their gradients: sums round by their order."""
    return sorted(answers, key=lambda a: -len(a.tokens))
