"""Runs as Prometheus metrics: the newest metrics line, prompts by state, the servers and the coordinator's status of
each run that is going.

`policy/loss` becomes `sluice_policy_loss{run="mine"}`. Names inside a key become labels: `eval/SET/reward` is
`sluice_eval_reward{set="SET"}`, `reward/part/NAME` is `sluice_reward_part{name="NAME"}`. `_s` at the end becomes
`_seconds`, as Prometheus wants it.
"""

import re
import sqlite3
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from learner.live.status import RunStatus, read_status
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

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield each metric once, with a sample for each run."""
        samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for place, run in enumerate(self._runs.all()):
            summary = run.summary()
            if place == 0 or summary.state in ("going", "unreadable"):
                for name, labels, value in _samples(run, summary):
                    samples.setdefault(name, []).append(({"run": run.name, **labels}, value))
        for name in sorted(samples):
            names = sorted({label for labels, _ in samples[name] for label in labels})
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(f"sluice_{name}", f"see docs/look_up/metrics.md: {name}", labels=names)
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
    if summary.state == "going" and (status := read_status(run.path)) is not None:
        yield from _of_status(status)
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


def _of_status(status: RunStatus) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield the coordinator's newest figures. Names after `server_` are vLLM's without their `vllm:`."""
    yield "window_groups", {}, float(status.window_used)
    yield "window_size", {}, float(status.window_size)
    yield "window_ready_groups", {}, float(status.ready)
    for kind, count in {"retried": 0, "skipped": 0, **status.counts}.items():  # from 0: for rates
        yield "events_total", {"kind": kind}, float(count)
    for name, server in status.servers.items():
        if server is not None:
            yield "server_num_requests_running", {"server": name}, float(server.running)
            yield "server_num_samples_outside", {"server": name}, float(server.waiting)
            yield "server_generation_tokens_total", {"server": name}, float(server.generated_tokens)
