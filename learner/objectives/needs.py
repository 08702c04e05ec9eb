"""What each objective of a run needs beside its learner ranks, known before anything of it is loaded: no torch here."""

from collections.abc import Iterable
from dataclasses import dataclass

from protocol.settings.algorithm.names import ADVANTAGES_OF_TOKENS
from protocol.settings.settings import Settings


@dataclass(frozen=True)
class Needs:
    """What is checked, started and attached for an objective."""

    prompts: bool  # data.train
    rollouts: bool  # rollout servers, and the reward services and retrievers that their samples ask


NEEDS = {
    "supervised": Needs(prompts=False, rollouts=False),  # objectives/supervised.py, on the rows of the warm start
    "policy_gradient": Needs(prompts=True, rollouts=True),  # objectives/policy_gradient.py
    "evaluation": Needs(prompts=False, rollouts=True),  # nothing is optimised: held-out prompts are sampled and scored
}


def needs_of(settings: Settings) -> Needs:
    """Return what a run needs for all that it does together."""
    needs = [NEEDS[name] for name in _objectives(settings)]
    return Needs(prompts=any(need.prompts for need in needs), rollouts=any(need.rollouts for need in needs))


def is_trained(settings: Settings) -> bool:
    """Return whether a run changes its model at all: one that only scores it has nothing to save."""
    return bool(settings.run.max_steps) or settings.policy.warm_start.data is not None


def needs_critic(settings: Settings) -> bool:
    """Return whether a critic is trained beside the policy; of a user's own advantage that is not known here."""
    return ADVANTAGES_OF_TOKENS.get(settings.learner.advantage or "", False)


def needs_reference(settings: Settings) -> bool:
    """Return whether a step compares the policy with a reference."""
    return settings.kl.coefficient > 0.0


def is_reference_the_base(settings: Settings) -> bool:
    """Return whether the reference is the policy with its LoRA adapters off: the model that the run began with.

    Another model, and one that becomes the policy again and again, are models of their own.
    """
    return (
        bool(settings.policy.lora.rank) and not settings.reference.model and not settings.reference.refresh_every_steps
    )


def _objectives(settings: Settings) -> Iterable[str]:
    """Yield what a run does, in order. One that does nothing still syncs its servers with its model."""
    is_warm_started = settings.policy.warm_start.data is not None
    if is_warm_started:
        yield "supervised"
    if settings.eval.every_steps:
        yield "evaluation"
    if settings.run.max_steps or not (is_warm_started or settings.eval.every_steps):
        yield "policy_gradient"
