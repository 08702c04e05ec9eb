"""The live page over a run of a million trajectories: `python -m tests.benchmarks.dash [--trajectories N]`.

Prints medians of seven answers of each view, and the peak memory of the page's process. Limits: first paint 1 s (the
page and the answers that the overview draws from), a filtered list 0.5 s, memory 500 MB. A tenth of the trajectories is
recorded with its text. An example of a result is in docs/understand/evidence.md.
"""

import argparse
import json
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from learner.ledger.ledger import Ledger
from tests.learner.report.recorded_run import record_run

_GROUP, _STEP = 8, 512  # samples of a group and of a step
_TOKEN = "a-token-of-the-benchmark"
_CLIENT = httpx.Client(headers={"authorization": f"Bearer {_TOKEN}"}, timeout=60.0)
_COMMAND = "import sys; from deploy.command import run_verb; sys.exit(run_verb(sys.argv[1:]))"
_VIEWS: dict[str, tuple[str, dict[str, Any]]] = {
    "runs": ("runs", {}),
    "live": ("live", {"run": "large"}),
    "plots": ("plots", {"run": "large"}),
    "newest": ("trajectories", {"run": "large"}),
    "filtered": ("trajectories", {"run": "large", "min_reward": 0.9, "finish": "length", "min_tokens": 200}),
    "sorted": ("trajectories", {"run": "large", "order": "num_model_tokens_desc", "offset": 5000}),
    "words": ("trajectories", {"run": "large", "text": "word77 word5"}),
    "last page": ("trajectories", {"run": "large", "offset": 900_000}),
    "group": ("group", {"run": "large", "group": "e0-q77"}),
}


def main() -> int:
    """Print the table; returns 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    number = parser.parse_args().trajectories
    with tempfile.TemporaryDirectory() as scratch:
        _write_run(Path(scratch) / "runs" / "large", number)
        return _measure(Path(scratch))


def _write_run(folder: Path, number: int) -> None:
    folder.mkdir(parents=True)
    record_run(folder, 2)
    for name in ("ledger.sqlite", "samples.jsonl"):
        (folder / name).unlink()
    Ledger(folder / "ledger.sqlite").close()
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    steps = range(1, number // _STEP + 1)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line | {"step": step}) + "\n" for step in steps))
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        of_group = ((f"e0-q{i}", f"q{i}", i, i * _GROUP // _STEP + 1, float(i)) for i in range(number // _GROUP))
        db.executemany("INSERT INTO prompts VALUES (?, 0, ?, ?, 'trained', 'rollout-0', 1, ?, NULL, ?)", of_group)
        db.executemany(f"INSERT INTO trajectories VALUES ({', '.join('?' * 21)})", map(_row, range(number)))  # noqa: S608
    with (folder / "samples.jsonl").open("w") as file:
        for i in range(0, number, 10):
            text = " ".join(f"word{(i * k) % 997}" for k in range(40))
            place = {"step": i // _STEP + 1, "group": f"e0-q{i // _GROUP}", "sample_index": i % _GROUP}
            file.write(json.dumps(place | {"response": text, "tokens": list(range(200))}) + "\n")


def _row(i: int) -> tuple[object, ...]:
    reward, finish, step, at = i % 101 / 100, ("answer", "stop", "length")[i % 3], i // _STEP + 1, float(i)
    of_group = (f"e0-q{i // _GROUP}", i % _GROUP, 1, 1, "train", 0, f"rollout-{i % 16}", reward, '{"em": 1.0}')
    return (*of_group, 90 + i % 400, i % 400, 1, finish, step - 1, step - 1, step, i % 5, at, at + 2.0, at + 2.5, None)


def _measure(scratch: Path) -> int:
    (scratch / "token").write_text(_TOKEN)
    arguments = ["dash", str(scratch / "runs"), "--port", "0", "--token-file", str(scratch / "token")]
    page = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from deploy.command import run_verb; sys.exit(run_verb(sys.argv[1:]))",
            *arguments,
        ],
        env={**os.environ, "SLUICE_HOME": str(scratch / "home")},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert page.stdout is not None
        address = next(line for line in page.stdout if "Listening" in line).split()[-1]
        first_s = sum(_seconds(address, *_VIEWS[name]) for name in ("runs", "live", "plots"))
        began = time.monotonic()
        while _answer(address, *_VIEWS["newest"])["indexed"] < 1.0:
            time.sleep(0.5)
        indexed_s = time.monotonic() - began
        seconds = {name: median(_seconds(address, *view) for _ in range(7)) for name, view in _VIEWS.items()}
    finally:
        page.terminate()
        page.wait()
    memory_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    for name, value in seconds.items():
        print(f"{name:>10} {value:.3f} s")
    print(f"first paint {first_s:.2f} s (limit 1), indexed in {indexed_s:.0f} s, memory {memory_mb:.0f} MB (limit 500)")
    lists = max(seconds[name] for name in ("newest", "filtered", "sorted", "words", "last page"))
    holds = first_s <= 1.0 and lists <= 0.5 and memory_mb <= 500
    print(f"slowest list {lists:.3f} s (limit 0.5), holds={'yes' if holds else 'no'}")
    return 0 if holds else 1


def _seconds(address: str, path: str, values: dict[str, Any]) -> float:
    began = time.perf_counter()
    _answer(address, path, values)
    return time.perf_counter() - began


def _answer(address: str, path: str, values: dict[str, Any]) -> dict[str, float]:
    url = f"{address}/api/{path}"
    answer = _CLIENT.get(url, params=values)
    answer.raise_for_status()
    found: dict[str, float] = answer.json()
    return found


if __name__ == "__main__":
    sys.exit(main())
