"""A run's newest trajectories and steps as trace events, which Perfetto and chrome://tracing open.

One process for each rollout server, with a row for each trajectory that is under way at the same time; one for the
learner. Format: "Trace Event Format", complete events (`ph: X`), times in microseconds.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from learner.report.dash.spans import lease_spans, step_parts
from protocol.wire.trajectory import TimedCall

_LEARNER = 1
Calls = Mapping[tuple[str, int], Sequence[TimedCall]]  # of recorded samples by group and sample_index


def trace_events(
    trajectories: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, float]], calls: Calls
) -> dict[str, Any]:
    """Return the file's content. trajectories: rows of the ledger. lines: of metrics.jsonl."""
    servers = {name: _LEARNER + 1 + i for i, name in enumerate(sorted({str(row["server"]) for row in trajectories}))}
    names = {_LEARNER: "learner", **{pid: name for name, pid in servers.items()}}
    starts = [row["started_at"] for row in trajectories] + [line["at_s"] for line in lines if "at_s" in line]
    since = min(starts, default=0.0)
    events = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}} for pid, name in names.items()]
    for line in lines:
        if line.get("at_s", 0.0) >= since:
            parts = step_parts(line)
            events += [
                _event(name, _LEARNER, 1, start, end, since, {"step": line["step"]}) for name, start, end in parts
            ]
    for server, pid in servers.items():
        events += _rows([row for row in trajectories if row["server"] == server], pid, since, calls)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rows(trajectories: Sequence[Mapping[str, Any]], pid: int, since: float, calls: Calls) -> Iterator[dict[str, Any]]:
    free: list[int] = []  # rows whose trajectory has ended
    busy: list[tuple[float, int]] = []  # (end, row)
    shown = ("group", "sample_index", "reward", "finish", "num_model_tokens", "oldest_version", "step", "staleness")
    for row in sorted(trajectories, key=lambda each: each["started_at"]):
        while busy and busy[0][0] <= row["started_at"]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        place = heapq.heappop(free) if free else len(busy) + 1
        heapq.heappush(busy, (row["finished_at"], place))
        args = {name: row[name] for name in shown}
        yield _event(str(row["group"]), pid, place, row["started_at"], row["finished_at"], since, args)
        _, *parts = lease_spans(row, calls.get((row["group"], row["sample_index"]), []))
        for part in parts:
            yield _event(part.name, pid, place, part.start, part.end, since, part.attributes)


def _event(name: str, pid: int, row: int, start: float, end: float, since: float, args: Any) -> dict[str, Any]:
    times = {"ts": round(1e6 * (start - since)), "dur": round(1e6 * (end - start))}
    return {"ph": "X", "name": name, "pid": pid, "tid": row, **times, "args": args}
