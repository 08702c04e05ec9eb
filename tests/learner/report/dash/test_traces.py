"""Recorded samples as OpenTelemetry traces: whole, nested, and as many as the ledger has."""

import json
import shutil
import sqlite3
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from deploy.command import run_verb
from learner.report.dash.runs import RunFolder
from learner.report.dash.spans import lease_spans, step_parts
from learner.report.dash.traces import new_traces
from protocol.wire.trajectory import TimedCall
from tests.learner.report.dash.traced_run import (
    FAILS,
    GROUP,
    OtlpReceiver,
    attributes_of,
    otlp_receiver,
    record_traced_run,
)

STEPS, GROUPS = 3, 8
_TREE = {
    "trajectory": "",
    "lease": "trajectory",
    "queue": "trajectory",
    "step": "trajectory",
    "push": "step",
    "chat policy": "lease",
    "environment": "lease",
    "execute_tool search": "environment",
    "execute_tool lookup": "environment",
    "reward em": "lease",
}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Counter[str]]:
    folder = tmp_path_factory.mktemp("traced") / "mine"
    return folder, record_traced_run(folder, STEPS, GROUPS)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def _by_trace(receiver: OtlpReceiver) -> dict[bytes, list[Any]]:
    traces: dict[bytes, list[Any]] = defaultdict(list)
    for resource, span in receiver.spans:
        assert resource == {"service.name": "sluice", "sluice.run": "mine"}
        traces[span.trace_id].append(span)
    return traces


def test_a_collector_gets_a_whole_trace_of_every_recorded_sample(
    traced: tuple[Path, Counter[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, requests = traced
    with otlp_receiver() as receiver:
        assert run_verb(["traces", str(folder), "--otlp", receiver.address]) == 0
    traces = _by_trace(receiver)
    num = STEPS * GROUPS * GROUP
    assert len(traces) == num
    assert f"{num} traces of {len(receiver.spans)} spans" in capsys.readouterr().out
    sent: Counter[str] = Counter()
    for trace in traces.values():
        spans = {span.span_id: span for span in trace}
        for span in trace:
            parent = spans.get(span.parent_span_id)
            assert _TREE[span.name] == ("" if parent is None else parent.name)
            assert (parent or span).start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
            assert span.end_time_unix_nano <= (parent or span).end_time_unix_nano
            if span.name in ("execute_tool search", "execute_tool lookup", "reward em"):
                sent[span.name] += attributes_of(span)["sluice.requests"]
        root = attributes_of(next(span for span in trace if not span.parent_span_id))
        names = Counter(span.name for span in trace)
        assert names == {**dict.fromkeys(_TREE, 1), "chat policy": root["sluice.num_turns"], "environment": 2}
        turns = [attributes_of(span) for span in trace if span.name == "chat policy"]
        for name in ("output", "completion"):
            written = sum(turn[f"gen_ai.usage.{name}_tokens"] for turn in turns)
            assert written == root["gen_ai.usage.output_tokens"]
    # The clients' retries are in the traces: as many requests as the services counted. Searches share requests.
    assert sent["execute_tool lookup"] == requests["lookup"] > num
    assert sent["reward em"] == requests["score"] > num
    assert sent["execute_tool search"] >= num


def test_a_failed_attempt_is_an_event_of_its_samples_trace(traced: tuple[Path, Counter[str]]) -> None:
    with otlp_receiver() as receiver:
        run_verb(["traces", str(traced[0]), "--otlp", receiver.address])
    failed = {
        attributes_of(span)["gen_ai.conversation.id"]: [(event.name, attributes_of(event)) for event in span.events]
        for _, span in receiver.spans
        if span.events
    }
    assert len(failed) == STEPS * GROUPS
    assert all(place.endswith(f"/{FAILS}") for place in failed)
    ((name, event),) = failed[f"e0-q1-0/{FAILS}"]
    assert (name, event["sluice.attempt"], event["sluice.boundary"]) == ("attempt failed", 1, "environment")


def test_a_repeated_command_sends_the_same_ids(traced: tuple[Path, Counter[str]]) -> None:
    with otlp_receiver() as receiver:
        for _ in range(2):
            run_verb(["traces", str(traced[0]), "--otlp", receiver.address])
    ids = Counter((span.trace_id, span.span_id) for _, span in receiver.spans)
    assert set(ids.values()) == {2}


def test_a_start_that_redoes_a_step_sends_traces_of_its_own(traced: tuple[Path, Counter[str]], tmp_path: Path) -> None:
    redone = shutil.copytree(traced[0], tmp_path / "mine")
    with closing(sqlite3.connect(redone / "ledger.sqlite")) as db, db:
        db.execute("UPDATE trajectories SET incarnation = 2 WHERE step = 2")  # with the same attempt
    with otlp_receiver() as receiver:
        for folder in (traced[0], redone):
            run_verb(["traces", str(folder), "--otlp", receiver.address])
    sent = Counter(span.trace_id for _, span in receiver.spans if not span.parent_span_id)
    assert Counter(sent.values()) == {2: (STEPS - 1) * GROUPS * GROUP, 1: 2 * GROUPS * GROUP}


def test_samples_of_a_step_without_a_line_wait_for_it_when_a_run_is_followed(
    traced: tuple[Path, Counter[str]], tmp_path: Path, home: Path
) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in ("ledger.sqlite", "samples.jsonl", "settings.yaml"):
        (folder / name).write_bytes((traced[0] / name).read_bytes())
    lines = (traced[0] / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:2]))
    run, of_step = RunFolder("copy", folder, home), GROUPS * GROUP
    run.samples.update()
    first = list(new_traces(run, 0, waits=True))
    assert [sum(len(traces) for _, traces in first), first[-1][0]] == [2 * of_step, 2 * of_step]
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    last = list(new_traces(run, first[-1][0], waits=True))
    assert sum(len(traces) for _, traces in last) == of_step


def test_a_sample_of_an_earlier_version_has_its_lease_queue_step_and_push(
    traced: tuple[Path, Counter[str]], tmp_path: Path, home: Path
) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    for name in ("ledger.sqlite", "metrics.jsonl", "settings.yaml"):
        (folder / name).write_bytes((traced[0] / name).read_bytes())
    line = json.loads((traced[0] / "samples.jsonl").read_text().splitlines()[0])
    (folder / "samples.jsonl").write_text(json.dumps({key: line[key] for key in line if key != "calls"}) + "\n")
    run = RunFolder("old", folder, home)
    run.samples.update()
    ((_, traces),) = new_traces(run, 0, waits=False)
    (trace,) = traces.values()
    assert [span.name for span in trace] == ["trajectory", "lease", "queue", "step", "push"]


def test_reward_endpoints_that_are_called_at_once_are_no_parts_of_each_other() -> None:
    calls = [
        TimedCall("environment", "step", 1.0, 4.0),
        TimedCall("tool", "search", 2.0, 3.0),
        TimedCall("reward", "long", 5.0, 9.0),
        TimedCall("reward", "short", 6.0, 7.0),
        TimedCall("tool", "late", 8.0, 8.5),
    ]
    row = {"server": "s0", "attempt": 1, "started_at": 0.5, "finished_at": 9.0, "received_at": 9.5, "reward_parts": {}}
    spans = lease_spans(row, calls)
    parents = {span.name: None if span.parent is None else spans[span.parent].name for span in spans}
    assert parents == {
        "lease": None,
        "environment": "lease",
        "execute_tool search": "environment",
        "reward long": "lease",
        "reward short": "lease",
        "execute_tool late": "lease",
    }


def test_parts_of_a_step_end_with_it() -> None:
    line = {"at_s": 1795726142.689, "time/wait_s": 0.01509585, "time/train_s": 0.5818948, "time/push_s": 0.1457658}
    parts = step_parts(line)
    assert [name for name, _, _ in parts] == ["wait", "train", "push"]
    assert [end for _, _, end in parts] == [*(start for _, start, _ in parts[1:]), line["at_s"]]


def test_a_receiver_that_takes_nothing_and_a_folder_that_is_no_run_are_said(
    traced: tuple[Path, Counter[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with otlp_receiver() as receiver:
        receiver.status = 400
        assert run_verb(["traces", str(traced[0]), "--otlp", receiver.address]) == 1
        assert capsys.readouterr().err == (
            f"{receiver.address}/v1/traces takes no traces. Start an OTLP receiver there, or change --otlp.\n"
        )
    assert run_verb(["traces", str(tmp_path), "--otlp", "http://127.0.0.1:9"]) == 1
    assert "it is no run" in capsys.readouterr().err
    assert run_verb(["traces", str(traced[0]), "--otlp", "127.0.0.1:9"]) == 2
    assert "--otlp is 127.0.0.1:9, expected an address such as" in capsys.readouterr().err
