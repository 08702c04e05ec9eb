"""Advantages, losses and corrections by their names in the settings, and the algorithm that a run's settings select.

A new one is a function, a line here, and its name in `protocol.settings.learner`; a test compares the two lists.
A user's own is FILE.py:name.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from learner.algorithms.advantages.advantage import Advantage
from learner.algorithms.advantages.dr_grpo import dr_grpo_advantages
from learner.algorithms.advantages.gae import gae_advantages
from learner.algorithms.advantages.grpo import grpo_advantages
from learner.algorithms.advantages.opo import opo_advantages
from learner.algorithms.advantages.reinforce_pp import reinforce_pp_advantages
from learner.algorithms.advantages.reinforce_pp_baseline import reinforce_pp_baseline_advantages
from learner.algorithms.advantages.rloo import rloo_advantages
from learner.algorithms.importance import Band, Correction, keep_all, keep_in_band, keep_near_answers, keep_truncated
from learner.algorithms.losses.cispo import cispo_loss
from learner.algorithms.losses.gspo import gspo_loss
from learner.algorithms.losses.policy_loss import Clip, PolicyLoss
from learner.algorithms.losses.ppo import ppo_loss
from learner.algorithms.losses.reinforce import reinforce_loss
from learner.algorithms.own_algorithm import check_result_shape, load_own
from learner.algorithms.own_trial import try_correction, try_loss
from protocol.errors import SettingsError
from protocol.settings.learner import RECIPES, LearnerSettings
from protocol.settings.policy import CriticSettings
from protocol.settings.section import Section
from protocol.settings.settings import Settings

ADVANTAGES: dict[str, Advantage] = {
    "grpo": Advantage(of_groups=grpo_advantages),
    "dr_grpo": Advantage(of_groups=dr_grpo_advantages),
    "rloo": Advantage(of_groups=rloo_advantages),
    "opo": Advantage(of_groups=opo_advantages),
    "reinforce_pp_baseline": Advantage(of_groups=reinforce_pp_baseline_advantages, is_whitened=True),
    "reinforce_pp": Advantage(of_tokens=reinforce_pp_advantages, is_whitened=True),
    "gae": Advantage(of_tokens=gae_advantages, needs_critic=True, is_whitened=True),
}

LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(ppo_loss, has_ratio=True),
    "gspo": PolicyLoss(gspo_loss, has_ratio=True),
    "cispo": PolicyLoss(cispo_loss, has_ratio=True),
    "reinforce": PolicyLoss(reinforce_loss, has_ratio=False),
}

CORRECTIONS: dict[str, Correction] = {
    "none": Correction(keep_all, is_weighted=False),
    "tis": Correction(keep_truncated, is_weighted=True),
    "icepop": Correction(keep_in_band, is_weighted=True),
    "geo_mask": Correction(keep_near_answers, is_weighted=False, band=Band(0.99, 1.01)),
}


_EQUAL_AT_MOST = 1e-6  # of the advantages of equal rewards: rounding


@dataclass(frozen=True)
class Algorithm:
    """The parts of a run's algorithm."""

    advantage: Advantage  # estimate of how much better a sample or token was than expected
    loss: PolicyLoss
    correction: Correction  # importance correction from the behaviour policy to the learner
    clip: Clip  # bounds of the loss
    band: Band  # bounds of the correction
    is_whitened: bool  # advantages of a step are scaled to mean 0 and deviation 1
    gamma: float  # discount of a reward per model token
    lam: float  # lambda of generalised advantage estimation


def algorithm_of(settings: LearnerSettings) -> Algorithm:
    """Return the algorithm of the settings: their recipe, overridden by each field that they set.

    Raises: SettingsError when a user's own algorithm cannot be loaded.
    """
    recipe = RECIPES[settings.recipe]["learner"]
    advantage = _advantage(name := settings.advantage or recipe["advantage"])
    if name not in ADVANTAGES:
        _check_own_advantage(settings, name, advantage, settings.loss or recipe["loss"])
    correction = _correction(settings.correction or recipe["correction"])
    loss = _loss(loss_name := settings.loss or recipe["loss"])
    clip = Clip(settings.clip_low, settings.clip_high, settings.dual_clip or math.inf)
    if loss_name not in LOSSES:
        is_declared = isinstance(load_own("learner.loss", loss_name, PolicyLoss), PolicyLoss)
        try_loss(loss_name, loss, clip, is_weighted=correction.is_weighted and not is_declared)
    low, high = settings.correction_low, settings.correction_high
    return Algorithm(
        advantage=advantage,
        loss=loss,
        correction=correction,
        clip=clip,
        band=Band(correction.band.low if low is None else low, correction.band.high if high is None else high),
        is_whitened=advantage.is_whitened if settings.whiten is None else settings.whiten,
        gamma=settings.gamma,
        lam=settings.gae_lambda,
    )


def has_critic(settings: Settings) -> bool:
    """Return whether the algorithm has a critic.

    Raises: SettingsError for settings of a critic beside a user's own advantage that has none.
    """
    has = algorithm_of(settings.learner).advantage.needs_critic
    if not has and settings.learner.advantage not in ADVANTAGES:
        reason = f"learner.advantage = {settings.learner.advantage} has no critic (Advantage(.., needs_critic=True))"
        _check_unread("critic", settings.critic, CriticSettings.model_fields, reason)
    return has


def _check_own_advantage(settings: LearnerSettings, name: str, advantage: Advantage, loss: str) -> None:
    """Raise SettingsError for settings that do not go with a user's own advantage; those of a name know it."""
    _check_equal_groups(name, advantage, settings)
    if advantage.of_groups is not None:
        _check_unread("learner", settings, ("gamma", "gae_lambda"), f"learner.advantage = {name} is of whole answers")
    elif loss == "gspo":
        raise SettingsError(
            f"settings: learner.loss = gspo clips whole answers, and learner.advantage = {name} gives each token its "
            "own. Use learner.loss = ppo, or an advantage of groups."
        )


def _check_unread(section: str, settings: Section, names: Iterable[str], reason: str) -> None:
    """Raise SettingsError for a changed setting. The settings' own check does not know a user's own algorithm."""
    for name in names:
        if (value := getattr(settings, name)) != type(settings).model_fields[name].default:
            raise SettingsError(f"settings: {section}.{name} = {value} has no effect: {reason}. Remove it.")


def _advantage(name: str) -> Advantage:
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    loaded = load_own(setting := "learner.advantage", name, Advantage)
    record = loaded if isinstance(loaded, Advantage) else Advantage(of_groups=loaded)
    if record.of_groups is not None:
        return replace(record, of_groups=check_result_shape(setting, name, record.of_groups, 2))
    assert record.of_tokens is not None
    return replace(record, of_tokens=check_result_shape(setting, name, record.of_tokens, 4))


def _check_equal_groups(name: str, advantage: Advantage, settings: LearnerSettings) -> None:
    """Try groups of equal rewards.

    Raises: SettingsError when they are no numbers, or when they teach something and would be skipped.
    """
    found = "it is whitened over the step" if advantage.is_whitened and settings.whiten is None else ""
    lengths = torch.tensor([[2.0, 3.0, 5.0, 7.0]], dtype=torch.float64)
    for reward in (0.0, 1.0):
        if advantage.of_groups is None:
            found = found or "it is of single tokens"
            break
        try:
            result = advantage.of_groups(torch.full_like(lengths, reward), lengths)
        except SettingsError:
            raise
        except Exception:  # a user's code may raise anything; it may be written for larger groups
            if settings.equal_groups == "skip":
                raise
            return
        if not bool(result.isfinite().all()):
            raise SettingsError(
                f"settings: learner.advantage = {name} gives {result.flatten().tolist()} to four rewards of "
                f"{reward:g}, and a step with such a group would not be applied. Add a small number to the divisor, "
                "such as std + 1e-6."
            )
        if bool((result.abs() > _EQUAL_AT_MOST).any()):
            found = f"four rewards of {reward:g} got {[round(value, 4) for value in result.flatten().tolist()]}"
    if found and settings.equal_groups == "skip":
        raise SettingsError(
            f"settings: learner.equal_groups = skip would skip groups that learner.advantage = {name} learns from "
            f"though their rewards are equal: {found}. Set it to keep."
        )


def _loss(name: str) -> PolicyLoss:
    if name in LOSSES:
        return LOSSES[name]
    loaded = load_own(setting := "learner.loss", name, PolicyLoss)
    record = loaded if isinstance(loaded, PolicyLoss) else PolicyLoss(loaded, has_ratio=True)
    return replace(record, of_tokens=check_result_shape(setting, name, record.of_tokens, 5, num_returned=2))


def _correction(name: str) -> Correction:
    if name in CORRECTIONS:
        return CORRECTIONS[name]
    loaded = load_own(setting := "learner.correction", name, Correction)
    record = loaded if isinstance(loaded, Correction) else Correction(loaded, is_weighted=True)
    record = replace(record, kept=check_result_shape(setting, name, record.kept, 3))
    try_correction(name, record)
    return record
