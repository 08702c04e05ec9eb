"""The plots of a report: which metrics share a plot, in which section, and what is healthy.

Every key of metrics.jsonl is shown: a metric without a plot of its own here gets one under its name, and one that
never changed is a number. The page draws a plot with uPlot (`plots.js`) from the JSON that `Plot.json` returns.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

import msgspec
from markupsafe import Markup

from learner.disk.run_folder import main_set
from protocol.settings.evaluation import MAIN_SET

_MAX_POINTS = 1000
_MOVING_MEAN_STEPS = 20
_NEWEST_STEPS = 10

# Title of each plot: its metrics with their labels.
_TABLE = """
Spread of rewards: reward/std standard deviation
Groups with equal rewards: reward/equal_group_share share
Preferred pairs (share): preference/accuracy accuracy
Gains over the reference: preference/chosen chosen, preference/rejected rejected
Entropy (nats per token): policy/entropy entropy
KL to the sampling policy: policy/kl_sampler all, policy/kl_fresh fresh, policy/kl_stale stale
Ratio: policy/ratio_mean mean
Ratios below 0.9 or above 1.1 (share): policy/ratio_outside_share outside
Effective samples (share): policy/effective_sample_share share
Largest difference of a logprob (nats): policy/logprob_difference_max largest
Clipped tokens (share): policy/clip_share clipped
Gradient norm: policy/grad_norm before clipping
Loss: policy/loss loss
Learning rate: policy/lr rate
Spread of advantages: policy/advantage_std standard deviation
Response length (tokens): length/mean mean, length/better better than average, length/worse others
Samples cut off (share): length/truncated_share cut off
Turns: length/turns mean
Alarms: health/alarms alarms
Staleness (policy versions): data/staleness_max max, data/staleness_mean mean
Seconds in a step: time/wait_s wait for data, time/train_s train, time/push_s push
Seconds in a push: time/push_wait_s wait for servers, time/push_transfer_s transfer, time/push_pause_s servers paused
Samples trained per second: perf/samples_per_s samples/s
Model tokens trained per second: perf/tokens_per_s tokens/s
Share of the devices' peak: perf/mfu share
Window (groups): data/window_used used
Prompts: data/retried retried, data/skipped skipped, data/failed samples failed
Tokens trained so far: progress/tokens tokens
Passes over data.train: progress/epoch epochs
Groups filtered before a step: data/filtered_low too hard, data/filtered_high too easy
"""
_CHARTS = [
    (title, [member.partition(" ")[::2] for member in members.split(", ")])
    for title, members in (line.split(": ") for line in _TABLE.strip().splitlines())
]
_PREFIXES = (("Parts of the reward", "reward/part/"), ("Logged by reward services", "reward/log/"))
_MOST_PARTS = 6
# Positions, clocks and counts: a curve of them is a straight line.
_NO_CURVE = {
    *("step", "policy_version", "time_s", "at_s", "data/num_samples", "data/num_model_tokens", "eval/policy_version"),
    *("eval/failed", "eval/step", "eval/version_min", "eval/version_max", "data/num_trained_tokens"),
}
_NO_CURVE_ENDS = ("_error", "/num_prompts")  # shown as numbers next to their score
# Usual range of a metric: (lowest, highest). docs/look_up/metrics.md has the same.
HEALTHY: dict[str, tuple[float, float]] = {
    "reward/equal_group_share": (-inf, 0.5),
    "preference/accuracy": (0.5, inf),
    "policy/entropy": (0.1, 1.5),
    "policy/kl_sampler": (-inf, 0.01),
    "policy/kl_fresh": (-inf, 0.001),
    "policy/kl_stale": (-inf, 0.05),
    "policy/ratio_mean": (0.98, 1.02),
    "policy/ratio_outside_share": (-inf, 0.1),
    "policy/clip_share": (-inf, 0.1),
    "policy/effective_sample_share": (0.8, inf),
    "policy/kl_reference": (-inf, 0.1),
    "critic/explained_share": (0.3, inf),
    "length/truncated_share": (-inf, 0.05),
    "perf/mfu": (0.3, inf),
}

Line = Mapping[str, float]
_Style = Literal["line", "faint", "dotted"]
SECTIONS: dict[str, tuple[str, ...]] = {
    "learning": ("reward/", "eval/", "preference/"),
    "healthy": ("policy/", "critic/", "length/", "data/staleness", "health/"),
    "slow": ("time/", "perf/", "data/window"),
    "rest": ("",),
}


@dataclass(frozen=True)
class Series:
    label: str  # text in the legend
    values: list[float | None]  # [N] y at each x of the plot; None: not measured there
    style: _Style = "line"


@dataclass(frozen=True)
class Plot:
    title: str
    caption: str  # text beside the title: first and last value, or totals; may be empty
    x: list[float]  # [N] steps, rising
    series: list[Series]
    is_wide: bool = False  # as wide as the page
    band: tuple[float | None, float | None] | None = None  # usual range of the first curve; None: no bound
    is_outside: bool = False  # the newest values are outside of the band

    @property
    def json(self) -> Markup:
        """The plot as JSON inside a script element: no `<` in it can end the element."""
        return Markup(msgspec.json.encode(self).decode().replace("<", "\\u003c"))  # noqa: S704  # escaped here


@dataclass
class Curves:
    """The metrics of one section."""

    plots: list[Plot] = field(default_factory=list)
    constant: list[str] = field(default_factory=list)  # metrics that never changed, with their value


def at_evaluated_steps(lines: Sequence[Line]) -> list[dict[str, float]]:
    """Return the lines with each evaluation's figures at the step that it evaluated; a later step's line has them."""
    points: dict[float, dict[str, float]] = {}
    for line in lines:
        here, there = line["step"], line.get("eval/step", line["step"])
        if there == here:
            points.setdefault(here, {}).update(line)
            continue
        for key, value in line.items():
            step = there if key.startswith("eval/") else here
            points.setdefault(step, {"step": step})[key] = value
    return [points[step] for step in sorted(points)]


def reward_plot(lines: Sequence[Line]) -> Plot | None:
    """Return training reward and held-out scores."""
    points = thin(at_evaluated_steps(lines))
    rewards = [point["reward/mean"] for point in points if "reward/mean" in point]
    has_mean = len(rewards) >= _MOVING_MEAN_STEPS
    series = []
    if rewards:
        series.append(_curve("training reward", points, "reward/mean", "faint" if has_mean else "line"))
    if has_mean:
        means = iter(_moving_mean(rewards))
        with_mean = [point | {"mean": next(means)} if "reward/mean" in point else point for point in points]
        series.append(_curve("moving mean", with_mean, "mean"))
    for key, label in zip(_score_keys(lines), ("held-out, sampled", "held-out, greedy"), strict=False):
        if any(key in point for point in points):
            series.append(_curve(label, points, key, "dotted"))
    return Plot("Reward", "", [point["step"] for point in points], series, is_wide=True) if series else None


def metric_plots(lines: Sequence[Line], unused: Collection[str] = ()) -> dict[str, Curves]:
    """Return each section's curves of all other metrics. unused: names of reward endpoints of weight 0."""
    charts = _charts(lines, unused)
    points = thin(at_evaluated_steps(lines))
    x = [line["step"] for line in points]
    sections = {section: Curves() for section in SECTIONS}
    for title, members in charts:
        curves = {key: _curve(label, points, key) for key, label in members}
        measured = {key: [value for value in curve.values if value is not None] for key, curve in curves.items()}
        moving = [key for key, values in measured.items() if len(set(values)) > 1]
        curves_of = sections[_section_of(members[0][0])]
        if moving:
            first = moving[0]
            curves_of.plots.append(
                Plot(
                    title,
                    _caption(first, measured[first], len(moving)),
                    x,
                    [curves[key] for key in moving],
                    band=_json_band(first),
                    is_outside=is_outside(first, lines),
                )
            )
        curves_of.constant += [f"{key} {_number(measured[key][0])}" for key in measured if key not in moving]
    return sections


def outside_band(lines: Sequence[Line]) -> tuple[list[str], int]:
    """Return the metrics whose newest values are not usual, with value and usual range; and how many were measured."""
    measured = [key for key in HEALTHY if any(key in line for line in lines)]
    texts = [
        f"{key} {_number(_newest(key, lines))}, usually {describe_band(key)}"
        for key in measured
        if is_outside(key, lines)
    ]
    return texts, len(measured)


def is_outside(key: str, lines: Sequence[Line]) -> bool:
    """Return whether the mean over the newest ten steps is outside of the metric's usual range."""
    low, high = HEALTHY.get(key, (-inf, inf))
    return not low <= _newest(key, lines) <= high


def describe_band(key: str) -> str:
    """Return the usual range of a metric, such as "below 0.1"; empty without one."""
    low, high = HEALTHY.get(key, (-inf, inf))
    if low == -inf:
        return "" if high == inf else f"below {high:g}"
    return f"above {low:g}" if high == inf else f"{low:g} to {high:g}"


def compared_plots(runs: Mapping[str, Sequence[Line]]) -> list[Plot]:
    """Return each metric that two runs or more have, a curve for each run; rewards and scores first. runs: by name."""
    points = {name: thin(at_evaluated_steps(lines)) for name, lines in runs.items()}
    scores = dict.fromkeys(key for lines in runs.values() for key in _score_keys(lines))
    titles = [("reward/mean", "Training reward"), *((key, f"Held-out: {key}") for key in scores)]
    titles += [(f"eval/{MAIN_SET}/loss", "Held-out loss"), *((members[0][0], title) for title, members in _CHARTS)]
    x = sorted({point["step"] for of_run in points.values() for point in of_run})
    plots = []
    for key, title in titles:
        having = {
            name: {p["step"]: p for p in of_run} for name, of_run in points.items() if any(key in p for p in of_run)
        }
        style: _Style = "dotted" if key in scores else "line"
        series = [_curve(name, [at.get(step, {}) for step in x], key, style) for name, at in having.items()]
        if len(series) > 1:
            plots.append(Plot(title, describe_band(key), x, series, band=_json_band(key)))
    return plots


def thin(lines: Sequence[Line]) -> list[dict[str, float]]:
    """Return at most 1,000 lines: each is the mean of neighbouring lines, at the last one's step."""
    if len(lines) <= _MAX_POINTS:
        return [dict(line) for line in lines]
    size = -(-len(lines) // _MAX_POINTS)
    points = []
    for first in range(0, len(lines), size):
        run = lines[first : first + size]
        values = {key: [line[key] for line in run if key in line] for key in {key for line in run for key in line}}
        points.append({key: sum(found) / len(found) for key, found in values.items()} | {"step": run[-1]["step"]})
    return points


def _charts(lines: Sequence[Line], unused: Collection[str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return title and measured members of each plot: those of _CHARTS, and one for each family or other metric."""
    keys = {key for line in lines for key in line}
    charts: list[tuple[str, list[tuple[str, str]]]] = []
    left_out = {*_NO_CURVE, "reward/mean", *_score_keys(lines)}
    shown = {key for key in keys - left_out if not key.endswith(_NO_CURVE_ENDS)}
    sets = sorted({key.split("/")[1] for key in shown if key.startswith("eval/")})
    for title, prefix in (*_PREFIXES, *((f"Held-out set {name}", f"eval/{name}/") for name in sets)):
        parts = sorted(key for key in shown if key.startswith(prefix))[:_MOST_PARTS]
        labels = [_part_label(key.removeprefix(prefix), unused) for key in parts]
        charts.append((f"{title}: {labels[0]}" if len(parts) == 1 else title, list(zip(parts, labels, strict=True))))
    charts += _CHARTS
    named = {key for _, members in charts for key, _ in members}
    charts += [(key, [(key, key)]) for key in sorted(shown - named)]
    measured = [(title, [member for member in members if member[0] in keys]) for title, members in charts]
    return [(title, members) for title, members in measured if members]


def _score_keys(lines: Sequence[Line]) -> tuple[str, ...]:
    """Return the keys of the main set's sampled and greedy score; none without an evaluation."""
    name = next((main_set(line) for line in reversed(lines) if main_set(line)), None)
    return (f"eval/{name}/reward", f"eval/{name}/greedy") if name else ()


def _section_of(key: str) -> str:
    return next(section for section, prefixes in SECTIONS.items() if key.startswith(prefixes))


def _caption(key: str, values: Sequence[float], num_curves: int) -> str:
    ends = f"{_number(values[0])} → {_number(values[-1])}" if num_curves == 1 else ""
    band = f"usually {describe_band(key)}" if key in HEALTHY else ""
    return " · ".join(text for text in (ends, band) if text)


def _json_band(key: str) -> tuple[float | None, float | None] | None:
    low, high = HEALTHY.get(key, (-inf, inf))
    return None if key not in HEALTHY else (None if low == -inf else low, None if high == inf else high)


def _newest(key: str, lines: Sequence[Line]) -> float:
    values = [line[key] for line in lines if key in line][-_NEWEST_STEPS:]
    return sum(values) / len(values) if values else 0.0


def _curve(label: str, points: Sequence[Line], key: str, style: _Style = "line") -> Series:
    return Series(label, [_short(point.get(key)) for point in points], style)


def _part_label(name: str, unused: Collection[str]) -> str:
    return f"{name} (weight 0: recorded, unused)" if name in unused else name


def _moving_mean(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and its nearest neighbours, a twentieth of the run in all."""
    half = max(1, len(values) // 40)
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _short(value: float | None) -> float | None:
    """Return the value with five significant digits: a page of a long run stays small."""
    return None if value is None else float(f"{value:.5g}")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
