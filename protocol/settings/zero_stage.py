"""Which ZeRO stage runs, and what may be kept in host memory at it."""

from typing import Literal

from protocol.settings.section import ZeroStage
from protocol.settings.settings import Settings

Offload = Literal["none", "optimizer", "all"]


def zero_stage_of(asked: ZeroStage, dtype: str) -> ZeroStage:
    """Return the stage that runs. bfloat16 runs at 2 or above.

    DeepSpeed's stage 0 adds up gradients in bfloat16; for its stage 1 it takes another optimizer, whose state lies
    elsewhere, so that nothing could be saved. Stage 2 keeps no more than either.
    """
    return 2 if asked < 2 and dtype == "bfloat16" else asked


def critic_zero(settings: Settings) -> tuple[ZeroStage, Offload]:
    """Return the critic's stage as it is asked for, and what of it is kept in host memory.

    The latter is what `learner.offload` or `critic.offload` says and its stage, which may be unlike the policy's,
    allows: optimizer state that ranks share from 1 on, weights at 3.
    """
    critic, learner = settings.critic, settings.learner
    stage = learner.zero_stage if critic.zero_stage is None else critic.zero_stage
    runs = zero_stage_of(stage, settings.policy.dtype)
    if runs == 0 or (learner.offload == "none" and not critic.offload):
        return stage, "none"
    return stage, "all" if runs == 3 and learner.offload == "all" else "optimizer"
