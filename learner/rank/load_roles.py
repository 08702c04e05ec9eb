"""The models of a run, loaded where it starts: each that the settings' algorithm asks for."""

from collections.abc import Callable, Mapping
from pathlib import Path

from learner.algorithms.by_name import algorithm_of
from learner.checkpoint.manifest import Checkpoint
from learner.models.base_reference import BaseReference
from learner.models.critic import CriticEngine
from learner.models.policy import PolicyEngine
from learner.models.reference import ReferenceModel
from learner.models.roles import Roles, load_policy
from learner.models.scoring.choose_way import choose_way
from learner.models.settings import critic_settings, policy_settings, reference_settings
from learner.objectives.warm_start import warm_start
from learner.plan.needs import is_reference_the_base, needs_reference
from protocol.errors import OperatorError
from protocol.settings.settings import Settings


def load_roles(
    settings: Settings, folders: Mapping[str, Path], checkpoint: Checkpoint | None, tell: Callable[[str], None]
) -> Roles:
    """Return the models as they are before training, or with weights that the checkpoint's are put over.

    folders: this node's folder of each model, by the setting that names it. tell: takes the rank's phase. Collective.
    """
    model = _first_policy(settings, folders["policy.model"], checkpoint, tell)
    tell("loading the policy")
    policy = load_policy(
        policy_settings(settings, model),
        name=settings.policy.model,
        micro_batch_tokens=settings.learner.micro_batch_tokens,
    )
    critic = _critic(settings, folders.get("critic.model", model), policy.vocab_size, tell)
    of_reference = folders.get("reference.model", model)
    roles = Roles(policy, critic, _reference(settings, of_reference, policy, checkpoint, tell))
    tell("the models are ready")
    return roles


def _first_policy(settings: Settings, model: Path, checkpoint: Checkpoint | None, tell: Callable[[str], None]) -> Path:
    """Return the folder that the run begins with. A checkpoint makes its warm start unneeded, but for a reference that
    is not in it."""
    is_in_checkpoint = checkpoint is not None and (
        not needs_reference(settings) or settings.reference.model or _holds_reference(checkpoint)
    )
    if settings.policy.warm_start.data is None or is_in_checkpoint:
        return model
    return warm_start(settings, model, tell)


def _critic(settings: Settings, model: Path, vocab_size: int, tell: Callable[[str], None]) -> CriticEngine | None:
    if not algorithm_of(settings.learner).advantage.needs_critic:
        return None
    tell("loading the critic")
    critic = CriticEngine(critic_settings(settings, model))
    if critic.vocab_size != vocab_size:
        raise OperatorError(
            f"critic.model = {settings.critic.model} has {critic.vocab_size} tokens and the policy {vocab_size}. "
            "Use a model with the policy's tokenizer, or leave critic.model empty."
        )
    return critic


def _reference(
    settings: Settings, model: Path, policy: PolicyEngine, checkpoint: Checkpoint | None, tell: Callable[[str], None]
) -> ReferenceModel | BaseReference | None:
    if not needs_reference(settings):
        return None
    if is_reference_the_base(settings) and not _holds_reference(checkpoint):
        return BaseReference(policy)
    tell("loading the reference")
    named = settings.reference.model
    is_named = bool(named) or settings.policy.warm_start.data is None
    reference = ReferenceModel(
        reference_settings(settings, model),
        is_offloaded=settings.reference.offload,
        is_kept=bool(settings.reference.refresh_every_steps) or not is_named or _holds_reference(checkpoint),
    )
    with reference.in_use():
        name = named or settings.policy.model
        choose_way(reference.scored, reference.logprobs, name=name, dtype=settings.policy.dtype)
    return reference


def _holds_reference(checkpoint: Checkpoint | None) -> bool:
    return checkpoint is not None and (checkpoint.path / "state" / "reference").is_dir()
