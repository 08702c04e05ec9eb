"""What is checked before anything starts: model, prompts, disk. A mistake is one sentence and leaves nothing behind.

Imports neither torch nor transformers.
"""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from learner.disk.model_folder import (
    BYTES,
    count_parameters,
    find_model,
    find_named_model,
    model_digest,
    read_max_positions,
    read_vocab_size,
)
from learner.objectives.needs import needs_of
from learner.run.checks.prompt_checks import TrainPrompts, check_held_out, read_train_prompts
from learner.run.checks.user_code import check_user_code
from learner.run.start import RunStart, plan_start
from protocol.errors import OperatorError, SettingsError
from protocol.settings.settings import Settings


@dataclass(frozen=True)
class Inspected:
    """A run that passed every check made before anything starts."""

    settings: Settings  # as they were given
    model: Path  # local folder
    start: RunStart  # where the run starts from
    train: TrainPrompts | None  # None for a warm start alone


def inspect(settings: Settings) -> Inspected:
    """Return the run that these settings describe; starts nothing. Raises: SettingsError or OperatorError."""
    model = find_model(settings)
    check_other_models(settings)
    check_warm_start(settings)
    check_user_code(settings)
    start = plan_start(settings.run, model_digest(model))
    check_positions(model, settings)
    check_logit_bias(model, settings)
    has_prompts = settings.data.train or needs_of(settings).prompts
    train = read_train_prompts(settings, model, start) if has_prompts else None
    check_held_out(settings, model)
    # The newest proven one stays beside the newest.
    num_kept = settings.learner.keep_checkpoints + settings.learner.prove_checkpoints
    check_disk(start.folder, model, settings.policy.dtype, num_kept)
    return Inspected(settings, model, start, train)


def check_other_models(settings: Settings) -> None:
    """Raise SettingsError when a model that the settings name beside the policy is not there."""
    for setting, name in (("critic.model", settings.critic.model), ("reference.model", settings.reference.model)):
        if name:
            find_named_model(setting, name)


def check_positions(model: Path, settings: Settings) -> None:
    """Raise SettingsError for a context that is longer than the model's: the engine would not start."""
    given, most = settings.rollout.max_context_tokens, read_max_positions(model)
    if most is not None and given > most and needs_of(settings).rollouts and not settings.rollout.engine_args:
        raise SettingsError(
            f"settings: rollout.max_context_tokens = {given}, and policy.model has {most} positions. Set it to {most} "
            "or less."
        )


def check_logit_bias(model: Path, settings: Settings) -> None:
    """Raise SettingsError for a token that the model does not have: the engine would refuse every sample."""
    num_tokens = read_vocab_size(model)
    if num_tokens is None:
        return
    if outside := [token for token in settings.sampling.logit_bias if token >= num_tokens]:
        raise SettingsError(
            f"settings: sampling.logit_bias names token {outside[0]}, and policy.model has {num_tokens} tokens, 0 to "
            f"{num_tokens - 1}. Leave it out, or give the token's id in this model."
        )


def check_warm_start(settings: Settings) -> None:
    """Raise SettingsError when the demonstrations are not there; their rows are read when the warm start begins."""
    path = settings.policy.warm_start.data
    if path is not None and not Path(path).is_file():
        raise SettingsError(
            f"settings: policy.warm_start.data = {path} does not exist. Give a JSONL file, or null for no warm start."
        )


def check_disk(folder: Path, model: Path, dtype: str, num_checkpoints: int) -> None:
    """Raise OperatorError when the disk cannot hold the run's checkpoints, or the folder cannot be written."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    try:
        # Tried, not read from permissions: root has them all, on a read-only disk too.
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise OperatorError(
            f"{existing} cannot be written: {error.strerror}. Set run.dir to a folder of your own."
        ) from None
    # Master weights and two AdamW moments in float32 and the model as it is served, for each kept checkpoint and the
    # one being written.
    needed = (num_checkpoints + 1) * count_parameters(model) * (12 + BYTES[dtype]) + (64 << 20)
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise OperatorError(
            f"{existing} has {free >> 20} MiB free; this run's checkpoints need about {needed >> 20} MiB. "
            "Free some, set run.dir to a larger disk, or lower learner.keep_checkpoints."
        )
