"""Draws curves, bars and timelines as inline SVG.

SVG by hand and not a plotting library: the report is written at the end of every run, on Ctrl-C too, and has to open
without a network; this takes milliseconds, stays sharp at any width and takes its colours from the page's style sheet.
Colours are the classes c0 to c5.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 16, 8, 22
_LANE, _LANE_GAP, _LANE_LEFT = 26, 6, 130


@dataclass(frozen=True)
class Series:
    """One curve."""

    label: str  # in the legend, and where one points at a value
    colour: int  # number of its class: 0 to 5
    points: Sequence[tuple[float, float]]  # (x, y), x rising
    is_dotted: bool = False  # True: each point is marked, for values that are measured now and then
    is_faint: bool = False  # True: drawn pale, as the background of a smoother curve


@dataclass(frozen=True)
class Lane:
    """One row of a timeline."""

    label: str  # at its left; cut after 20 characters
    colour: int  # number of its class: 0 to 5
    levels: Sequence[float]  # equal slices of the time shown, each 0 (idle) to 1 (full)
    note: str  # below the label; cut after 26 characters


def draw_curves(series: Sequence[Series], x_name: str, width: int = 380, height: int = 160) -> Markup:
    """Return the curves over one pair of axes; pointing at a place shows its values."""
    points = [point for entry in series for point in entry.points]
    x_axis = _Axis.around([x for x, _ in points], _LEFT, width - _RIGHT, is_tight=True)
    y_axis = _Axis.around([y for _, y in points], height - _BOTTOM, _TOP)
    parts = [_grid(x_axis, y_axis, width, height)]
    for entry in series:
        shape = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in entry.points)
        faint = " faint" if entry.is_faint else ""
        parts.append(Markup('<polyline class="line c{}{}" points="{}"/>').format(entry.colour, faint, shape))
        if entry.is_dotted or len(entry.points) == 1:
            parts += [
                Markup('<circle class="dot c{}" cx="{:.1f}" cy="{:.1f}" r="2.6"/>').format(
                    entry.colour, x_axis.at(x), y_axis.at(y)
                )
                for x, y in entry.points
            ]
    parts += _hover_strips(series, x_name, x_axis, height)
    return _svg(parts, width, height)


def draw_bars(bars: Sequence[tuple[str, int]], width: int = 380, height: int = 160) -> Markup:
    """Return one bar for each (label, count), with counts as the axis."""
    y_axis = _Axis.around([0.0, *(float(count) for _, count in bars)], height - _BOTTOM, _TOP)
    room = (width - _LEFT - _RIGHT) / max(1, len(bars))
    parts = [_grid(None, y_axis, width, height)]
    label_every = max(1, math.ceil(len(bars) * 34 / (width - _LEFT)))
    for index, (label, count) in enumerate(bars):
        x, y = _LEFT + index * room, y_axis.at(count)
        parts.append(
            Markup(
                '<rect class="bar c0" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}">'
                "<title>{}: {:,}</title></rect>"
            ).format(x + room * 0.08, y, min(room * 0.84, 60), max(0.0, y_axis.at(0) - y), label, count)
        )
        if index % label_every == 0:
            middle = x + room * 0.08 + min(room * 0.84, 60) / 2
            parts.append(Markup('<text class="x" x="{:.1f}" y="{}">{}</text>').format(middle, height - 7, label))
    return _svg(parts, width, height)


def draw_timeline(lanes: Sequence[Lane], start_s: float, end_s: float, width: int = 1000) -> Markup:
    """Return the lanes above a common axis of seconds."""
    height = len(lanes) * (_LANE + _LANE_GAP) + _BOTTOM + 4
    axis = _Axis(start_s, max(end_s, start_s + 1e-9), _LANE_LEFT, width - _RIGHT)
    parts = []
    ticks = nice_ticks(start_s, end_s, 10)
    for tick, label in zip(ticks, tick_labels(ticks), strict=True):
        x = axis.at(tick)
        parts.append(Markup('<line class="rule" x1="{0:.1f}" x2="{0:.1f}" y1="0" y2="{1}"/>').format(x, height - 20))
        parts.append(Markup('<text class="x" x="{:.1f}" y="{}">{} s</text>').format(x, height - 6, label))
    for index, lane in enumerate(lanes):
        bottom = (index + 1) * (_LANE + _LANE_GAP)
        step = (width - _RIGHT - _LANE_LEFT) / max(1, len(lane.levels))
        path = [f"M{_LANE_LEFT} {bottom}"]
        for place, level in enumerate(lane.levels):
            path.append(f"V{bottom - level * _LANE:.1f}H{_LANE_LEFT + (place + 1) * step:.1f}")
        parts.append(
            Markup('<path class="area c{}" d="{}V{}Z"><title>{}: {}</title></path>').format(
                lane.colour, "".join(path), bottom, lane.label, lane.note
            )
        )
        parts.append(Markup('<text class="lane" x="0" y="{}">{}</text>').format(bottom - 13, lane.label[:20]))
        parts.append(Markup('<text class="note" x="0" y="{}">{}</text>').format(bottom - 2, lane.note[:26]))
    return _svg(parts, width, height)


def nice_ticks(low: float, high: float, num: int, least_step: float = 0.0) -> list[float]:
    """Return about num round numbers inside [low, high], at least least_step apart: 1 for what is counted.

    Example: nice_ticks(0, 1, 4) is [0.0, 0.2, 0.4, 0.6, 0.8, 1.0].
    """
    if not high > low:
        return [low]
    rough = max((high - low) / num, least_step)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.75)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return a text for each tick, with as many decimals as tell neighbours apart: 0.995 and 1.000, not 1 and 1."""
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 0.0
    labels = [short(tick) for tick in ticks]
    if step <= 0 or max(map(abs, ticks)) >= 1e4 or (step < 1e-4 and len(set(labels)) == len(labels)):
        return labels
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{tick:.{decimals}f}" for tick in ticks]


def short(value: float) -> str:
    """Return a number in few characters: 12.5k, 0.031, -3e-06."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.3g}" if size < 1000 else f"{value:.0f}"


@dataclass(frozen=True)
class _Axis:
    """Maps [low, high] to pixels [start, end]."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float, *, is_tight: bool = False) -> "_Axis":
        low, high = min(values), max(values)
        if high <= low:
            room = abs(low) * 0.1 or 1.0
            return cls(low - room, high + room, start, end)
        margin = 0.0 if is_tight else (high - low) * 0.05
        # What never went below zero is shown from zero or above it: an axis that starts at -0.04 samples/s confuses.
        return cls(max(0.0, low - margin) if low >= 0 else low - margin, high + margin, start, end)

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def _grid(x_axis: _Axis | None, y_axis: _Axis, width: int, height: int) -> Markup:
    parts = []
    ticks = nice_ticks(y_axis.low, y_axis.high, 4)
    for tick, label in zip(ticks, tick_labels(ticks), strict=True):
        y = y_axis.at(tick)
        parts.append(
            Markup('<line class="rule" x1="{}" x2="{}" y1="{y:.1f}" y2="{y:.1f}"/>').format(_LEFT, width - _RIGHT, y=y)
        )
        parts.append(Markup('<text class="y" x="{}" y="{:.1f}">{}</text>').format(_LEFT - 5, y + 3.5, label))
    if x_axis is not None:
        ticks = nice_ticks(x_axis.low, x_axis.high, 5, least_step=1.0)
        for tick, label in zip(ticks, tick_labels(ticks), strict=True):
            parts.append(
                Markup('<text class="x" x="{:.1f}" y="{}">{}</text>').format(x_axis.at(tick), height - 7, label)
            )
    return Markup("").join(parts)


def _hover_strips(series: Sequence[Series], x_name: str, x_axis: _Axis, height: int) -> list[Markup]:
    """Return an invisible strip for every x, carrying the values there: reading a curve needs no script."""
    values: dict[float, list[str]] = {}
    for entry in series:
        for x, y in entry.points:
            values.setdefault(x, []).append(f"{entry.label} {y:.4g}")
    places = sorted(values)
    middles = [(x_axis.at(a) + x_axis.at(b)) / 2 for a, b in pairwise(places)]
    edges = [float(_LEFT), *middles, x_axis.end]
    return [
        Markup('<rect class="hover" x="{:.1f}" y="0" width="{:.1f}" height="{}"><title>{}</title></rect>').format(
            left, right - left, height - _BOTTOM, "\n".join([f"{x_name} {short(x)}", *values[x]])
        )
        for x, (left, right) in zip(places, pairwise(edges), strict=True)
    ]


def _svg(parts: Sequence[Markup], width: int, height: int) -> Markup:
    """A wide picture keeps a width at which its text can be read: a narrow screen scrolls it sideways."""
    wide = Markup(' class="wide"') if width >= 800 else ""
    return Markup('<svg viewBox="0 0 {} {}" role="img"{}>{}</svg>').format(width, height, wide, Markup("").join(parts))
