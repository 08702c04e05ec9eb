"""The models of a run by what they are for. Today a run has one, the policy; a role's state has a folder of its own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from learner.models.isolation import check_isolation
from learner.models.policy import PolicyEngine
from learner.models.scoring.choose_way import choose_way
from learner.models.settings import PolicySettings

Role = Literal["policy"]


@dataclass(frozen=True)
class Roles:
    """Every model that a rank holds."""

    policy: PolicyEngine  # what is trained, pushed and exported

    def save_state(self, folder: Path) -> None:
        """Write `folder`/ROLE for each role; all ranks together. Raises: OSError when the disk refuses."""
        self.policy.save_state(folder / "policy")

    def load_state(self, folder: Path) -> None:
        """Read what `save_state` wrote, or a policy's state that lies in `folder` itself, as it did before roles.

        Raises: OperatorError when it is not of these models.
        """
        of_policy = folder / "policy"
        self.policy.load_state(of_policy if of_policy.is_dir() else folder)


def load_policy(settings: PolicySettings, *, name: str, micro_batch_tokens: int) -> PolicyEngine:
    """Return the policy, once it is seen to compute each trajectory by itself. All ranks call it together.

    name: of the model, as the operator knows it. Raises: OperatorError when it does not.
    """
    policy = PolicyEngine(settings)
    choose_way(policy.scored, policy.logprobs, name=name, dtype=settings.dtype)
    check_isolation(
        policy.logprobs, policy.vocab_size, name=name, dtype=settings.dtype, micro_batch_tokens=micro_batch_tokens
    )
    return policy
