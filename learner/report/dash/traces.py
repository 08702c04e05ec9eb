"""`sluice traces RUN --otlp URL`: a run's recorded samples as OpenTelemetry traces, one each, from its folder alone.

A repeated command sends the same traces with the same ids. Exit status: 0; 1 with one sentence; 130 after Ctrl-C.
"""

import argparse
import hashlib
import logging
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from learner.disk.run_folder import SETTINGS
from learner.report.dash.runs import RunFolder
from learner.report.dash.spans import Span, trajectory_spans
from protocol.errors import OperatorError, SettingsError
from protocol.node.home import sluice_home

_PATH = "/v1/traces"
_AT_ONCE = 100  # traces of one request
_EVERY_S = 1.0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="sluice traces", description=_ABOUT)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, running or ended")
    parser.add_argument("--otlp", metavar="URL", required=True, help="OTLP receiver, such as http://127.0.0.1:4318")
    parser.add_argument("--follow", action="store_true", help="send each step's samples until the run is done")
    options = parser.parse_args(arguments)
    if not (options.run / SETTINGS).exists():
        raise OperatorError(f"{options.run} has no {SETTINGS}: it is no run. Give a run's folder.")
    folder = options.run.resolve()
    run = RunFolder(folder.name, folder, sluice_home() / "dash")
    try:
        return _send_all(run, Sender(options.otlp, run.name), follow=options.follow)
    except (OSError, sqlite3.Error) as error:
        raise OperatorError(f"The run {options.run} cannot be read: {error}") from error


def _send_all(run: RunFolder, sender: "Sender", follow: bool) -> int:
    num_traces = num_spans = newest = 0
    while True:
        is_done = not follow or run.summary().state == "done"
        run.samples.update()
        for last, traces in new_traces(run, newest, waits=follow):
            sender.send(traces)
            newest = last
            num_traces += len(traces)
            num_spans += sum(map(len, traces.values()))
        if is_done:
            break
        time.sleep(_EVERY_S)
    print(f"{num_traces} traces of {num_spans} spans sent to {sender.url}.")
    return 0


_ABOUT = (
    "Send the recorded samples of a run (report.samples_per_step) to an OpenTelemetry collector: one trace each, with "
    "its lease, turns, tools, rewards, queue, step and push. OTEL_EXPORTER_OTLP_HEADERS and other variables of "
    "OpenTelemetry's exporter apply."
)


def new_traces(run: RunFolder, after: int, waits: bool) -> Iterator[tuple[int, dict[str, list[Span]]]]:
    """Yield the traces of the samples recorded after one, by key, each time with the id of the last of them.

    waits: whether the samples of a step without a line of metrics are left for later.
    """
    lines = {line["step"]: line for line in run.lines()}
    while recorded := run.samples.after(after, _AT_ONCE):
        traces: dict[str, list[Span]] = {}
        for row in recorded:
            if waits and row["step"] not in lines:
                break
            after = row["id"]
            traces |= _trace(run, row, lines.get(row["step"]))
        if not traces and after != recorded[-1]["id"]:
            return
        yield after, traces


class Sender:
    """Sends traces to one OTLP receiver over HTTP. Raises: OperatorError without OpenTelemetry, or for a wrong URL."""

    def __init__(self, url: str, run: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise SettingsError(f"--otlp is {url}, expected an address such as http://127.0.0.1:4318.")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
        except ImportError as error:
            remedy = "Install it with pip install 'sluice[otel]'"
            raise OperatorError(f"sluice traces needs OpenTelemetry ({error}). {remedy}.") from error
        # The sentence below says it.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        endpoint = url.rstrip("/")
        self.url = endpoint if endpoint.endswith(_PATH) else endpoint + _PATH
        self._exporter = OTLPSpanExporter(endpoint=self.url)
        self._resource = Resource({"service.name": "sluice", "sluice.run": run})

    def send(self, traces: Mapping[str, Sequence[Span]]) -> None:
        """Send traces by key. Raises: OperatorError when the receiver does not take them."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        spans = [span for key, trace in traces.items() for span in self._readable(key, trace)]
        if spans and self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise OperatorError(f"{self.url} takes no traces. Start an OTLP receiver there, or change --otlp.")

    def _readable(self, key: str, trace: Sequence[Span]) -> Iterator[Any]:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanContext, TraceFlags

        trace_id = _number(key, 16)
        flags = TraceFlags(TraceFlags.SAMPLED)
        contexts = [SpanContext(trace_id, _number(f"{key}#{place}", 8), False, flags) for place in range(len(trace))]
        for span, context in zip(trace, contexts, strict=True):
            yield ReadableSpan(
                span.name,
                context,
                None if span.parent is None else contexts[span.parent],
                self._resource,
                span.attributes,
                [Event(name, attributes, _ns(at)) for at, name, attributes in span.events],
                start_time=_ns(span.start),
                end_time=_ns(span.end),
            )


def _trace(run: RunFolder, recorded: Mapping[str, Any], line: Mapping[str, float] | None) -> dict[str, list[Span]]:
    """Return the trace of a recorded sample by its key; nothing when the ledger has another one in its place."""
    group, index = recorded["group"], recorded["sample_index"]
    story = run.ledger.story(group)
    row = next((each for each in story["trajectories"] if each["sample_index"] == index), None)
    if row is None or row["step"] != recorded["step"]:
        return {}
    failures = [each for each in story["failures"] if each["sample_index"] == index]
    key = f"{run.ledger.first_start()}/{group}/{index}/{row['incarnation']}/{row['attempt']}"
    return {key: trajectory_spans(row, run.samples.calls(recorded["id"]), failures, line)}


def _number(key: str, num_bytes: int) -> int:
    """Return an id for a key: the same whenever it is sent."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:num_bytes])


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
