"""The live panel: drawn from the coordinator's status and the metrics lines so far.

Names and texts come from other processes: they are shown as plain text, without control characters.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from learner.disk.run_folder import main_set
from learner.live.status import RunStatus, ServerStatus

_BARS = "▁▂▃▄▅▆▇█"
_SPARK_POINTS = 32
_SPARK_COLUMNS = 52  # of the panel, without the sparkline
_ECHO_COLUMNS = 4
_SMALL = (80, 24)  # columns, rows
_FACT_ROWS = 17  # of the panel, without servers and messages
_NUM_SERVERS = 8
_PACE_STEPS = 20
_RATE_S = 10.0
_NUM_REWARDS = 4096
_IN_MS = (("push_ms", "time/push_s"), ("pause_ms", "time/push_pause_s"))
_TROUBLES = ("failed:", "rejected:", "refused:", "dropped:")
_HEALTH = (
    *(("policy/entropy", "entropy {:.2f}"), ("policy/kl_sampler", "KL {:.4f}")),
    *(("length/mean", "{:,.0f} tokens an answer"), ("length/truncated_share", "{:.0%} cut off")),
)
# Part of a step's time -> what it waits for, and what to change.
_SLOW = {
    "time/wait_s": "waited for {awaited}",
    "time/train_s": "was training: add ranks, or raise learner.micro_batch_tokens",
    "time/push_s": "pushed weights: raise weights.bucket_mb, or take more groups per step",
}
_MUCH = 0.4
_GENERATION = "generation: add servers or shorten answers"
_OUTSIDE = "rewards or the environment, while the engines were idle: make them faster, or run more of them at once"
_FAILED = "samples that failed ({num:.0f}{most}) and were sampled again: repair what fails"
_LAST_STEP = (
    ("health", _HEALTH),
    (
        "trained",
        (
            *(("perf/samples_per_s", "{:,.1f} samples/s"), ("perf/tokens_per_s", "{:,.0f} tokens/s")),
            *(("data/staleness_mean", "staleness mean {:.2f}"), ("data/staleness_max", "max {:.0f}")),
        ),
    ),
    (
        "last step",
        (
            *(("time/wait_s", "wait {:.2f} s"), ("time/train_s", "train {:.2f} s")),
            *(("push_ms", "push {:.0f} ms"), ("pause_ms", "pause {:.0f} ms")),
        ),
    ),
)


class GenerationRates:
    """Tokens per second of each server, from its running count over the last ten seconds."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def take(self, servers: Mapping[str, ServerStatus | None], now: float) -> None:
        """Add the counts of a status. now: monotonic seconds."""
        for name, beat in servers.items():
            if beat is None:
                continue
            seen, count = self._seen.setdefault(name, deque()), beat.generated_tokens
            if seen and count < seen[-1][1]:
                seen.clear()  # the server restarted
            seen.append((now, count))
            while now - seen[0][0] > _RATE_S:
                seen.popleft()

    def of(self, server: str) -> float | None:
        """Return a server's tokens per second; None before there are two counts."""
        seen = self._seen.get(server, deque())
        if len(seen) < 2 or seen[-1][0] == seen[0][0]:
            return None
        return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


@dataclass
class PanelState:
    """Everything that the panel shows."""

    total_steps: int  # run.max_steps
    newest: Mapping[str, float] = field(default_factory=dict)  # newest line of metrics.jsonl; empty before the first
    scored: Mapping[str, float] = field(default_factory=dict)  # newest line with a held-out score
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_REWARDS))  # reward/mean of each step
    pace: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_PACE_STEPS))  # (step, at_s) pairs
    timed: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=_PACE_STEPS))  # lines of steps
    is_over: bool = False  # the run has ended: nothing is sampled any more
    status: RunStatus | None = None  # the coordinator's newest status; None before the first
    phase: str = ""
    rates: GenerationRates = field(default_factory=GenerationRates)

    def take(self, line: Mapping[str, float], is_new: bool) -> None:
        """Add a line of metrics.jsonl. is_new: it is of this start of the run."""
        self.newest = line
        if "reward/mean" in line:
            self.rewards.append(line["reward/mean"])
        if main_set(line):
            self.scored = line
        if is_new and "time/wait_s" in line:
            self.timed.append(line)
        if is_new and "at_s" in line:
            self.pace.append((line["step"], line["at_s"]))


def render_panel(
    state: PanelState, messages: Sequence[tuple[float, str]], elapsed_s: float, size: tuple[int, int] = _SMALL
) -> RenderableType:
    """Return the panel. messages: (Unix time, text), oldest first. size: columns and rows of the terminal."""
    columns, rows = size
    num_servers = max(2, min(_NUM_SERVERS, rows - _FACT_ROWS - 2 * len(messages)))
    parts: list[RenderableType] = [_progress(state, elapsed_s)]
    if state.status is None or not state.newest:
        parts.append(Text(state.phase, style="dim"))
    if state.status is not None:
        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="bold", no_wrap=True, min_width=9)
        facts.add_column()
        for label, shown in _facts(state, state.status, columns - _SPARK_COLUMNS):
            facts.add_row(label, shown if isinstance(shown, Text) else Text(shown, no_wrap=True, overflow="ellipsis"))
        parts.append(facts)
        if not state.is_over:
            parts.append(_servers(state, state.status, num_servers))
            parts.append(Text(one_line(state.status.detail), style="dim", no_wrap=True, overflow="ellipsis"))
    num_free = rows - _FACT_ROWS - (0 if state.is_over else num_servers)
    for at, text in _fitting(messages, columns, num_free):
        parts.append(Text(f"{time.strftime('%H:%M:%S', time.localtime(at))} {text}", style="yellow"))
    # A terminal writes ^C after the panel. It must fit on the panel's last line, which the next frame begins at.
    width = columns - _ECHO_COLUMNS
    return Panel(Group(*parts), title="sluice", title_align="left", box=box.ROUNDED, border_style="cyan", width=width)


def _fitting(messages: Sequence[tuple[float, str]], columns: int, rows: int) -> list[tuple[float, str]]:
    """Return the newest messages that fit into the rows, at least one: the terminal would cut the newest off."""
    shown: list[tuple[float, str]] = []
    for message in reversed(messages):
        rows -= 1 + (len(message[1]) + 9) // (columns - _ECHO_COLUMNS - 12)
        if shown and rows < 0:
            break
        shown.insert(0, message)
    return shown


def sparkline(values: Sequence[float], num_points: int = _SPARK_POINTS) -> str:
    """Return a row of bars scaled from lowest to highest value; equal parts are averaged when values exceed points."""
    if not values:
        return ""
    num = min(num_points, len(values))
    bounds = [i * len(values) // num for i in range(num + 1)]
    points = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(points), max(points)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((point - low) * scale)] for point in points)


def one_line(text: str) -> str:
    """Return text on one line without control characters: another process's escape sequences stay off the terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def seconds_left(state: PanelState) -> float | None:
    """Return the time left at the pace of this start's last twenty steps; None before its second step."""
    if len(state.pace) < 2:
        return None
    (first, began), (last, ended) = state.pace[0], state.pace[-1]
    return None if last <= first else (ended - began) / (last - first) * max(0.0, state.total_steps - last)


def step_times(line: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a step by what they went to."""
    return {key: line.get(key, 0.0) for key in _SLOW}


def describe_slowness(lines: Sequence[Mapping[str, float]], failed: Mapping[str, int]) -> str:
    """Return what most of the last steps' time went to, and what to change; empty without a large part.

    failed: failed samples of the run by what failed.
    """
    times = [step_times(line) for line in lines]
    total = sum(sum(step.values()) for step in times)
    part = max(_SLOW, key=lambda key: sum(step[key] for step in times))
    share = sum(step[part] for step in times) / total if total else 0.0
    steps = "step" if len(times) == 1 else f"{len(times)} steps"
    wanted = _SLOW[part].format(awaited=_describe_awaited(lines, failed))
    return f"{share:.0%} of the last {steps} {wanted}" if share > _MUCH else ""


def _describe_awaited(lines: Sequence[Mapping[str, float]], failed: Mapping[str, int]) -> str:
    """Return what the samples of these steps waited for, and what to change."""
    if not lines:
        return _GENERATION
    num_failed = lines[-1].get("data/failed", 0) - (lines[0].get("data/failed", 0) if len(lines) > 1 else 0)
    if num_failed > _MUCH * sum(line.get("data/num_samples", 0) for line in lines):
        most = f", most by {one_line(max(failed, key=lambda name: failed[name]))}" if failed else ""
        return _FAILED.format(num=num_failed, most=most)
    outside = [line["perf/outside_share"] for line in lines if "perf/outside_share" in line]
    return _OUTSIDE if sum(outside) > len(outside) / 2 else _GENERATION


def _progress(state: PanelState, elapsed_s: float) -> Table:
    step = state.status.step if state.status else 0
    left = seconds_left(state)
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    bar = ProgressBar(total=max(1, state.total_steps), completed=step)
    remaining = "" if left is None else f", {_clock(left)} left"
    ended = "done in" if step >= state.total_steps else "ended after"
    times = f"{ended} {_clock(elapsed_s)}" if state.is_over else f"{_clock(elapsed_s)} so far{remaining}"
    grid.add_row(f"step {step}/{state.total_steps}", bar, times)
    return grid


def _facts(state: PanelState, status: RunStatus, spark_columns: int) -> Iterator[tuple[str, str | Text]]:
    """Yield (label, text) of each row; a Text may be several lines."""
    if state.rewards:
        ends = f"  {min(state.rewards):.3f} to {max(state.rewards):.3f}"
        spark = (sparkline(list(state.rewards), spark_columns), "green")
        yield "reward", Text.assemble(f"{state.rewards[-1]:.3f}  ", spark, (ends, "dim"))
    if scores := _held_out(state, status):
        yield "held-out", scores
    in_ms = {key: 1000 * state.newest[name] for key, name in _IN_MS if name in state.newest}
    line = {**state.newest, **in_ms}
    for label, shapes in _LAST_STEP:
        if shown := [shape.format(line[key]) for key, shape in shapes if key in line]:
            yield label, ", ".join(shown)
    failed = {name.partition(":")[2]: count for name, count in status.counts.items() if name.startswith("failed:")}
    if slow := describe_slowness(state.timed, failed):
        yield "slow", Text(slow)
    if state.is_over:
        return
    yield "window", f"{status.window_used}/{status.window_size} groups, {status.ready} ready"
    events = [f"{status.counts.get(name, 0)} {name}" for name in ("retried", "skipped")]
    events += [f"{status.counts['filtered']} filtered"] if "filtered" in status.counts else []
    yield "prompts", ", ".join(events)
    troubles = [f"{one_line(key)} {count}" for key, count in sorted(status.counts.items()) if key.startswith(_TROUBLES)]
    if troubles:
        yield "troubles", Text(", ".join(troubles), style="yellow")


def _held_out(state: PanelState, status: RunStatus) -> str:
    scored = state.scored
    keys = {"sampled": f"eval/{main_set(scored)}/reward", "greedy": f"eval/{main_set(scored)}/greedy"}
    parts = [f"{scored[key]:.3f} {name}" for name, key in keys.items() if key in scored]
    if parts:
        parts.append(f"at step {int(scored.get('eval/policy_version', scored['step']))}")
    if status.evaluation and not state.is_over:
        parts.append(f"scoring {one_line(status.evaluation)}")
    return ", ".join(parts)


def _servers(state: PanelState, status: RunStatus, num_shown: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("server")
    for name in ("version", "running", "waiting", "tokens/s"):
        table.add_column(name, justify="right")
    for name, beat in sorted(status.servers.items())[:num_shown]:
        if beat is None:
            table.add_row(Text(one_line(name)), "not heard yet", style="dim")
            continue
        rate, version = state.rates.of(name), beat.policy_version
        shown = ("not synced" if version is None else str(version), str(beat.running), str(beat.waiting))
        table.add_row(Text(one_line(name)), *shown, "" if rate is None else f"{rate:,.0f}")
    if len(status.servers) > num_shown:
        table.add_row(f"and {len(status.servers) - num_shown} more", style="dim")
    return table


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
