"""Runs as Prometheus metrics: the newest metrics line, prompts by state and the servers of each run that is going.

`policy/loss` becomes `sluice_policy_loss{run="mine"}`. Names inside a key become labels: `eval/SET/reward` is
`sluice_eval_reward{set="SET"}`, `reward/part/NAME` is `sluice_reward_part{name="NAME"}`. `_s` at the end becomes
`_seconds`, as Prometheus wants it.
"""

import re
import sqlite3
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from learner.report.dash.runs import RunFolder, Runs, RunSummary

_LABELLED = (
    (re.compile(r"(reward/part|reward/log)/(.+)"), ("name",)),
    (re.compile(r"(eval)/([^/]+)/([^/]+)"), ("set",)),
    (re.compile(r"(eval)/([^/]+)/(.+)/([^/]+)"), ("set", "source")),
)
_STATES = ("going", "done", "stopped", "unreadable")


class RunsCollector(Collector):
    """Reads the folders at each scrape. The newest run is there after its end, so that its last values stay visible."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield each metric once, with a sample for each run."""
        samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for place, run in enumerate(self._runs.all()):
            summary = run.summary()
            if place == 0 or summary.state in ("going", "unreadable"):
                for name, labels, value in _samples(run, summary):
                    samples.setdefault(name, []).append(({"run": run.name, **labels}, value))
        for name in sorted(samples):
            names = sorted({label for labels, _ in samples[name] for label in labels})
            family = GaugeMetricFamily(f"sluice_{name}", f"see docs/look_up/metrics.md: {name}", labels=names)
            for labels, value in samples[name]:
                family.add_metric([labels.get(label, "") for label in names], value)
            yield family


def metric_name(key: str) -> tuple[str, dict[str, str]]:
    """Return the name, without its prefix, and labels of a key of metrics.jsonl."""
    labels: dict[str, str] = {}
    for pattern, names in _LABELLED:
        if match := pattern.fullmatch(key):
            first, *values = match.groups()
            labels = dict(zip(names, values, strict=False))
            key = "/".join([first, *values[len(names) :]])
            break
    name = re.sub(r"_per_s$", "_per_second", re.sub(r"[^a-zA-Z0-9_]", "_", key))
    return re.sub(r"(^|_)s$", r"\1seconds", name), labels


def _samples(run: RunFolder, summary: RunSummary) -> Iterator[tuple[str, dict[str, str], float]]:
    for state in _STATES:
        yield "run_state", {"state": state}, float(summary.state == state)
    if summary.state == "unreadable":
        return
    lines = run.lines()
    newest: dict[str, float] = {}
    for line in lines[-1000:]:  # an evaluation is on its own line alone
        newest |= {key: value for key, value in line.items() if key.startswith("eval/")}
    for key, value in (newest | (lines[-1] if lines else {})).items():
        yield *metric_name(key), value
    yield "run_changed_timestamp_seconds", {}, summary.changed_at
    yield "run_max_steps", {}, float(summary.max_steps or 0)
    yield "run_alarms", {}, float(summary.num_alarms)
    try:
        live: dict[str, Any] = run.ledger.live()
    except (OSError, sqlite3.Error):  # a run that is being made
        return
    for state, count in live["states"].items():
        yield "prompts", {"state": state}, float(count)
    for server in live["servers"]:
        of_server = {"server": server["server"]}
        yield "server_generated_tokens_per_second", of_server, server["tokens_per_s"]
        yield "server_policy_version", of_server, float(server["version"])
        yield "server_heard_timestamp_seconds", of_server, server["heard_at"]
