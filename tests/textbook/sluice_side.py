"""Sluice's side of the comparison: its learner on one rank, given the answers of the plain loop step by step."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from learner.coordinator.groups.group import Group
from learner.coordinator.steps.step_batch import build_step
from learner.data.prompts import Prompt
from learner.objectives.policy_gradient import PolicyGradient
from learner.rank.rank import objective_of
from learner.rank.start import load_roles
from protocol.errors import OperatorError
from protocol.settings.settings import Settings
from protocol.wire.messages import Batch
from protocol.wire.trajectory import Trajectory, TrajectoryFacts, VersionSpan
from tests.textbook.answer import Answer


class SluiceSide:
    """The models of a run and its objective, as a rank has them; every rank of a world makes one."""

    def __init__(self, settings: Settings, model: Path) -> None:
        self.settings = settings
        named = {"reference.model": Path(settings.reference.model)} if settings.reference.model else {}
        self.roles = load_roles(settings, {"policy.model": model, **named}, None, lambda phase: None)
        self.metrics: list[dict[str, float]] = []  # of each step
        self._objective = objective_of(settings, self.roles, model)

    def step(self, number: int, groups: Sequence[Sequence[Answer]]) -> None:
        """Take a step on these groups, put together as the coordinator does it. Raises: OperatorError as `take`."""
        self._take(number, groups, None, is_last=True)

    def step_in_parts(self, number: int, parts: Sequence[Sequence[Sequence[Answer]]]) -> None:
        """Take a step whose groups come in parts. Raises: OperatorError as `take`."""
        for part, groups in enumerate(parts):
            self._take(number, groups, part, is_last=part == len(parts) - 1)

    def _take(self, number: int, groups: Sequence[Sequence[Answer]], part: int | None, *, is_last: bool) -> None:
        made = []
        for place, answers in enumerate(groups):
            group = Group(f"g{place}", Prompt(f"g{place}", "", None, {}), "train", 0, 0, len(answers))
            for index, answer in enumerate(answers):
                group.receive(self.trajectory(answer, number - 1, group=group.name, sample_index=index))
            made.append(group)
        step = build_step(number, number - 1, made, self.settings.learner, are_whole=self.settings.is_of_rows)
        share, _ = replace(step, part=part, is_last=is_last).share_of(dist.get_rank(), "r", 1, 1)
        self.take(share, [group.trajectories[index] for group in made for index in sorted(group.trajectories)])

    def take(self, share: Batch, trajectories: Sequence[Trajectory]) -> None:
        """Take a step as the coordinator hands it out. trajectories: of all ranks, by index into share.facts.

        Raises: OperatorError when no update was finite.
        """
        own = {index: trajectories[index] for part in share.micro_batches for index in part}
        if share.is_last is False:
            assert isinstance(self._objective, PolicyGradient)
            self._objective.take_part(share, own, share.step - 1)
            return
        outcome = self._objective.take_step(share, own, share.step - 1)
        if not outcome.applied:
            raise OperatorError(f"Step {share.step} was not applied: {outcome.detail}. Lower learner.lr.")
        self.metrics.append(outcome.metrics)

    def trajectory(self, answer: Answer, version: int, **facts: Any) -> Trajectory:
        """Return the answer as a rollout server sends it that holds this version. facts: over the usual ones."""
        behaviour = answer.behaviour
        if behaviour is None:
            behaviour = np.zeros(len(answer.tokens), np.float32)
            behaviour[answer.mask] = self.roles.policy.logprobs(answer.batch()).cpu().numpy()
        places = np.flatnonzero(answer.mask).tolist()
        known: dict[str, Any] = {"attempt": 1, "incarnation": 1, "server": "s1"}
        of_answer = TrajectoryFacts(
            kind="train",
            is_greedy=False,
            num_tokens=len(answer.tokens),
            num_prompt_tokens=places[0],
            num_turns=1,
            finish="stop",
            reward=answer.reward,
            reward_parts={},
            version_spans=[VersionSpan(place, place + 1, version) for place in places],
            started_at=0.0,
            finished_at=0.0,
            generate_s=0.0,
            environment_s=0.0,
            reward_s=0.0,
            **(known | facts),
        )
        return Trajectory(of_answer, answer.tokens, behaviour, answer.mask.astype(np.uint8))

    def weights(self) -> dict[str, Tensor]:
        """Return every trained weight, "ROLE/NAME" -> a copy of it in the CPU's memory. Collective."""
        found = {}
        for role, engine in (("policy", self.roles.policy), ("critic", self.roles.critic)):
            if engine is None:
                continue
            for name, weight in engine.weights():
                with engine.gather([weight]):
                    found[f"{role}/{name}"] = weight.detach().to("cpu", copy=True)
        return found
