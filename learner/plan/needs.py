"""Requirements of a run, known before a model is loaded. Imports no torch."""

from protocol.settings.learner import ADVANTAGES_OF_TOKENS
from protocol.settings.settings import Settings


def needs_prompts(settings: Settings) -> bool:
    """Return whether a run reads data.train. A warm start and an evaluation do not."""
    return settings.is_of_rows or _takes_steps(settings)


def needs_rollouts(settings: Settings) -> bool:
    """Return whether a run has rollout servers, reward services and retrievers."""
    return not settings.is_of_rows and (bool(settings.eval.every_steps) or _takes_steps(settings))


def _takes_steps(settings: Settings) -> bool:
    """Return whether samples are trained. A run without steps still syncs its servers with its model."""
    does_more = settings.policy.warm_start.data is not None or settings.eval.every_steps
    return bool(settings.run.max_steps) or not does_more


def is_trained(settings: Settings) -> bool:
    """Return whether a run changes its model. A run that only evaluates saves nothing."""
    return bool(settings.run.max_steps) or settings.policy.warm_start.data is not None


def needs_critic(settings: Settings) -> bool:
    """Return whether a critic is trained. Unknown for a user's own advantage: False."""
    return is_trained(settings) and ADVANTAGES_OF_TOKENS.get(settings.learner.advantage or "", False)


def takes_parts(settings: Settings, *, is_whitened: bool | None = None, has_critic: bool | None = None) -> bool:
    """Return whether a step begins with the groups that are ready: nothing in it needs its other groups.

    Those need them: a critic's updates, which follow the policy's; several updates; whitened advantages; normalised
    rewards; a router's loss, divided by all tokens. A reference in host memory would be copied to the device for each
    part, and a kept batch is whole.
    is_whitened, has_critic: of a user's own advantage, once it is loaded; None: it has neither.
    """
    learner = settings.learner
    if is_whitened is None:
        is_usual = learner.advantage in (*ADVANTAGES_OF_TOKENS, "reinforce_pp_baseline")
        is_whitened = is_usual if learner.whiten is None else learner.whiten
    has_critic = needs_critic(settings) if has_critic is None else has_critic
    has_several_updates = learner.num_mini_batches * learner.num_epochs > 1
    needs_all = is_whitened or has_critic or has_several_updates or settings.rewards.normalize
    is_costly = settings.reference.offload and needs_reference(settings)
    return learner.stream and not (needs_all or learner.router_aux_loss or is_costly or learner.keep_batches)


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


def is_reference_kept(settings: Settings) -> bool:
    """Return whether checkpoints hold a reference that is a model of its own: it changes, or no setting names it."""
    is_named = bool(settings.reference.model) or settings.policy.warm_start.data is None
    return bool(settings.reference.refresh_every_steps) or not is_named
