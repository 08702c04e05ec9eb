"""The settings of a comparison: those that the plain loop knows, and those that make a run a comparison."""

from collections.abc import Sequence
from pathlib import Path

from protocol.errors import SettingsError
from protocol.settings.loader import load_settings
from protocol.settings.settings import Settings

_RECIPES = ("grpo", "dapo", "ppo")
# What may be given. Another setting would change Sluice's side alone.
KNOWN = (
    "policy.trust_remote_code",
    "data.prompt_key",
    "run.max_steps",
    "run.seed",
    "rollout.group_size",
    "rollout.max_context_tokens",
    "rollout.max_response_tokens",
    "rollout.temperature",
    "learner.recipe",
    "learner.groups_per_step",
    "learner.num_mini_batches",
    "learner.num_epochs",
    "learner.lr",
    "learner.betas",
    "learner.weight_decay",
    "learner.max_grad_norm",
    "learner.clip_low",
    "learner.clip_high",
    "learner.dual_clip",
    "learner.micro_batch_tokens",
    "critic.lr",
    "critic.value_clip",
    "kl.target",
    "kl.horizon",
    "filter.low",
    "filter.high",
)
# Small enough for a minute on a laptop; each may be given otherwise.
_USUAL = {
    "run.max_steps": "3",
    "rollout.group_size": "4",
    "rollout.max_response_tokens": "32",
    "learner.groups_per_step": "4",
    "learner.micro_batch_tokens": "1",
}
_FIXED = {
    "policy.dtype": "float32",
    "policy.old_logprobs": "behaviour",
    "data.label_required": "false",
    "learner.max_staleness": "0",
    "learner.num_ranks": "1",
    "learner.zero_stage": "0",
    "learner.lr_schedule": "constant",
    "learner.correction": "none",
    "rewards.clip": "null",
}


def comparison_settings(model: str, prompts: str, options: Sequence[str]) -> Settings:
    """Return the settings of the comparison on this model and these prompts.

    options: `--section.field value`. Raises: SettingsError for one that the plain loop does not know.
    """
    for option in options:
        name = option[2:].partition("=")[0] if option.startswith("--") else None
        if name is not None and name not in KNOWN:
            raise SettingsError(
                f"settings: {name} is not known to the plain loop, so that nothing could be compared. "
                f"Leave it out; it knows {', '.join(KNOWN)}."
            )
    given = {**_USUAL, "policy.model": model, "data.train": prompts}
    settings = load_settings(None, [*_as_options(given), *options, *_as_options(_FIXED)], Path.cwd())
    learner = settings.learner
    if learner.recipe not in _RECIPES:
        raise SettingsError(
            f"settings: learner.recipe = {learner.recipe} has no plain loop. Set it to {', '.join(_RECIPES)}."
        )
    if learner.groups_per_step % learner.num_mini_batches:
        raise SettingsError(
            f"settings: learner.groups_per_step = {learner.groups_per_step} cannot be cut into "
            f"{learner.num_mini_batches} equal mini-batches. Use a multiple of it."
        )
    return settings


def _as_options(given: dict[str, str]) -> list[str]:
    return [part for name, value in given.items() for part in (f"--{name}", value)]
