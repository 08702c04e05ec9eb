"""The plots of a report: which metrics share a plot.

Every key of metrics.jsonl is shown: a metric without a plot of its own here gets one under its name.
The page draws a plot with uPlot (`plots.js`) from the JSON that `Plot.json` returns.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from markupsafe import Markup

_MAX_POINTS = 1000
_MOVING_MEAN_STEPS = 20

# Title, and the metrics of the plot with their labels.
_CHARTS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("Loss", (("policy/loss", "loss"),)),
    ("Gradient norm", (("policy/grad_norm", "before clipping"),)),
    ("Entropy (nats per token)", (("policy/entropy", "entropy"),)),
    ("KL", (("policy/kl_sampler", "kl"),)),
    ("Ratio", (("policy/ratio_mean", "mean"),)),
    ("Clipped tokens (fraction)", (("policy/clip_share", "clipped"),)),
    ("Staleness (policy versions)", (("data/staleness_mean", "mean"), ("data/staleness_max", "max"))),
    ("Samples trained per second", (("perf/samples_per_s", "samples/s"),)),
    ("Model tokens trained per second", (("perf/tokens_per_s", "tokens/s"),)),
    (
        "Seconds in a step",
        (
            ("time/wait_s", "wait for data"),
            ("time/train_s", "train"),
            ("time/push_s", "push"),
            ("time/push_pause_s", "servers paused"),
        ),
    ),
    ("Response length (tokens)", (("length/mean", "mean"),)),
    ("Turns", (("length/turns", "mean"),)),
    ("Spread of rewards", (("reward/std", "standard deviation"),)),
    ("Window (groups)", (("data/window_used", "used"),)),
    ("Prompts", (("data/retried", "retried"), ("data/skipped", "skipped"))),
    ("Groups filtered before a step", (("data/filtered_low", "too hard"), ("data/filtered_high", "too easy"))),
)
_PREFIXES = (("Parts of the reward", "reward/part/"), ("Logged by reward services", "reward/log/"))
_MOST_PARTS = 6
_REWARD_KEYS = ("reward/mean", "eval/held_out/reward", "eval/held_out/greedy")
# Positions, clocks and counts: a curve of them is a straight line.
_NO_CURVE = {
    *("step", "policy_version", "time_s", "at_s", "data/num_samples", "data/num_model_tokens", "eval/policy_version"),
    *("eval/failed", "eval/step", "eval/version_min", "eval/version_max"),
}
_NO_CURVE_ENDS = ("_error", "/num_prompts")  # shown as numbers next to their score
_EXPECTED = (
    "policy/loss",
    "policy/grad_norm",
    "policy/entropy",
    "policy/kl_sampler",
    "policy/ratio_mean",
    "policy/clip_share",
    "time/push_s",
)

Line = Mapping[str, float]
_Style = Literal["line", "faint", "dotted"]


@dataclass(frozen=True)
class Series:
    """One curve."""

    label: str  # text in the legend
    values: list[float | None]  # [N] y at each x of the plot; None: not measured there
    style: _Style = "line"


@dataclass(frozen=True)
class Plot:
    """One plot."""

    title: str
    caption: str  # text beside the title: first and last value, or totals; may be empty
    x_name: str  # meaning of x, such as step
    x: list[float]  # [N] rising
    series: list[Series]
    is_wide: bool = False  # as wide as the page

    @property
    def json(self) -> Markup:
        """The plot as JSON inside a script element: no `<` in it can end the element."""
        return Markup(msgspec.json.encode(self).decode().replace("<", "\\u003c"))  # noqa: S704  # escaped here


def at_evaluated_steps(lines: Sequence[Line]) -> list[dict[str, float]]:
    """Return the lines with each evaluation's figures at the step that it evaluated; a later step's line has them."""
    points: dict[float, dict[str, float]] = {}
    for line in lines:
        for key, value in line.items():
            step = line.get("eval/step", line["step"]) if key.startswith("eval/") else line["step"]
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
    for key, label in (("eval/held_out/reward", "held-out, sampled"), ("eval/held_out/greedy", "held-out, greedy")):
        if any(key in point for point in points):
            series.append(_curve(label, points, key, "dotted"))
    return Plot("Reward", "", "step", [point["step"] for point in points], series, is_wide=True) if series else None


def metric_plots(lines: Sequence[Line], unused: Collection[str] = ()) -> list[Plot]:
    """Return a plot for each other metric that was measured. unused: names of reward endpoints of weight 0."""
    keys = {key for line in lines for key in line}
    charts = [*_CHARTS]
    for title, prefix in _PREFIXES:
        parts = sorted(key for key in keys if key.startswith(prefix))[:_MOST_PARTS]
        charts.insert(0, (title, tuple((key, _part_label(key.removeprefix(prefix), unused)) for key in parts)))
    named = {key for _, members in charts for key, _ in members} | _NO_CURVE | set(_REWARD_KEYS)
    charts += [(key, ((key, key),)) for key in sorted(keys - named) if not key.endswith(_NO_CURVE_ENDS)]
    points = thin(at_evaluated_steps(lines))
    x = [line["step"] for line in points]
    plots = []
    for title, members in charts:
        series = [_curve(label, points, key) for key, label in members if key in keys]
        if series:
            ends = [value for value in series[0].values if value is not None]
            caption = " → ".join(_number(value) for value in (ends[0], ends[-1])) if len(series) == 1 else ""
            plots.append(Plot(title, caption, "step", x, series))
    return plots


def not_measured(lines: Sequence[Line]) -> list[str]:
    """Return the usual metrics that no step has."""
    return [key for key in _EXPECTED if lines and not any(key in line for line in lines)]


def thin(lines: Sequence[Line]) -> list[dict[str, float]]:
    """Return at most 1,000 lines: each is the mean of neighbouring lines, at the last one's step."""
    size = max(1, -(-len(lines) // _MAX_POINTS))
    points = []
    for first in range(0, len(lines), size):
        run = lines[first : first + size]
        values = {key: [line[key] for line in run if key in line] for key in {key for line in run for key in line}}
        points.append({key: sum(found) / len(found) for key, found in values.items()} | {"step": run[-1]["step"]})
    return points


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
