"""Requirements of each objective, known before a model is loaded. Imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass

from protocol.settings.learner import ADVANTAGES_OF_TOKENS
from protocol.settings.settings import Settings


@dataclass(frozen=True)
class Needs:
    """Inputs and services that an objective requires."""

    prompts: bool
    rollouts: bool  # rollout servers, reward services and retrievers


NEEDS = {
    "supervised": Needs(prompts=False, rollouts=False),  # objectives/supervised.py, on the rows of the warm start
    "sft": Needs(prompts=True, rollouts=False),  # objectives/supervised.py, on the rows of data.train
    "dpo": Needs(prompts=True, rollouts=False),  # objectives/preference.py, on the rows of data.train
    "kto": Needs(prompts=True, rollouts=False),  # objectives/kto.py, on the rows of data.train
    "distill": Needs(prompts=True, rollouts=False),  # objectives/distill.py, on the rows of data.train
    "reward_model": Needs(prompts=True, rollouts=False),  # objectives/reward_model.py, on the rows of data.train
    "policy_gradient": Needs(prompts=True, rollouts=True),  # objectives/policy_gradient.py
    "evaluation": Needs(prompts=False, rollouts=True),  # samples and scores held-out prompts, trains nothing
}


def needs_of(settings: Settings) -> Needs:
    """Return the requirements of all objectives of a run together."""
    needs = [NEEDS[name] for name in _objectives(settings)]
    return Needs(prompts=any(need.prompts for need in needs), rollouts=any(need.rollouts for need in needs))


def is_trained(settings: Settings) -> bool:
    """Return whether a run changes its model. A run that only evaluates saves nothing."""
    return bool(settings.run.max_steps) or settings.policy.warm_start.data is not None


def needs_critic(settings: Settings) -> bool:
    """Return whether a critic is trained. Unknown for a user's own advantage: False."""
    return is_trained(settings) and ADVANTAGES_OF_TOKENS.get(settings.learner.advantage or "", False)


def takes_parts(settings: Settings) -> bool:
    """Return whether a step begins with the groups that are ready: nothing in it needs its other groups.

    Unknown for a user's own advantage: as if it were not whitened and had no critic.
    """
    learner = settings.learner
    is_usually_whitened = learner.advantage in (*ADVANTAGES_OF_TOKENS, "reinforce_pp_baseline")
    is_whitened = is_usually_whitened if learner.whiten is None else learner.whiten
    has_several_updates = learner.num_mini_batches * learner.num_epochs > 1
    needs_all = is_whitened or has_several_updates or settings.rewards.normalize or learner.router_aux_loss
    is_costly = settings.reference.offload and needs_reference(settings)
    return learner.stream and not (needs_all or is_costly or needs_critic(settings) or learner.keep_batches)


def needs_reference(settings: Settings) -> bool:
    """Return whether a step compares the policy with a reference."""
    is_compared = settings.objective in ("dpo", "kto") and settings.preference.has_reference
    is_compared |= settings.objective == "distill"
    return is_trained(settings) and (settings.kl.coefficient > 0.0 or is_compared)


def is_reference_the_base(settings: Settings) -> bool:
    """Return whether the reference is the policy with its LoRA adapters off.

    A reference of another model, or one that is refreshed, is loaded as a model of its own.
    """
    return (
        bool(settings.policy.lora.rank) and not settings.reference.model and not settings.reference.refresh_every_steps
    )


def _objectives(settings: Settings) -> Iterable[str]:
    """Yield a run's objectives in order. A run without steps still syncs its servers with its model."""
    if settings.is_of_rows:
        yield settings.objective
        return
    is_warm_started = settings.policy.warm_start.data is not None
    if is_warm_started:
        yield "supervised"
    if settings.eval.every_steps:
        yield "evaluation"
    if settings.run.max_steps or not (is_warm_started or settings.eval.every_steps):
        yield "policy_gradient"
