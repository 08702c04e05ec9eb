"""The models of a run by role, the objective's memory, and their places in a checkpoint."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from learner.models.critic import CriticEngine
from learner.models.origin import check_origin, earlier_facts, is_reference_lost, write_origin
from learner.models.policy import PolicyEngine
from learner.models.read_back import WrittenFiles
from learner.models.reference import BaseReference, ReferenceModel
from learner.models.settings import PolicySettings
from learner.models.start_check import check_model
from learner.models.world import first_problem
from protocol.errors import OperatorError

Role = Literal["policy", "critic", "reference"]
_MEMORY = "memory.json"
CRITIC_STEPS = "critic_steps"  # key of the memory: steps that trained the critic


@dataclass(frozen=True)
class Roles:
    """Every model that a rank holds."""

    policy: PolicyEngine
    critic: CriticEngine | None = None  # None: the algorithm has none
    reference: ReferenceModel | BaseReference | None = None  # model of the KL term; None: there is no such term
    memory: dict[str, float] = field(default_factory=dict)  # the objective's facts of earlier steps; same on every rank
    origin: dict[str, str] = field(default_factory=dict)  # facts of the first models, on rank 0; empty elsewhere

    @property
    def kept_reference(self) -> ReferenceModel | None:
        """The reference that checkpoints hold; None when another folder holds it, or there is none."""
        reference = self.reference
        return reference if isinstance(reference, ReferenceModel) and reference.is_kept else None

    def check_finite(self) -> None:
        """Raise on every rank when a weight or optimizer state is not finite. Raises: NonFiniteWeightsError."""
        self.policy.check_finite(with_optimizer=True)
        if self.critic is not None:
            self.critic.check_finite(with_optimizer=True)

    def save_state(self, folder: Path) -> WrittenFiles:
        """Write `folder`/ROLE for each role and the memory; returns this rank's files with tensors. Collective.

        A reference that the settings name by a folder is not saved. Raises: as `TrainedModel.save_state`.
        """
        written = self.policy.save_state(folder / "policy")
        if self.critic is not None:
            written |= self.critic.save_state(folder / "critic")
        if self.kept_reference is not None:
            written |= self.kept_reference.save_state(folder / "reference")
        if self.memory and dist.get_rank() == 0:
            (folder / _MEMORY).write_text(json.dumps(self.memory, sort_keys=True), encoding="utf-8")
        write_origin(folder, self.origin)
        return written

    def load_state(self, folder: Path, note: Callable[[str], None] = lambda text: None) -> None:
        """Load the files of `save_state`.

        A critic without a state stays as it is, and its warm-up begins. note: takes a sentence about such parts.
        Raises: OperatorError when the state is of other models.
        """
        problem = check_origin(folder, self.origin)
        if (problem := first_problem(problem) if dist.is_initialized() else problem) is not None:
            raise OperatorError(f"The checkpoint {folder.parent} cannot be resumed: {problem}")
        if not dist.is_initialized() or dist.get_rank() == 0:
            for fact, value in earlier_facts(folder, has_reference=self.reference is not None).items():
                self.origin.setdefault(fact, value)
        self.policy.load_state(folder / "policy")
        if self.critic is not None and (folder / "critic").is_dir():
            self.critic.load_state(folder / "critic")
        if isinstance(self.reference, ReferenceModel) and (folder / "reference").is_dir():
            self.reference.load_state(folder / "reference")
        elif self.reference is not None and is_reference_lost(folder):
            note("The KL was off at an earlier start, which saved no reference: it is the run's first one again.")
        if (folder / _MEMORY).is_file():
            self.memory.update(_read_memory(folder / _MEMORY))
        if self.critic is not None and not (folder / "critic").is_dir():
            note("The checkpoint has no critic: it starts untrained, with its warm-up (critic.warmup_steps).")
            self.memory[CRITIC_STEPS] = 0.0


def load_policy(settings: PolicySettings, *, name: str) -> PolicyEngine:
    """Return the policy after the check of its model. Collective.

    name: the operator's name of the model. Raises: as `check_model`.
    """
    method = check_model(settings, "language model", name=name)
    policy = PolicyEngine(settings)
    policy.scored.use(method)
    return policy


def _read_memory(path: Path) -> dict[str, float]:
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict) or not all(isinstance(value, int | float) for value in found.values()):
        raise OperatorError(f"{path} is not a JSON object of numbers. Resume from another checkpoint.")
    return {str(name): float(value) for name, value in found.items()}
