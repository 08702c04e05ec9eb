"""When servers generated, when the learner trained, when weights were pushed: the picture of how much overlapped.

Times are Unix seconds; the server's clock and the coordinator's are taken to agree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from learner.report.facts import Spans
from learner.report.svg import Lane, draw_timeline

_NUM_SLICES = 400
_NUM_SERVERS = 16
_CLOSE_UP_STEPS = 8


@dataclass(frozen=True)
class Timeline:
    """What servers and learner did over a stretch of the run."""

    title: str  # above the picture
    svg: Markup  # the picture; its axis counts seconds from the first moment of the last start


def draw_timelines(spans: Spans, lines: Sequence[Mapping[str, float]]) -> list[Timeline]:
    """Return the run's last start as a whole and some steps from its middle close up; empty without any times."""
    steps = _steps(lines, since=float(spans.started_at.min()) if spans.started_at.size else 0.0)
    moments = [*steps.start, *steps.end, *spans.started_at[:], *spans.finished_at[:]]
    if not moments:
        return []
    origin, end = min(moments), max(moments)
    timelines = [Timeline("The whole run", _draw(spans, steps, origin, origin, end))]
    if len(steps.end) > 2 * _CLOSE_UP_STEPS:
        first = len(steps.end) // 2 - _CLOSE_UP_STEPS // 2
        near, far = float(steps.start[first]), float(steps.end[first + _CLOSE_UP_STEPS - 1])
        timelines.append(Timeline(f"{_CLOSE_UP_STEPS} steps in the middle", _draw(spans, steps, origin, near, far)))
    return timelines


def mean_in_flight(
    start: NDArray[np.float64], end: NDArray[np.float64], edges: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return how many of the intervals [start, end) were open in each slice, averaged over the slice.

    start, end: [N]; edges: [B + 1], rising. Returns [B].
    Exact: the seconds that intervals spent before t are a difference of two sums over sorted ends, one for each edge.
    """
    seconds = _ramp(start, edges) - _ramp(end, edges)
    mean: NDArray[np.float64] = np.diff(seconds) / np.diff(edges)
    return mean


@dataclass(frozen=True)
class _Steps:
    """When each of N steps did what, in Unix seconds."""

    start: NDArray[np.float64]  # [N] when the wait for data began
    end: NDArray[np.float64]  # [N] when the push had ended
    trained: NDArray[np.float64]  # [N, 2] from, to
    pushed: NDArray[np.float64]  # [N, 2] from, to


def _steps(lines: Sequence[Mapping[str, float]], since: float) -> _Steps:
    """Return when the parts of each step were. A step's line has the time right after its push: counted back from it.

    Older versions gave the last step's line the time when its evaluation was done: there its parts are counted on from
    the line before it.
    """
    rows = []
    for before, line in pairwise([{}, *lines]):
        if "at_s" not in line or "train_s" not in line or line["at_s"] < since:
            continue
        wait, train, push = line.get("wait_s", 0.0), line["train_s"], line.get("push_s", 0.0)
        end = line["at_s"]
        if line.get("eval_policy_version") == line.get("policy_version", -1) and before.get("at_s", 0.0) >= since:
            end = min(end, before["at_s"] + wait + train + push)
        rows.append((end - push - train - wait, end - push - train, end - push, end))
    table = np.array(rows, np.float64).reshape(-1, 4)
    return _Steps(table[:, 0], table[:, 3], table[:, 1:3], table[:, 2:4])


def _draw(spans: Spans, steps: _Steps, origin: float, start: float, end: float) -> Markup:
    edges = np.linspace(start, max(end, start + 1e-3), _NUM_SLICES + 1)
    lanes = []
    shown = min(len(spans.servers), _NUM_SERVERS)
    for index in range(shown):
        lanes.append(_server_lane(spans, spans.server == index, spans.servers[index], edges))
    if len(spans.servers) > shown:
        lanes.append(_server_lane(spans, spans.server >= shown, f"{len(spans.servers) - shown} more servers", edges))
    for label, colour, intervals in (("training", 1, steps.trained), ("weight push", 2, steps.pushed)):
        if intervals.size:
            busy = np.clip(mean_in_flight(intervals[:, 0], intervals[:, 1], edges), 0.0, 1.0)
            lanes.append(Lane(label, colour, busy.tolist(), f"{busy.mean():.0%} of the time"))
    return draw_timeline(lanes, start - origin, end - origin)


def _server_lane(spans: Spans, is_its: NDArray[np.bool_], name: str, edges: NDArray[np.float64]) -> Lane:
    levels = mean_in_flight(spans.started_at[is_its], spans.finished_at[is_its], edges)
    top = float(levels.max())
    note = f"up to {top:.0f} in flight" if top >= 1 else "idle"
    return Lane(name, 0, (levels / top if top > 0 else levels).tolist(), note)


def _ramp(moments: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return sum over the moments m of max(0, t - m), for every edge t."""
    first = float(edges[0])
    ordered = np.sort(moments) - first  # near zero, so that sums of Unix times lose no digits
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    num = np.searchsorted(ordered, edges - first, side="right")
    ramp: NDArray[np.float64] = num * (edges - first) - sums[num]
    return ramp
