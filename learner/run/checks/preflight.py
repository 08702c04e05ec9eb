"""Checks before anything starts: model, prompts, disk. A mistake is reported in one sentence and leaves no file.

Imports neither torch nor transformers.
"""

import ast
import difflib
import importlib.util
import sqlite3
from collections import Counter
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from learner.checkpoint.manifest import Checkpoint
from learner.data.sft_forms import describe_forms, read_demonstrations
from learner.disk.model_folder import (
    changed_file,
    find_model,
    find_named_model,
    model_digest,
    read_max_positions,
    read_vocab_size,
)
from learner.disk.run_folder import LEDGER, SETTINGS, read_only_uri
from learner.live.tensorboard_log import import_writer
from learner.plan.memory import read_sizes
from learner.plan.needs import needs_prompts, needs_rollouts
from learner.run.checks.disk import check_disk
from learner.run.checks.prompt_checks import (
    TrainPrompts,
    check_held_out,
    read_train_prompts,
    settings_of_epochs,
    skipped_before,
)
from learner.run.checks.user_code import check_user_code
from learner.run.copied_start import start_with_copies
from learner.run.start import RunStart, plan_start
from protocol.errors import SettingsError
from protocol.settings.data import entries_of
from protocol.settings.effects import describe_surprises
from protocol.settings.loader import describe_settings, load_saved_settings
from protocol.settings.settings import Settings

_OF_A_START = ("run.name", "run.dir", "run.resume")  # settings that change nothing about a run
_OF_FIRST_WEIGHTS = ("policy.model", "policy.warm_start.", "critic.model")  # settings that a checkpoint replaces


@dataclass(frozen=True)
class CheckedRun:
    """A run that passed every check made before anything starts."""

    settings: Settings  # with run.max_steps and a context that follow from prompts and model
    model: Path  # local folder
    start: RunStart
    train: TrainPrompts | None  # prompts; None for a warm start alone
    notices: list[str]  # messages for the user before the run begins, a sentence each


def check_run(settings: Settings, *, is_fetching: bool = False) -> CheckedRun:
    """Return the run that these settings describe; starts nothing. Raises: SettingsError or OperatorError.

    is_fetching: fetch the run's newest checkpoint if learner.copy_checkpoints_to has a newer one.
    """
    model = find_model(settings)
    settings = resolve_context(settings, model)
    check_other_models(settings)
    demonstrations = check_warm_start(settings)
    check_user_code(settings)
    if settings.report.tensorboard:
        import_writer()
    check_positions(model, settings)
    check_engine_args(settings)
    check_logit_bias(model, settings)
    given, digest = settings, model_digest(model)
    settings, judged = settings_of_epochs(given, model)
    start = start_with_copies(settings, digest) if is_fetching else plan_start(settings.run, digest)
    if judged is not None and (before := skipped_before(start)):
        settings, judged = settings_of_epochs(given, model, before)
        if start.step >= settings.run.max_steps:  # complete: the next run skips rows of its own
            start = plan_start(settings.run, digest)
            settings, judged = settings_of_epochs(given, model, skipped_before(start))
    check_same_objective(settings, start)
    check_same_files(model, start)
    if judged is not None:
        check_same_batch(settings, start)
    has_prompts = settings.data.train or needs_prompts(settings)
    train = read_train_prompts(settings, model, start, judged) if has_prompts else None
    held_out = check_held_out(settings, model, train.index if train is not None else None)
    settings = resolve_rows(settings, model, max(held_out.longest, train.longest if train is not None else 0))
    check_other_positions(settings)
    check_disk(start.folder, settings, read_sizes(settings, model))
    of_epochs = (notice_small_epoch(settings, len(train.index)), notice_mixture(settings, train)) if train else ()
    data_notices = (train and train.notice, notice_passes(given), *of_epochs, *held_out.notices, demonstrations)
    # Answers are kept in a file of their own, not in the run: a later start does not begin again.
    resumed = start.notice if settings.eval.answers is None else notice_kept_answers(Path(settings.eval.answers))
    notices = (resumed, notice_changes(settings, start), *data_notices, *describe_surprises(settings))
    return CheckedRun(settings, model, start, train, [notice for notice in notices if notice])


def notice_kept_answers(path: Path) -> str | None:
    """Return a notice for a file of answers that has rows of an earlier start, or None."""
    has_rows = path.is_file() and path.stat().st_size > 0
    return f"{path} has rows already: they are kept, and only missing rows are sampled." if has_rows else None


def notice_small_epoch(settings: Settings, num_prompts: int) -> str | None:
    """Return a notice for steps that need each prompt several times, or None."""
    groups = settings.learner.groups_per_step
    if not settings.run.max_steps or groups <= num_prompts:
        return None
    epochs = groups / num_prompts
    return (
        f"learner.groups_per_step = {groups} is more than the {num_prompts} rows of data.train: a step takes "
        f"{epochs:.3g} epochs. Lower it, or give more rows."
    )


def notice_passes(settings: Settings) -> str | None:
    """Return a notice for run.max_epochs beside what draws further prompts in place of some, or None."""
    filtering = {
        "filter.dynamic_sampling": settings.filter.dynamic_sampling,
        "data.curriculum": settings.data.curriculum.is_on,
    }
    names = " and ".join(name for name, is_on in filtering.items() if is_on)
    if settings.run.max_epochs is None or settings.is_of_rows or not names:
        return None
    return (
        f"run.max_epochs = {settings.run.max_epochs:g} sets the number of steps. Further prompts replace those that "
        f"{names} leaves out, so the passes over data.train may be more: progress/epoch in the metrics counts them."
    )


def notice_mixture(settings: Settings, train: TrainPrompts) -> str | None:
    """Return a notice with the rows that a run takes from each weighted entry, and how often; None without weights."""
    num_taken, weights = settings.run.max_steps * settings.learner.groups_per_step, settings.data.weights()
    if weights is None or not num_taken:
        return None
    rows_by_entry, names = train.index.rows_by_entry, [entry.path for entry in entries_of(settings.data.train)]
    total, parts = sum(weights), []
    for name, num_rows, weight in zip(names, rows_by_entry, weights, strict=True):
        taken = num_taken * weight / total
        repeated = f", each {taken / num_rows:.1f} times" if taken > num_rows else ""
        parts.append(f"about {taken:.0f} from the {num_rows} of {name}{repeated}")
    return f"By the weights of data.train, the run takes {num_taken} rows: {'; '.join(parts)}."


def resolve_context(settings: Settings, model: Path) -> Settings:
    """Return the settings with rollout.max_context_tokens of at most the model's positions, unless it was given."""
    rollout, most = settings.rollout, read_max_positions(model)
    is_given = "max_context_tokens" in rollout.model_fields_set
    if is_given or most is None or not rollout.max_response_tokens < most < rollout.max_context_tokens:
        return settings
    return settings.model_copy(update={"rollout": rollout.model_copy(update={"max_context_tokens": most})})


def resolve_rows(settings: Settings, model: Path, longest: int) -> Settings:
    """Return the settings of a run on rows with rollout.max_context_tokens of at least the longest row.

    The plan's memory and the check of the models at the start are of this length.
    """
    if not settings.is_of_rows:
        return settings
    if settings.objective == "kto":  # a row's prompt also gets another row's answer
        longest = min(2 * longest, read_max_positions(model) or 2 * longest)
    rollout = settings.rollout
    longest = max(longest, rollout.max_response_tokens + 1)
    return settings.model_copy(update={"rollout": rollout.model_copy(update={"max_context_tokens": longest})})


def notice_changes(settings: Settings, start: RunStart) -> str | None:
    """Return a notice with the settings that differ from the last start of the checkpoint's run, or None."""
    if start.checkpoint is None:
        return None
    saved = start.checkpoint.path.parent.parent / SETTINGS  # of another run, if run.resume names its checkpoint
    if not saved.is_file():
        return f"{saved} is missing: settings that changed since the checkpoint was saved are not listed."
    before = {name: value for name, value, _ in describe_settings(load_saved_settings(saved))}
    changed = [
        f"{name} {before[name]} -> {value}"
        for name, value, _ in describe_settings(settings)
        if name not in _OF_A_START and before.get(name, value) != value
    ]
    if not changed:
        return None
    has_critic = (start.checkpoint.path / "state" / "critic").is_dir()
    first = _OF_FIRST_WEIGHTS if has_critic else _OF_FIRST_WEIGHTS[:-1]
    unused = [name for name in (one.partition(" ")[0] for one in changed) if name.startswith(first)]
    note = f" No effect on the checkpoint's weights: {', '.join(unused)}." if unused else ""
    return f"Changed since the last start: {', '.join(changed)}.{note}"


def check_same_files(model: Path, start: RunStart) -> None:
    """Raise SettingsError when tokenizer, chat template or code differ from the checkpoint's: so would every token."""
    if start.checkpoint is not None and (name := changed_file(model, start.checkpoint.path / "model")) is not None:
        raise SettingsError(
            f"settings: {model / name} is not the file that {start.checkpoint.path} was trained with. Put the file of "
            f"{start.checkpoint.path / 'model'} back, or none if it has none, or choose another run.name."
        )


def check_same_objective(settings: Settings, start: RunStart) -> None:
    """Raise SettingsError when the checkpoint is of a run with another objective: its prompts and records differ."""
    saved = None if start.checkpoint is None else start.checkpoint.path.parent.parent / SETTINGS
    if saved is None or not saved.is_file() or (before := load_saved_settings(saved).objective) == settings.objective:
        return
    assert start.checkpoint is not None
    raise SettingsError(
        f"settings: objective = {settings.objective}, and {start.checkpoint.path} is of a run with {before}. To begin "
        f"with its weights set policy.model to {start.checkpoint.path / 'model'}, with a new run.name and without "
        "run.resume."
    )


def check_same_batch(settings: Settings, start: RunStart) -> None:
    """Raise SettingsError when earlier steps had another batch, by which run.max_epochs would count their rows."""
    if start.checkpoint is None:
        return
    now = settings.learner.groups_per_step
    if others := [batch for batch in _batches_of(start.checkpoint) if batch != now]:
        raise SettingsError(
            f"settings: learner.groups_per_step = {now}, and earlier steps had {others[0]}: run.max_epochs cannot "
            "count both. Set it back, or give run.max_steps."
        )


def _batches_of(checkpoint: Checkpoint) -> list[int]:
    """Return learner.groups_per_step of the starts that made a checkpoint; of the last one if its ledger is old."""
    ledger, saved = checkpoint.path / LEDGER, checkpoint.path.parent.parent / SETTINGS
    with suppress(sqlite3.OperationalError), closing(sqlite3.connect(read_only_uri(ledger), uri=True)) as db:
        query = "SELECT DISTINCT value FROM terms WHERE name = 'groups_per_step' AND from_step <= ?"
        if rows := db.execute(query, (checkpoint.step,)).fetchall():
            return [int(value) for (value,) in rows]
    return [load_saved_settings(saved).learner.groups_per_step] if saved.is_file() else []


def check_other_models(settings: Settings) -> None:
    """Raise SettingsError when a critic or reference that the settings name does not exist."""
    for setting, name in (("critic.model", settings.critic.model), ("reference.model", settings.reference.model)):
        if name:
            find_named_model(setting, name)


def check_other_positions(settings: Settings) -> None:
    """Raise SettingsError when a critic or reference has fewer positions than a text may have tokens.

    Rotary positions have no end: such a model would compute values that it never learnt.
    """
    given = settings.rollout.max_context_tokens
    for setting, name in (("critic.model", settings.critic.model), ("reference.model", settings.reference.model)):
        most = read_max_positions(find_named_model(setting, name)) if name else None
        if most is not None and given > most:
            raise SettingsError(
                f"settings: {setting} = {name} has {most} positions, and a text may have {given} tokens "
                "(rollout.max_context_tokens, or the longest row). Lower that, or use a model with more positions."
            )


def check_positions(model: Path, settings: Settings) -> None:
    """Raise SettingsError for a longer context than the model's: the engine would not start."""
    given, most = settings.rollout.max_context_tokens, read_max_positions(model)
    if most is not None and given > most and needs_rollouts(settings) and not settings.rollout.engine_args:
        raise SettingsError(
            f"settings: rollout.max_context_tokens = {given}, and policy.model has {most} positions. Set it to {most} "
            "or less."
        )


def check_engine_args(settings: Settings) -> None:
    """Raise SettingsError for an argument of vLLM or of DeepSpeed's ZeRO that the installed version does not have."""
    zero = settings.learner.deepspeed.get("zero_optimization") or {}
    _check_known("rollout.engine_args", settings.rollout.engine_args, "vllm", "engine/arg_utils.py")
    _check_known("learner.deepspeed.zero_optimization", zero, "deepspeed", "runtime/zero/config.py")


def _check_known(setting: str, given: Collection[str], library: str, file: str) -> None:
    """Raise SettingsError for a key that no class of the library's file has. The library itself is not imported."""
    spec = importlib.util.find_spec(library)
    if not given or spec is None or spec.origin is None:
        return
    known = set()
    for node in ast.walk(ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            known.add(node.target.id)
        elif isinstance(node, ast.keyword) and node.arg == "alias" and isinstance(node.value, ast.Constant):
            known.add(str(node.value.value))
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
            hint = f"Did you mean {near[0]}?" if near else "Remove it."
            title = {"vllm": "vLLM", "deepspeed": "DeepSpeed"}[library]
            raise SettingsError(f"settings: {setting}.{name}: {title} has no such argument. {hint}")


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
