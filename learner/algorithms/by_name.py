"""Every advantage, loss and correction by the name that settings give it."""

from collections.abc import Callable

from torch import Tensor

from learner.algorithms.advantages.dr_grpo import dr_grpo_advantages
from learner.algorithms.advantages.grpo import grpo_advantages
from learner.algorithms.advantages.rloo import rloo_advantages
from learner.algorithms.corrections.icepop import icepop_weights
from learner.algorithms.corrections.none import no_correction
from learner.algorithms.corrections.truncated import truncated_weights
from learner.algorithms.losses.clipped import Clip, ppo_loss
from learner.algorithms.losses.reinforce import reinforce_loss

ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
}


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Clip], tuple[Tensor, Tensor]]] = {
    "ppo": ppo_loss,
    "reinforce": reinforce_loss,
}


CORRECTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": no_correction,
    "tis": truncated_weights,
    "icepop": icepop_weights,
}
