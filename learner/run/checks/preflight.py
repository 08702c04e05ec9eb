"""Checks before anything starts: model, prompts, disk. A mistake is reported in one sentence and leaves no file.

Imports neither torch nor transformers.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from learner.data.sft_forms import describe_forms, read_demonstrations
from learner.disk.model_folder import (
    find_model,
    find_named_model,
    model_digest,
    read_max_positions,
    read_vocab_size,
)
from learner.disk.run_folder import SETTINGS
from learner.plan.memory import read_sizes
from learner.plan.needs import needs_of
from learner.run.checks.disk import check_disk
from learner.run.checks.prompt_checks import TrainPrompts, check_held_out, read_train_prompts, settings_of_epochs
from learner.run.checks.user_code import check_user_code
from learner.run.copied_start import start_with_copies
from learner.run.start import RunStart, plan_start
from protocol.errors import SettingsError
from protocol.settings.effects import describe_surprises
from protocol.settings.loader import describe_settings, load_saved_settings
from protocol.settings.settings import Settings

_OF_A_START = ("run.name", "run.dir", "run.resume")  # settings that change nothing about a run
_MOST_SHOWN = 8


@dataclass(frozen=True)
class CheckedRun:
    """A run that passed every check made before anything starts."""

    model: Path  # local folder
    start: RunStart
    train: TrainPrompts | None  # prompts; None for a warm start alone
    notices: list[str]  # messages for the user before the run begins, a sentence each


def resolve_settings(settings: Settings) -> Settings:
    """Return the settings with what follows from model and prompts: run.max_steps, and a context that the model has.

    A rollout.max_context_tokens that nobody gave is not above the model's positions.
    """
    rollout = settings.rollout
    if "max_context_tokens" not in rollout.model_fields_set:
        most = read_max_positions(find_model(settings))
        if most is not None and rollout.max_response_tokens < most < rollout.max_context_tokens:
            rollout = rollout.model_copy(update={"max_context_tokens": most})
    return settings_of_epochs(settings.model_copy(update={"rollout": rollout}))


def check_run(settings: Settings, *, is_fetching: bool = False) -> CheckedRun:
    """Return the run that these settings describe; starts nothing. Raises: SettingsError or OperatorError.

    is_fetching: fetch the run's newest checkpoint if learner.copy_checkpoints_to has a newer one.
    """
    model = find_model(settings)
    check_other_models(settings)
    demonstrations = check_warm_start(settings)
    check_user_code(settings)
    check_positions(model, settings)
    check_logit_bias(model, settings)
    digest = model_digest(model)
    start = start_with_copies(settings, digest) if is_fetching else plan_start(settings.run, digest)
    has_prompts = settings.data.train or needs_of(settings).prompts
    train = read_train_prompts(settings, model, start) if has_prompts else None
    check_held_out(settings, model)
    check_disk(start.folder, settings, read_sizes(settings, model))
    data_notices = (train and train.notice, demonstrations)
    notices = (start.notice, notice_changes(settings, start), *data_notices, *describe_surprises(settings))
    return CheckedRun(model, start, train, [notice for notice in notices if notice])


def notice_changes(settings: Settings, start: RunStart) -> str | None:
    """Return a notice with the settings that differ from the run's last start; None when it is new or none differs."""
    saved = start.folder / SETTINGS
    if start.checkpoint is None or not saved.is_file():
        return None
    before = {name: value for name, value, _ in describe_settings(load_saved_settings(saved))}
    changed = [
        f"{name} {before[name]} -> {value}"
        for name, value, _ in describe_settings(settings)
        if name not in _OF_A_START and before.get(name, value) != value
    ]
    if not changed:
        return None
    more = f", and {len(changed) - _MOST_SHOWN} more" if len(changed) > _MOST_SHOWN else ""
    return f"Changed since the last start: {', '.join(changed[:_MOST_SHOWN])}{more}."


def check_other_models(settings: Settings) -> None:
    """Raise SettingsError when a critic or reference that the settings name does not exist."""
    for setting, name in (("critic.model", settings.critic.model), ("reference.model", settings.reference.model)):
        if name:
            find_named_model(setting, name)


def check_positions(model: Path, settings: Settings) -> None:
    """Raise SettingsError for a longer context than the model's: the engine would not start."""
    given, most = settings.rollout.max_context_tokens, read_max_positions(model)
    if most is not None and given > most and needs_of(settings).rollouts and not settings.rollout.engine_args:
        raise SettingsError(
            f"settings: rollout.max_context_tokens = {given}, and policy.model has {most} positions. Set it to {most} "
            "or less."
        )


def check_logit_bias(model: Path, settings: Settings) -> None:
    """Raise SettingsError for a token outside the vocabulary: the engine would refuse every sample."""
    num_tokens = read_vocab_size(model)
    if num_tokens is None:
        return
    if outside := [token for token in settings.sampling.logit_bias if token >= num_tokens]:
        raise SettingsError(
            f"settings: sampling.logit_bias names token {outside[0]}, and policy.model has {num_tokens} tokens, 0 to "
            f"{num_tokens - 1}. Leave it out, or give the token's id in this model."
        )


def check_warm_start(settings: Settings) -> str | None:
    """Return the forms of the demonstrations, in words; None without a warm start.

    Raises: SettingsError with file and row for an unusable one.
    """
    path = settings.policy.warm_start.data
    if path is None:
        return None
    if not Path(path).is_file():
        raise SettingsError(
            f"settings: policy.warm_start.data = {path} does not exist. Give a JSONL or Parquet file, or null for no "
            "warm start."
        )
    return f"policy.warm_start.data has {describe_forms(Counter(row.form for row in read_demonstrations(Path(path))))}."
