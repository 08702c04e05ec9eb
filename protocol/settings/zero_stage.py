"""The ZeRO stage that runs, and the state that it can keep in host memory."""

from typing import Literal

from protocol.settings.section import ZeroStage
from protocol.settings.settings import Settings

Offload = Literal["none", "optimizer", "all"]


def zero_stage_of(requested: ZeroStage, dtype: str) -> ZeroStage:
    """Return the stage that runs. bfloat16 runs at 2 or above.

    DeepSpeed's stage 0 accumulates gradients in bfloat16, and the state of its optimizer for stage 1 cannot be saved.
    Stage 2 needs no more memory than either.
    """
    return 2 if requested < 2 and dtype == "bfloat16" else requested


def critic_zero(settings: Settings) -> tuple[ZeroStage, Offload]:
    """Return the critic's requested stage and its state in host memory.

    The stage limits `learner.offload` and `critic.offload`: optimizer state from 1 on, weights at 3.
    """
    critic, learner = settings.critic, settings.learner
    stage = learner.zero_stage if critic.zero_stage is None else critic.zero_stage
    runs = zero_stage_of(stage, settings.policy.dtype)
    if runs == 0 or (learner.offload == "none" and not critic.offload):
        return stage, "none"
    return stage, "all" if runs == 3 and learner.offload == "all" else "optimizer"
