"""The live panel's content, drawn from the coordinator's status and the metrics lines so far.

Names and texts in a status come from other processes: they are shown as plain
text, without control characters.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from learner.live.status import RunStatus, ServerStatus

_BARS = "▁▂▃▄▅▆▇█"
_SPARK_POINTS = 32
_NUM_SERVERS = 8
_PACE_STEPS = 20
_RATE_S = 10.0
# What the panel draws of steps before the newest: a whole line takes 5 KB, and thousands of them are kept.
_OF_EARLIER_STEPS = ("step", "at_s", "reward_mean", "eval_reward", "eval_reward_greedy", "eval_policy_version")
_NUM_STEPS = 4096
_TROUBLES = ("failed:", "rejected:", "refused:", "dropped:")


class GenerationRates:
    """Tokens that each server generates per second, from its running count over the last ten seconds."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def take(self, servers: Mapping[str, ServerStatus | None], now: float) -> None:
        """Note the counts of a status. now: monotonic seconds."""
        for name, beat in servers.items():
            if beat is None:
                continue
            seen, count = self._seen.setdefault(name, deque()), beat.generated_tokens
            if seen and count < seen[-1][1]:
                seen.clear()  # the server started again and counts from zero
            seen.append((now, count))
            while now - seen[0][0] > _RATE_S:
                seen.popleft()

    def of(self, server: str) -> float | None:
        """Return a server's tokens per second, None before two counts are known."""
        seen = self._seen.get(server, deque())
        if len(seen) < 2 or seen[-1][0] == seen[0][0]:
            return None
        return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


@dataclass
class PanelState:
    """What the panel is drawn from."""

    total_steps: int  # run.max_steps
    newest: Mapping[str, float] = field(default_factory=dict)  # line of metrics.jsonl; empty: there is none yet
    # What is drawn of the newest 4,096 lines, the newest last.
    steps: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=_NUM_STEPS))
    num_new_lines: int = 0  # lines written since this start of the run; the others are an earlier start's
    status: RunStatus | None = None  # the coordinator's last answer; None: none has come yet
    phase: str = ""  # what is being prepared, shown until steps begin
    rates: GenerationRates = field(default_factory=GenerationRates)  # tokens per second of each server

    def take(self, line: Mapping[str, float]) -> None:
        """Note a line of metrics.jsonl."""
        self.newest = line
        self.steps.append({key: line[key] for key in _OF_EARLIER_STEPS if key in line})


def render_panel(state: PanelState, warnings: Sequence[tuple[float, str]], elapsed_s: float) -> RenderableType:
    """Return the panel. warnings: (Unix time, text), oldest first."""
    parts: list[RenderableType] = [_progress(state, elapsed_s)]
    if state.status is None or not state.newest:
        parts.append(Text(state.phase, style="dim"))
    if state.status is not None:
        parts += [_facts(state, state.status), _servers(state, state.status)]
        parts.append(Text(one_line(state.status.detail), style="dim", no_wrap=True, overflow="ellipsis"))
    for at, text in warnings:
        parts.append(Text(f"{time.strftime('%H:%M:%S', time.localtime(at))} {text}", style="yellow"))
    return Panel(Group(*parts), title="sluice", title_align="left", box=box.ROUNDED, border_style="cyan")


def sparkline(values: Sequence[float], num_points: int = _SPARK_POINTS) -> str:
    """Return a row of bars, lowest value to highest; more values than points are averaged in equal parts."""
    if not values:
        return ""
    num = min(num_points, len(values))
    bounds = [i * len(values) // num for i in range(num + 1)]
    points = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(points), max(points)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((point - low) * scale)] for point in points)


def one_line(text: str) -> str:
    """Return text on one line without control characters: no foreign escape sequence may reach a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def seconds_left(state: PanelState) -> float | None:
    """Return the time left at the pace of the last twenty steps of this start; None before two of them are known."""
    lines = [line for line in list(state.steps)[-min(state.num_new_lines, _PACE_STEPS) :] if "at_s" in line]
    if state.num_new_lines < 2 or len(lines) < 2 or lines[-1]["step"] <= lines[0]["step"]:
        return None
    pace_s = (lines[-1]["at_s"] - lines[0]["at_s"]) / (lines[-1]["step"] - lines[0]["step"])
    return pace_s * max(0.0, state.total_steps - lines[-1]["step"])


def _progress(state: PanelState, elapsed_s: float) -> Table:
    step = state.status.step if state.status else 0
    left = seconds_left(state)
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    times = f"{_clock(elapsed_s)} so far" + ("" if left is None else f", {_clock(left)} left")
    grid.add_row(
        f"step {step}/{state.total_steps}", ProgressBar(total=max(1, state.total_steps), completed=step), times
    )
    return grid


def _facts(state: PanelState, status: RunStatus) -> Table:
    line = state.newest
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="ellipsis", no_wrap=True)
    rewards = [entry["reward_mean"] for entry in state.steps if "reward_mean" in entry]
    if rewards:
        grid.add_row("reward", Text.assemble(f"{rewards[-1]:.3f}  ", (sparkline(rewards), "green")))
    if held_out := _held_out(state, status):
        grid.add_row("held-out", held_out)
    _add(grid, "staleness", line, (("staleness_mean", "mean {:.2f}"), ("staleness_max", "max {:.0f}")))
    _add(grid, "trained", line, (("samples_per_s", "{:,.1f} samples/s"), ("tokens_per_s", "{:,.0f} tokens/s")))
    seconds = (("wait_s", "wait {:.2f} s"), ("train_s", "train {:.2f} s"))
    in_ms = {key: 1000 * line[key] for key in ("push_s", "pause_s") if key in line}
    _add(grid, "last step", {**line, **in_ms}, (*seconds, ("push_s", "push {:.0f} ms"), ("pause_s", "pause {:.0f} ms")))
    window = f"{status.window_used}/{status.window_size} groups, {status.ready} ready"
    grid.add_row("window", window)
    counts: Mapping[str, int] = status.counts
    filtered = f", {counts['filtered']} filtered" if "filtered" in counts else ""
    grid.add_row("prompts", f"{status.retried} retried, {status.skipped} skipped{filtered}")
    troubles = [f"{one_line(key)} {count}" for key, count in sorted(counts.items()) if key.startswith(_TROUBLES)]
    if troubles:
        grid.add_row("troubles", Text(", ".join(troubles), style="yellow"))
    return grid


def _held_out(state: PanelState, status: RunStatus) -> str:
    parts = []
    scored = next((line for line in reversed(state.steps) if "eval_reward" in line or "eval_reward_greedy" in line), {})
    keys = (("eval_reward", "sampled"), ("eval_reward_greedy", "greedy"))
    parts += [f"{scored[key]:.3f} {name}" for key, name in keys if key in scored]
    if parts:
        parts.append(f"at step {int(scored.get('eval_policy_version', scored['step']))}")
    if status.evaluation:
        parts.append(f"scoring {one_line(status.evaluation)}")
    return ", ".join(parts)


def _servers(state: PanelState, status: RunStatus) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("server")
    for name in ("version", "running", "waiting", "tokens/s"):
        table.add_column(name, justify="right")
    servers: Mapping[str, ServerStatus | None] = status.servers
    for name, beat in sorted(servers.items())[:_NUM_SERVERS]:
        if beat is None:
            table.add_row(Text(one_line(name)), "not heard yet", style="dim")
            continue
        rate, version = state.rates.of(name), beat.policy_version
        table.add_row(
            Text(one_line(name)),
            "not synced" if version is None else str(version),
            str(beat.running),
            str(beat.waiting),
            "" if rate is None else f"{rate:,.0f}",
        )
    if len(servers) > _NUM_SERVERS:
        table.add_row(f"and {len(servers) - _NUM_SERVERS} more", style="dim")
    return table


def _add(grid: Table, label: str, line: Mapping[str, float], shapes: Sequence[tuple[str, str]]) -> None:
    """Add a row of the values that the last step measured, if it measured any."""
    shown = [shape.format(line[key]) for key, shape in shapes if key in line]
    if shown:
        grid.add_row(label, ", ".join(shown))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
