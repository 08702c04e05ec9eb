"""Alarms of a run's health: which figure of a step is out of bounds, what that means, and what to change.

A rule that is broken for `health.patience` steps in a row raises one alarm, and may end the run. A step in which its
figure was not measured changes nothing.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isnan, nan
from statistics import median

from protocol.settings.evaluation import HealthSettings

Line = Mapping[str, float]

# Key that HealthWatch adds to a line: the median of policy/kl_stale over the sound steps before, if it knows enough.
_USUAL_KL_STALE = "usual_kl_stale"
_NUM_USUAL, _NUM_NEEDED = 50, 10


@dataclass(frozen=True)
class Alarm:
    """A figure out of bounds."""

    name: str
    text: str  # measured value, a colon, its meaning, and the settings to change


@dataclass(frozen=True)
class Rule:
    figure: str  # key of the metrics line; without it the rule is not broken
    is_broken: Callable[[float, HealthSettings, Line], bool]  # takes the figure, the settings and the whole line
    text: str  # format of the alarm: {value} is the figure, {line} the whole line


# The heaviest first.
RULES = {
    "equal_groups": Rule(
        "reward/equal_group_share",
        lambda share, bounds, line: share > bounds.equal_groups,
        "{value:.0%} of the groups have equal rewards: they teach nothing about which sample was better. If every "
        "reward is 0, try the scorer with sluice check-reward, and name it in rewards.endpoints. Otherwise use prompts "
        "of another difficulty, a larger rollout.group_size, or filter.dynamic_sampling.",
    ),
    "no_gradient": Rule(
        "policy/grad_norm",
        lambda norm, bounds, line: norm == 0,
        "gradient norm 0: the step changed no weight. Groups with equal rewards do that. If rewards differ inside "
        "groups, the loss leaves out every token: see learner.correction and learner.clip_high.",
    ),
    "ratio": Rule(
        "policy/ratio_mean",
        lambda ratio, bounds, line: not bounds.ratio_low <= ratio <= bounds.ratio_high,
        "ratio mean {value:.3g}: it is 1 if the logprobs that servers send are those that they sample with. Remove "
        "rollout.engine_args that change the sampling. A few tokens of extreme ratio have the same effect: lower "
        "learner.max_staleness or learner.lr.",
    ),
    "kl_fresh": Rule(
        "policy/kl_fresh",  # absent where fresh and stale samples cannot be separated
        lambda kl, bounds, line: kl > bounds.kl_fresh,
        "kl {value:.3g} nats per token on samples of the learner's own weights: engine and learner do not compute the "
        "same model. Remove quantization from rollout.engine_args, set policy.dtype to float32 to compare, and use a "
        "correction (learner.correction: icepop).",
    ),
    "kl_stale": Rule(
        "policy/kl_stale",
        lambda kl, bounds, line: kl > min(bounds.kl_stale, _unusual_kl(bounds, line)),
        "kl {value:.3g} nats per token on stale samples: in learner.max_staleness steps the policy moves further than "
        "its samples can follow, or engine and learner no longer compute the same model. Lower learner.max_staleness "
        "or learner.lr, or use learner.correction: tis.",
    ),
    "effective_samples": Rule(
        "policy/effective_sample_share",
        lambda share, bounds, line: share < bounds.effective_samples,
        "effective sample share {value:.3g}: few tokens carry the step. Lower learner.max_staleness or learner.lr, or "
        "cut large weights (learner.correction: tis).",
    ),
    "clip_fraction": Rule(
        "policy/clip_share",
        lambda share, bounds, line: share > bounds.clip_fraction,
        "clip fraction {value:.3g}: the loss clips most tokens. Lower learner.lr, learner.num_epochs or "
        "learner.max_staleness, or widen learner.clip_high.",
    ),
    "entropy": Rule(
        "policy/entropy",
        lambda entropy, bounds, line: entropy < bounds.entropy,
        "entropy {value:.3g} nats per token: the policy hardly samples any more, and the samples of a group no longer "
        "differ. Lower learner.lr, raise learner.clip_high over learner.clip_low, or resume from an earlier "
        "checkpoint.",
    ),
    "grad_norm": Rule(
        "policy/grad_norm",
        lambda norm, bounds, line: norm > bounds.grad_norm,
        "gradient norm {value:.3g} before clipping: a few tokens decide the step's direction. Lower learner.lr, and "
        "look for rewards of another scale in reward/std.",
    ),
    "truncated": Rule(
        "length/truncated_share",
        lambda share, bounds, line: share > bounds.truncated,
        "{value:.0%} of the samples were cut off before they ended: their reward is of half an answer. Raise "
        "rollout.max_response_tokens, rollout.max_turns or rollout.max_context_tokens. If hardly any ends, the model "
        "writes no end token: set sampling.stop, or fine-tune on answers that end.",
    ),
    "length_by_reward": Rule(
        "length/better",
        lambda tokens, bounds, line: 0 < bounds.length_ratio * line.get("length/worse", 0.0) < tokens,
        "samples of above-average reward have {value:.0f} tokens, the others {line[length/worse]:.0f}: the "
        "reward may pay for length. Read samples.jsonl, and lower the reward of long answers, such as with "
        "rewards.overlong_buffer_tokens.",
    ),
}


class HealthWatch:
    """Takes metrics lines in step order.

    active: the alarms of the newest step, by rule.
    """

    def __init__(self, settings: HealthSettings) -> None:
        self.active: dict[str, Alarm] = {}
        self._settings = settings
        self._num_broken: dict[str, int] = {}  # rule -> measured steps in a row that broke it
        self._kl_stale: deque[float] = deque(maxlen=_NUM_USUAL)

    def take(self, line: Line) -> list[Alarm]:
        """Return the alarms that begin with this step: broken for health.patience steps in a row, its own included."""
        if not self._settings.alarms:
            return []
        broken = {alarm.name: alarm for alarm in broken_rules(self._with_usual(line), self._settings)}
        begun = []
        for name, rule in RULES.items():
            if (alarm := broken.get(name)) is not None:
                self._num_broken[name] = self._num_broken.get(name, 0) + 1
                if self._num_broken[name] >= self._settings.patience:
                    self.active[name] = alarm
                if self._num_broken[name] == self._settings.patience:
                    begun.append(alarm)
            elif not isnan(line.get(rule.figure, nan)):
                self._num_broken.pop(name, None)
                self.active.pop(name, None)
        # An alarm does not end because its value became usual.
        if "kl_stale" not in broken and not isnan(value := line.get("policy/kl_stale", nan)):
            self._kl_stale.append(value)
        return begun

    def _with_usual(self, line: Line) -> Line:
        """Return the line with the run's own usual value."""
        is_known = len(self._kl_stale) >= _NUM_NEEDED
        usual = {_USUAL_KL_STALE: median(self._kl_stale)} if is_known else {}
        return {**line, **usual}

    @property
    def summary(self) -> str:
        """The alarms of the newest step in one sentence, the heaviest first; empty without any."""
        values = [self.active[name].text.partition(":")[0] for name in RULES if name in self.active]
        return f"Alarms at the end: {'; '.join(values)}. The report has their cures." if values else ""

    @property
    def stop_reason(self) -> str | None:
        """Why health.stop_after ends the run; None while it does not."""
        limit = self._settings.stop_after
        lasting = [alarm.text for name, alarm in self.active.items() if limit and self._num_broken[name] >= limit]
        if not lasting:
            return None
        return f"Alarms for {limit} steps in a row (health.stop_after): {' '.join(lasting)}"


def broken_rules(line: Line, settings: HealthSettings) -> list[Alarm]:
    """Return the alarms of one step's metrics line. A figure that was not measured breaks no rule."""
    return [
        Alarm(name, rule.text.format(value=line[rule.figure], line=line))
        for name, rule in RULES.items()
        if rule.figure in line and rule.is_broken(line[rule.figure], settings, line)
    ]


def _unusual_kl(bounds: HealthSettings, line: Line) -> float:
    """Return the KL of stale samples that is unusual for this run; below kl_fresh none is."""
    return max(bounds.kl_fresh, bounds.kl_stale_factor * line.get(_USUAL_KL_STALE, float("inf")))


def alarms_of(lines: Iterable[Line], settings: HealthSettings) -> list[tuple[int, Alarm]]:
    """Return every alarm of a run with the step at which it began, in order.

    Lines without a loss are skipped: the evaluation before the first step, and steps that train only the critic.
    """
    watch = HealthWatch(settings)
    return [(int(line["step"]), alarm) for line in lines if "policy/loss" in line for alarm in watch.take(line)]
