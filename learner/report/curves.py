"""Which metrics become which curve, and the histograms.

Every key of metrics.jsonl is shown somewhere: what has no chart of its own here gets one under its own name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from learner.report.svg import Series, draw_bars, draw_curves, short

_MAX_POINTS = 200
_MAX_BARS = 30

# Title, and the metrics drawn in it with their labels.
_CHARTS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("Loss", (("loss", "loss"),)),
    ("Gradient norm", (("grad_norm", "before clipping"),)),
    ("Entropy (nats per token)", (("entropy", "entropy"),)),
    ("KL", (("kl", "kl"),)),
    ("Ratio", (("ratio_mean", "mean"),)),
    ("Clipped tokens (fraction)", (("clip_fraction", "clipped"),)),
    ("Staleness (policy versions)", (("staleness_mean", "mean"), ("staleness_max", "max"))),
    ("Samples trained per second", (("samples_per_s", "samples/s"),)),
    ("Model tokens trained per second", (("tokens_per_s", "tokens/s"),)),
    (
        "Seconds in a step",
        (("wait_s", "wait for data"), ("train_s", "train"), ("push_s", "push"), ("pause_s", "servers paused")),
    ),
    ("Response length (tokens)", (("response_tokens_mean", "mean"),)),
    ("Turns", (("turns_mean", "mean"),)),
    ("Spread of rewards", (("reward_std", "standard deviation"),)),
    ("Window (groups)", (("window_used", "used"), ("equal_groups", "groups with equal rewards"))),
    ("Prompts", (("retried", "retried"), ("skipped", "skipped"))),
    ("Groups filtered before a step", (("filtered_low", "too hard"), ("filtered_high", "too easy"))),
)
_REWARD_KEYS = ("reward_mean", "eval_reward", "eval_reward_greedy")
# Positions, clocks and counts that would only draw a straight line.
_NO_CURVE = {
    "step",
    "policy_version",
    "time_s",
    "at_s",
    "num_samples",
    "num_model_tokens",
    "eval_policy_version",
    "eval_failed",
    "eval_step",
    "eval_version_min",
    "eval_version_max",
}
# Of these the number stands beside what it belongs to.
_NO_CURVE_ENDS = ("_error", "/num_prompts")
_EXPECTED = ("loss", "grad_norm", "entropy", "kl", "ratio_mean", "clip_fraction", "push_s")


@dataclass(frozen=True)
class Chart:
    """One picture of the report with its words."""

    title: str  # above the picture
    caption: str  # below the title: first and last value, or what the bars sum up to; may be empty
    # (label, number of its colour class) of each curve; empty for one curve, and for bars
    legend: tuple[tuple[str, int], ...]
    svg: Markup  # the picture


def reward_chart(lines: Sequence[Mapping[str, float]]) -> Chart | None:
    """Return training reward and held-out scores over the policy version that they were measured at."""
    rewards = _points(lines, "reward_mean")
    series = []
    if rewards:
        series.append(Series("training reward", 0, _thin(rewards), is_faint=len(rewards) >= 20))
        if len(rewards) >= 20:
            series.append(Series("training reward, moving mean", 0, _thin(_moving_mean(rewards))))
    for key, label, colour in (("eval_reward", "held-out, sampled", 1), ("eval_reward_greedy", "held-out, greedy", 2)):
        points = [(line.get("eval_policy_version", line["step"]), line[key]) for line in lines if key in line]
        if points:
            series.append(Series(label, colour, sorted(points), is_dotted=True))
    if not series:
        return None
    legend = tuple((entry.label, entry.colour) for entry in series if not entry.is_faint)
    return Chart("Reward", "", legend, draw_curves(series, "step", width=1000, height=280))


def metric_charts(lines: Sequence[Mapping[str, float]]) -> list[Chart]:
    """Return a chart for every other metric that was measured."""
    charts = [*_CHARTS]
    keys = {key for line in lines for key in line}
    logs = sorted(key for key in keys if key.startswith("reward_log/"))
    if logs:
        charts.append(
            ("What reward services logged", tuple((key, key.removeprefix("reward_log/")) for key in logs[:6]))
        )
    parts = sorted(key for key in keys if key.startswith("reward/"))
    if parts:
        charts.insert(0, ("Parts of the reward", tuple((key, key.removeprefix("reward/")) for key in parts[:6])))
    named = {key for _, members in charts for key, _ in members} | _NO_CURVE | set(_REWARD_KEYS)
    charts += [(key, ((key, key),)) for key in sorted(keys - named) if not key.endswith(_NO_CURVE_ENDS)]
    return [chart for title, members in charts if (chart := _chart(title, members, lines)) is not None]


def not_measured(lines: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the metrics that a reader would look for and that no step has."""
    return [key for key in _EXPECTED if lines and not any(key in line for line in lines)]


def staleness_chart(staleness: Mapping[int, int]) -> Chart | None:
    """Return how old the trained trajectories were. staleness: value -> trajectories."""
    if not staleness:
        return None
    bars = [(str(value), staleness.get(value, 0)) for value in range(min(0, *staleness), max(staleness) + 1)]
    total = sum(staleness.values())
    mean = sum(value * count for value, count in staleness.items()) / total
    caption = f"{total:,} trained trajectories, mean {mean:.2f}, max {max(staleness)} policy versions"
    return Chart("Staleness of what was trained", caption, (), draw_bars(bars if len(bars) <= 200 else bars[:200]))


def length_chart(lengths: Mapping[int, int]) -> Chart | None:
    """Return how many tokens the model wrote in each trained trajectory. lengths: tokens -> trajectories."""
    if not lengths:
        return None
    values, counts = np.array(list(lengths)), np.array(list(lengths.values()))
    width = max(1, -(-int(values.max() + 1 - values.min()) // _MAX_BARS))
    first = int(values.min()) // width * width
    totals = np.bincount((values - first) // width, weights=counts)
    bars = [(str(first + i * width), int(total)) for i, total in enumerate(totals)]
    mean = float((values * counts).sum() / counts.sum())
    caption = f"mean {mean:.0f}, max {values.max()} tokens; each bar is {width} token{'s' if width > 1 else ''} wide"
    return Chart("Tokens the model wrote", caption, (), draw_bars(bars))


def _chart(title: str, members: Sequence[tuple[str, str]], lines: Sequence[Mapping[str, float]]) -> Chart | None:
    series = []
    for colour, (key, label) in enumerate(members):
        if points := _points(lines, key):
            series.append(Series(label, colour, _thin(points)))
    if not series:
        return None
    only = series[0].points
    caption = f"{short(only[0][1])} → {short(only[-1][1])}" if len(series) == 1 else ""
    legend = tuple((entry.label, entry.colour) for entry in series) if len(series) > 1 else ()
    return Chart(title, caption, legend, draw_curves(series, "step"))


def _points(lines: Sequence[Mapping[str, float]], key: str) -> list[tuple[float, float]]:
    return [(line["step"], line[key]) for line in lines if key in line]


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most 200 points: means of equal runs of neighbours, so that a spike lifts its point and is not lost."""
    size = -(-len(points) // _MAX_POINTS)
    if size == 1:
        return points
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    return [(run[-1][0], sum(y for _, y in run) / len(run)) for run in runs]


def _moving_mean(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the mean of each point and its nearest neighbours, a twentieth of the run in all."""
    half = max(1, len(points) // 40)
    values = [y for _, y in points]
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [(x, sum(window) / len(window)) for (x, _), window in zip(points, windows, strict=True)]
