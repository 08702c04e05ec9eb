"""Each rule of a run's health: which figure of a step is out of bounds, what that means, and what to change."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from protocol.settings.quality.health import HealthSettings

Line = Mapping[str, float]


@dataclass(frozen=True)
class Alarm:
    """A figure out of bounds."""

    name: str  # of its rule
    text: str  # what was measured, what it means, what to change


def broken_rules(line: Line, settings: HealthSettings) -> list[Alarm]:
    """Return what is wrong with one step, by its line of metrics. A figure that was not measured breaks no rule."""
    found = []
    for name, rule in RULES.items():
        if (text := rule(line, settings)) is not None:
            found.append(Alarm(name, text))
    return found


def _ratio(line: Line, settings: HealthSettings) -> str | None:
    ratio = line.get("ratio_mean", 1.0)
    if settings.ratio_low <= ratio <= settings.ratio_high:
        return None
    return (
        f"ratio mean {ratio:.3g}: behaviour logprobs do not belong to these weights. Lower learner.max_staleness or "
        "learner.lr; if it is so from the first step on, the engine computes another model: leave rollout.engine_args "
        "out, and see weights.probe."
    )


def _kl_fresh(line: Line, settings: HealthSettings) -> str | None:
    # Where nothing tells fresh from stale apart, all is taken for stale.
    if (kl := line.get("kl_fresh", 0.0)) <= settings.kl_fresh:
        return None
    return (
        f"kl {kl:.3g} nats per token on samples of the learner's own weights: engine and learner do not compute the "
        "same model. Leave quantization out of rollout.engine_args, set policy.dtype to float32 to compare, and use a "
        "correction (learner.correction: icepop)."
    )


def _kl_stale(line: Line, settings: HealthSettings) -> str | None:
    if (kl := line.get("kl_stale", 0.0)) <= settings.kl_stale:
        return None
    return (
        f"kl {kl:.3g} nats per token on stale samples: in learner.max_staleness steps the policy moves further than "
        "its samples can follow. Lower learner.max_staleness or learner.lr, or use learner.correction: tis."
    )


def _effective_samples(line: Line, settings: HealthSettings) -> str | None:
    if (share := line.get("effective_sample_share", 1.0)) >= settings.effective_samples:
        return None
    return (
        f"effective sample share {share:.3g}: few tokens carry the step. Lower learner.max_staleness or learner.lr, or "
        "cut large weights (learner.correction: tis)."
    )


def _clip_fraction(line: Line, settings: HealthSettings) -> str | None:
    if (share := line.get("clip_fraction", 0.0)) <= settings.clip_fraction:
        return None
    return (
        f"clip fraction {share:.3g}: the loss cuts most of what it is given. Lower learner.lr, learner.num_epochs or "
        "learner.max_staleness, or widen learner.clip_high."
    )


def _entropy(line: Line, settings: HealthSettings) -> str | None:
    if (entropy := line.get("entropy", float("inf"))) >= settings.entropy:
        return None
    return (
        f"entropy {entropy:.3g} nats per token: the policy hardly samples any more, and its groups stop to differ. "
        "Lower learner.lr, raise learner.clip_high over learner.clip_low, or go back to an earlier checkpoint."
    )


def _gradient(line: Line, settings: HealthSettings) -> str | None:
    if (norm := line.get("grad_norm", 0.0)) <= settings.grad_norm:
        return None
    return (
        f"gradient norm {norm:.3g} before clipping: the step's direction is a few tokens' alone. Lower learner.lr, and "
        "look for rewards of another scale in reward_std."
    )


def _no_signal(line: Line, settings: HealthSettings) -> str | None:
    if (share := line.get("equal_group_share", 0.0)) <= settings.equal_groups:
        return None
    return (
        f"{share:.0%} of the groups have equal rewards: they say nothing. Use prompts of another difficulty, a larger "
        "rollout.group_size, or filter.dynamic_sampling."
    )


def _truncated(line: Line, settings: HealthSettings) -> str | None:
    if (share := line.get("truncated_share", 0.0)) <= settings.truncated:
        return None
    return (
        f"{share:.0%} of the samples were cut off before they ended: their reward is of half an answer. Raise "
        "rollout.max_response_tokens, rollout.max_turns or rollout.max_context_tokens."
    )


def _length_by_reward(line: Line, settings: HealthSettings) -> str | None:
    better, worse = line.get("response_tokens_better", 0.0), line.get("response_tokens_worse", 0.0)
    if not worse or better <= settings.length_ratio * worse:
        return None
    return (
        f"samples of above-average reward have {better:.0f} tokens, the others {worse:.0f}: the reward may pay for "
        "length. Read samples.jsonl; a reward for shorter answers, or learner.advantage: dr_grpo, takes the pull away."
    )


RULES: dict[str, Callable[[Line, HealthSettings], str | None]] = {
    "ratio": _ratio,
    "kl_fresh": _kl_fresh,
    "kl_stale": _kl_stale,
    "effective_samples": _effective_samples,
    "clip_fraction": _clip_fraction,
    "entropy": _entropy,
    "grad_norm": _gradient,
    "equal_groups": _no_signal,
    "truncated": _truncated,
    "length_by_reward": _length_by_reward,
}
