"""`--forecast`: speed and idle shares of a run at each staleness and each split of the GPUs, by a simulation.

An attachment of `--plan`. Its seconds come from the folder of a short run, or from JSON:

    sluice plan --config mine.yaml --forecast runs/short
    sluice plan --config mine.yaml --forecast '{"mean_tokens": 900, "token_s": 0.008, "train_token_s": 1e-4}'
"""

import json
import math
import os
import random
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated

from pydantic import Field, PositiveFloat, ValidationError
from rich.console import Console
from rich.table import Table

from learner.disk.run_folder import parse_metrics_line, read_only_uri
from learner.plan.needs import takes_parts
from learner.plan.processes import Topology
from learner.run.simulation import Layout, Outcome, Rates, simulate
from protocol.errors import SettingsError
from protocol.settings.loader import load_saved_settings
from protocol.settings.section import CountAboveZero
from protocol.settings.settings import Settings

_STALENESSES = range(5)
_SIGMA = math.log(10.0) / 2.326  # of a lognormal's logarithm: the 99th percentile is ten times the median
_NUM_SPLITS = 8
_NUM_SIMULATED = 200  # steps, to find the factor of a run's figures
_GAIN = 1.02  # asynchrony below it gains nothing
_KIND, _STARTED, _FINISHED = 0, 2, 3  # fields of a TimedCall

Span = tuple[str, int, float, float]  # a sample in an engine: server, tokens, start and end


class Figures(Rates):
    """What a forecast needs."""

    mean_tokens: PositiveFloat  # tokens of a sample
    lengths: Annotated[list[CountAboveZero], Field(min_length=1)] | None = None  # of real samples; None: lognormal

    def drawer(self, longest: int, *, has_long_tails: bool) -> Callable[[], int]:
        """Return a function that draws lengths. has_long_tails: p99 is ten times the median, the mean stays."""
        draw, lengths, sigma = random.Random(1), self.lengths, _SIGMA if has_long_tails else 0.5  # noqa: S311
        if lengths is not None and not has_long_tails:
            return lambda: min(longest, draw.choice(lengths))
        middle = math.log(self.mean_tokens) - sigma**2 / 2
        return lambda: min(longest, max(1, round(draw.lognormvariate(middle, sigma))))

    def times(self, factor: float) -> "Figures":
        """Return them with all work so many times as slow."""
        names = ("token_s", "token_sample_s", "train_token_s", "step_s")
        return self.model_copy(update={name: getattr(self, name) * factor for name in names})


@dataclass(frozen=True)
class Row:
    """The forecast of a split at a staleness."""

    layout: Layout
    outcome: Outcome

    @property
    def split(self) -> str:
        split = f"{self.layout.num_servers} servers, {self.layout.num_ranks} ranks"
        return f"{split} in turns" if self.layout.shares_devices else split


def show_forecast(settings: Settings, given: str, topology: Topology, *, has_long_tails: bool) -> None:
    """Print the forecast. given: JSON, or the folder of a run. Raises: SettingsError."""
    num_cores = 0 if topology.has_gpus else os.cpu_count() or 1
    try:
        is_json = given.lstrip().startswith("{")
        figures = Figures.model_validate_json(given) if is_json else measure(Path(given), num_cores)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(str(part) for part in problem["loc"]) or "JSON"
        names = ", ".join(Figures.model_fields)
        raise SettingsError(f"settings: --forecast: {name}: {problem['msg']}. It takes {names}.") from None
    rows = forecast(settings, figures, topology, has_long_tails=has_long_tails)
    table = Table("servers", "ranks", "staleness", "step", "samples/s", "tokens/s", "idle servers", "idle ranks")
    for row in rows:
        layout, out = row.layout, row.outcome
        ranks = f"{layout.num_ranks}{'*' * layout.shares_devices}"
        speeds = f"{out.step_s:.3g} s", f"{out.samples_per_s:.3g}", f"{out.tokens_per_s:,.0f}"
        idle = f"{out.server_idle:.0%}", f"{out.rank_idle:.0%}"
        table.add_row(str(layout.num_servers), ranks, str(layout.max_staleness), *speeds, *idle)
    console = Console(markup=False, emoji=False)
    console.print(table)
    turns = ["*: ranks and servers take turns on all GPUs."] if any(row.layout.shares_devices for row in rows) else []
    for sentence in [*turns, *describe(rows)]:
        console.print(sentence, soft_wrap=True)


def forecast(settings: Settings, figures: Figures, topology: Topology, *, has_long_tails: bool) -> list[Row]:
    """Return the outcome of each split at each staleness, the settings' own split first."""
    longest, rows = settings.rollout.max_response_tokens * settings.rollout.max_turns, []
    if settings.rollout.environment == "single_turn":
        longest = settings.rollout.max_response_tokens
    for layout in _layouts(settings, topology):
        for staleness in [0] if layout.shares_devices else _STALENESSES:
            wanted, draw = (
                replace(layout, max_staleness=staleness),
                figures.drawer(longest, has_long_tails=has_long_tails),
            )
            rows.append(Row(wanted, simulate(wanted, figures, draw, 4 * staleness + 10, staleness + 2)))
    return rows


def describe(rows: Sequence[Row]) -> list[str]:
    """Return sentences: the fastest row, and the splits in which asynchrony loses or gains nothing."""
    best = max(rows, key=lambda row: row.outcome.samples_per_s)
    named = f"{best.split} at max_staleness {best.layout.max_staleness}"
    sentences = [f"Fastest: {named}, {best.outcome.samples_per_s:.3g} samples/s."]
    turns = max((row.outcome.samples_per_s for row in rows if row.layout.shares_devices), default=0.0)
    for row in rows:
        if row.layout.max_staleness or row.layout.shares_devices:
            continue
        same = [each for each in rows if replace(each.layout, max_staleness=0) == row.layout]
        rate = max(each.outcome.samples_per_s for each in same)
        if rate < turns:
            loss = f"{rate / turns:.2f} times as fast as ranks and servers that take turns on these GPUs"
            sentences.append(f"Asynchrony loses with {row.split}: {loss}.")
        elif rate < _GAIN * row.outcome.samples_per_s:
            side = "ranks" if row.outcome.rank_idle < row.outcome.server_idle else "servers"
            sentences.append(f"Asynchrony gains nothing with {row.split}: at staleness 0 the {side} are the limit.")
    return sentences


def _layouts(settings: Settings, topology: Topology) -> list[Layout]:
    """Return the settings' split of the devices, other splits of the cluster's GPUs, and ranks and servers in turns."""
    own = _own_layout(settings, has_gpus=topology.has_gpus, shares_devices=topology.shares_devices)
    num_gpus, per_server = sum(node.num_gpus for node in topology.nodes), settings.rollout.tensor_parallel_size
    most = (num_gpus - 1) // per_server
    if not topology.has_gpus or most < 1:
        return [own]
    counts = sorted({max(1, round(most * k / _NUM_SPLITS)) for k in range(1, _NUM_SPLITS + 1)})
    splits = [(n, num_gpus - n * per_server, False) for n in counts] + [(num_gpus // per_server, num_gpus, True)]
    layouts = [replace(own, num_servers=n, num_ranks=ranks, shares_devices=turns) for n, ranks, turns in splits]
    return [own, *(layout for layout in layouts if layout != own)]


def _own_layout(settings: Settings, *, has_gpus: bool, shares_devices: bool = False) -> Layout:
    learner, rollout = settings.learner, settings.rollout
    return Layout(
        num_servers=rollout.num_servers,
        num_ranks=learner.num_ranks,
        groups_per_step=learner.groups_per_step,
        group_size=rollout.group_size,
        max_staleness=learner.max_staleness,
        max_groups=rollout.max_groups_in_flight,
        max_running=int(rollout.engine_args.get("max_num_seqs", 256 if has_gpus else 128)),  # the engine's defaults
        is_streamed=takes_parts(settings),
        shares_devices=shares_devices,
    )


def measure(folder: Path, num_cores: float) -> Figures:
    """Return the figures of a run, from its steps after the first, with which a simulation of as many steps is as fast.

    num_cores: cores that its servers and ranks shared; 0: each had devices of its own.
    Raises: SettingsError for a run that is too short, and for another folder.
    """
    try:
        settings = load_saved_settings(folder / "settings.yaml")
        lines = [parse_metrics_line(text) for text in (folder / "metrics.jsonl").read_bytes().splitlines()]
        samples = [json.loads(text)["calls"] for text in (folder / "samples.jsonl").read_text().splitlines()]
        with closing(sqlite3.connect(read_only_uri(folder / "ledger.sqlite"), uri=True)) as ledger:
            query = "SELECT server, num_model_tokens, started_at, finished_at FROM trajectories WHERE kind = 'train'"
            rows = ledger.execute(query).fetchall()
    except (OSError, ValueError, SettingsError, sqlite3.Error) as error:
        raise SettingsError(f"settings: --forecast = {folder} is not the folder of a run: {error}") from None
    steps = [line for line in lines if line is not None and "time/train_s" in line]
    if len(steps) < 5 or not samples:
        raise SettingsError(f"settings: --forecast = {folder} has {len(steps)} steps. Give a run of 5 or more.")
    seconds = [calls[-1][_FINISHED] - calls[0][_STARTED] for calls in samples]
    turns = [call[_FINISHED] - call[_STARTED] for calls in samples for call in calls if call[_KIND] == "turn"]
    outside_s = (sum(seconds) - sum(turns)) / len(samples)
    spans = [(*row[:3], row[3] - outside_s) for row in rows if row[1] and row[3] - outside_s > row[2]]
    own, since = _own_layout(settings, has_gpus=not num_cores), steps[1:]
    token_s, token_sample_s = fit_decoding(spans, own.max_running)
    figures = Figures(
        token_s=token_s,
        token_sample_s=token_sample_s,
        train_token_s=own.num_ranks * fmean(line["time/train_s"] / line["data/num_model_tokens"] for line in since),
        step_s=fmean(_rest_s(before, line) for before, line in pairwise(steps)),
        push_s=fmean(line.get("time/push_s", 0.0) for line in since),
        pause_s=fmean(line.get("time/push_pause_s", 0.0) for line in since),
        reward_s=outside_s,
        num_cores=num_cores,
        mean_tokens=fmean(span[1] for span in spans),
        lengths=[span[1] for span in spans],
    )
    step_s = (steps[-1]["time_s"] - steps[0]["time_s"]) / len(since)
    num_steps = min(len(steps), _NUM_SIMULATED)
    for _ in range(4):
        draw = figures.drawer(1 << 30, has_long_tails=False)
        runs = [simulate(own, figures, draw, num_steps) for _ in range(_NUM_SIMULATED // num_steps)]
        figures = figures.times(step_s / fmean(run.step_s for run in runs))
    return figures


def _rest_s(before: Mapping[str, float], line: Mapping[str, float]) -> float:
    """Return the seconds of a step without waiting, training and pushing."""
    parts = sum(line.get(f"time/{name}_s", 0.0) for name in ("wait", "train", "push"))
    return max(0.0, line["time_s"] - before["time_s"] - parts)


def fit_decoding(spans: Sequence[Span], max_running: int) -> tuple[float, float]:
    """Return a decoding step's seconds, and those of each of its samples, that fit these spans best.

    If a step of n samples takes a + b * n, a sample's tokens are the integral of 1 / (a + b * n) over its span. The
    ratio b / a is searched, a follows.
    """
    best, servers = (math.inf, 0.0, 0.0), {span[0] for span in spans}
    for ratio in [0.0, *(2.0 ** (k / 2) / max_running for k in range(-10, 15))]:
        pairs = [
            pair for server in servers for pair in _progress([s for s in spans if s[0] == server], ratio, max_running)
        ]
        step_s = sum(tokens * done for tokens, done in pairs) / sum(tokens**2 for tokens, _ in pairs)
        error = sum((done / step_s - tokens) ** 2 for tokens, done in pairs)
        best = min(best, (error, step_s, step_s * ratio))
    return best[1:]


def _progress(spans: Sequence[Span], ratio: float, most: int) -> list[tuple[int, float]]:
    """Return each sample's tokens and the integral of 1 / (1 + ratio * n) over its span, n at most `most`."""
    changes = sorted([(span[2], 1) for span in spans] + [(span[3], -1) for span in spans])
    at, num, done, done_at = changes[0][0], 0, 0.0, {}
    for time, change in changes:
        done += (time - at) / (1.0 + ratio * min(num, most)) * min(1.0, most / max(num, 1))
        at, num = time, num + change
        done_at[time] = done
    return [(tokens, done_at[end] - done_at[start]) for _, tokens, start, end in spans]
