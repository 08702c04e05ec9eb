"""What happened to a trajectory as spans of time: for Perfetto's file and for OpenTelemetry.

    trajectory -> lease -> a turn, the environment's answer -> tools, a reward endpoint
               -> queue
               -> step -> push

Times are those of the process that measured them, so spans of machines whose clocks differ may be shifted. Turns, tools
and rewards are known of recorded samples (`report.samples_per_step`), the rest of every trajectory of the ledger.
Perfetto and chrome://tracing open the trace events: one process for each rollout server, with a row for each trajectory
that is under way at the same time; one for the learner. Format: "Trace Event Format", complete events (`ph: X`), times
in microseconds.

Attributes are named as in OpenTelemetry's conventions for generative AI, and tokens also as vLLM names them.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol.wire.trajectory import TimedCall

# Parts of a step in order; the step's end is `at_s`.
_PARTS = (("time/wait_s", "wait"), ("time/train_s", "train"), ("time/push_s", "push"))
_OF_FAILURE = ("attempt", "server", "boundary", "detail")
_OF_ROW = ("step", "staleness", "oldest_version", "newest_version", "finish", "reward", "num_turns", "num_tokens")
_LEARNER = 1
Calls = Mapping[tuple[str, int], Sequence[TimedCall]]  # of recorded samples by group and sample_index


@dataclass(frozen=True)
class Span:
    name: str
    start: float  # Unix seconds
    end: float  # Unix seconds
    parent: int | None  # place of its parent in the list; None: the root
    attributes: dict[str, Any]
    events: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)  # time, name, attributes


def step_parts(line: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Return name, start and end of the parts of a step from its line of metrics."""
    end, parts = line["at_s"], list[tuple[str, float, float]]()
    for key, name in reversed(_PARTS):
        if seconds := line.get(key, 0.0):
            parts.insert(0, (name, end - seconds, end))
            end -= seconds
    return parts


def lease_spans(row: Mapping[str, Any], calls: Sequence[TimedCall], parent: int | None = None) -> list[Span]:
    """Return the span of a trajectory's lease, at place (parent or -1) + 1 of its list, and those of its calls."""
    starts, ends = [call.started_at for call in calls], [call.finished_at for call in calls]
    attributes = {"sluice.server": row["server"], "sluice.attempt": row["attempt"]}
    start, end = min([row["started_at"], *starts]), max([row["received_at"], row["finished_at"], *ends])
    spans = [Span("lease", start, end, parent, attributes)]
    lease = 0 if parent is None else parent + 1
    answer: tuple[int, TimedCall] | None = None  # place and call of the environment's last answer
    for call in sorted(calls, key=lambda call: (call.started_at, -call.finished_at)):
        is_inside = answer is not None and call.kind == "tool" and call.finished_at <= answer[1].finished_at
        within = answer[0] if answer is not None and is_inside else lease
        if call.kind == "environment":
            answer = lease + len(spans), call
        spans.append(Span(_name_of(call), call.started_at, call.finished_at, within, _attributes(call, row)))
    return spans


def trajectory_spans(
    row: Mapping[str, Any],
    calls: Sequence[TimedCall],
    failures: Sequence[Mapping[str, Any]],
    line: Mapping[str, float] | None,
) -> list[Span]:
    """Return a trajectory's spans, the root first. A span that a later call adds comes last.

    row: of the ledger. failures: of its earlier attempts, of the ledger. line: metrics of its step; None: not there.
    """
    spans = lease_spans(row, calls, 0)
    if line is not None and "at_s" in line:
        received = row["received_at"]
        parts = {name: (max(received, start), max(received, end)) for name, start, end in step_parts(line)}
        started = min((start for name, (start, _) in parts.items() if name != "wait"), default=line["at_s"])
        spans.append(Span("queue", received, started, 0, {"sluice.staleness": row["staleness"]}))
        spans.append(Span("step", started, max(started, line["at_s"]), 0, {"sluice.step": row["step"]}))
        if "push" in parts:
            version = {"sluice.policy_version": line.get("policy_version", 0)}
            spans.append(Span("push", *parts["push"], len(spans), version))
    events = [
        (each["at"], "attempt failed", {f"sluice.{name}": each[name] for name in _OF_FAILURE}) for each in failures
    ]
    at = [*(span.start for span in spans), *(span.end for span in spans), *(event[0] for event in events)]
    known = {f"sluice.{name}": row[name] for name in _OF_ROW if row[name] is not None}
    root = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.conversation.id": f"{row['group']}/{row['sample_index']}",
        "gen_ai.usage.output_tokens": row["num_model_tokens"],
        **known,
    }
    return [Span("trajectory", min(at), max(at), None, root, events), *spans]


def _name_of(call: TimedCall) -> str:
    return {"turn": "chat policy", "tool": f"execute_tool {call.name}", "reward": f"reward {call.name}"}.get(
        call.kind, call.kind
    )


def _attributes(call: TimedCall, row: Mapping[str, Any]) -> dict[str, Any]:
    attributes: dict[str, Any] = {"sluice.requests": call.num_attempts} if call.num_attempts else {}
    match call.kind:
        case "turn":
            attributes = dict(_of_turn(call))
        case "tool":
            attributes |= {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": call.name}
        case "reward":
            attributes |= {"gen_ai.evaluation.name": call.name}
            if (reward := row["reward_parts"].get(call.name)) is not None:
                attributes["gen_ai.evaluation.score.value"] = reward
    return attributes


def _of_turn(call: TimedCall) -> Iterator[tuple[str, Any]]:
    yield "gen_ai.operation.name", "chat"
    yield "gen_ai.provider.name", "vllm"
    yield "gen_ai.request.model", "policy"
    yield "gen_ai.response.finish_reasons", [call.name]
    for names, number in ((("input", "prompt"), call.num_input), (("output", "completion"), call.num_output)):
        for name in names:
            yield f"gen_ai.usage.{name}_tokens", number


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
        events += _events_of([row for row in trajectories if row["server"] == server], pid, since, calls)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events_of(
    trajectories: Sequence[Mapping[str, Any]], pid: int, since: float, calls: Calls
) -> Iterator[dict[str, Any]]:
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
