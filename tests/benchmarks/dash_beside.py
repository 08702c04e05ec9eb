"""A run with and without an open live page: `python -m tests.benchmarks.dash_beside [--steps N] [--block N]`.

The work is that of `tests.benchmarks.throughput`, on a running cluster (deploy/start_cluster.sh --no-reward), in one
run. A `sluice dash` over its folder is open for a block of steps, and stopped (SIGSTOP) for the next, in the order of
ABBAABBA; the first block is not counted. While it is open it is asked for what a browser's overview asks for: each
second the live figures, after each step the plots. Compared are the two blocks of a pair: seconds per step, by the
times of metrics.jsonl, and CPU seconds per step of all processes of the run. holds: the median ratio of neither is over
1.01. Nothing else may run on the machine. 240 steps take about 10 minutes on two cores. page_cpu: CPU seconds of the
page in a second while it is open.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

import httpx
import psutil

from protocol.node.home import sluice_home
from tests.benchmarks.compare import Checkout
from tests.benchmarks.cpu_by_part import cpu_seconds
from tests.benchmarks.throughput import make_model, make_prompts, reward_service, run_command
from tests.chaos.rig.verdict import conclude, options

_LIMIT, _EVERY_S, _POLL_S = 1.01, 1.0, 0.05
_NAME, _TOKEN = "beside", "a-token-of-the-benchmark"
_COMMAND = "import sys; from deploy.command import run_verb; sys.exit(run_verb(sys.argv[1:]))"


class Here(Checkout):
    """The cluster that runs, with processes of this checkout."""

    @property
    def home(self) -> Path:
        return sluice_home()

    def total_cpu_s(self) -> float:
        """Return the CPU seconds so far of the run's processes; this one, which plays the browser, is none of them."""
        return sum(seconds for (_, pid, _), seconds in cpu_seconds(self.home).items() if pid != os.getpid())


class Page:
    """A `sluice dash` with a home of its own, and the browser that asks it."""

    def __init__(self, work: Path) -> None:
        (work / "runs").mkdir(exist_ok=True)
        (work / "token").write_text(_TOKEN)
        arguments = ["dash", str(work / "runs"), "--port", "0", "--token-file", str(work / "token")]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, *arguments],
            env={**os.environ, "SLUICE_HOME": str(work / "home-of-the-page")},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._address = next(line for line in self._process.stdout if "Listening" in line).split()[-1]
        self._is_open, self._is_over = threading.Event(), threading.Event()
        self._browser = threading.Thread(target=self._browse)
        self._browser.start()
        self._open_s, self._opened_at = 0.0, 0.0

    def open(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._opened_at = time.monotonic()
        self._is_open.set()

    def stop(self) -> None:
        self._is_open.clear()
        self._process.send_signal(signal.SIGSTOP)
        self._open_s += time.monotonic() - self._opened_at if self._opened_at else 0.0
        self._opened_at = 0.0

    def cpu_share(self) -> float:
        """Return the CPU seconds of the page in a second while it was open."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system - self._cpu_before) / self._open_s

    def begin(self) -> None:
        """Count CPU seconds from here: the start is over."""
        times = psutil.Process(self._process.pid).cpu_times()
        self._cpu_before = times.user + times.system

    def close(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._is_over.set()
        self._browser.join()
        self._process.terminate()
        self._process.wait()

    def _browse(self) -> None:
        step = -1
        with httpx.Client(headers={"authorization": f"Bearer {_TOKEN}"}, timeout=60.0) as client:
            while not self._is_over.wait(_EVERY_S):
                if not self._is_open.is_set():
                    continue
                live = client.get(f"{self._address}/api/live", params={"run": _NAME})
                if live.status_code == 200 and (now := live.json()["summary"]["step"]) != step:
                    step = now
                    client.get(f"{self._address}/api/plots", params={"run": _NAME}).raise_for_status()


def main() -> int:
    given = options(__doc__ or "", {"steps": 30, "block": 1}, steps=240, block=5)
    num_steps, block = (13, 1) if given.short else (given.steps, given.block)
    with tempfile.TemporaryDirectory() as folder, reward_service() as url:
        work = Path(folder)
        make_model(work / "model", given.seed)
        make_prompts(work / "prompts.jsonl", given.seed)
        command = [sys.executable, *run_command(work, _NAME, url, 4, num_steps, given.seed)]
        with _running_page(work) as page:
            run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            try:
                blocks = _measure(Here("here", work, 0), page, run, work / "runs" / _NAME, block)
            finally:
                run.terminate()
                run.wait()
            page_cpu = page.cpu_share()
    return _report(blocks, page_cpu)


def _measure(
    here: Here, page: Page, run: "subprocess.Popen[bytes]", folder: Path, block: int
) -> list[tuple[bool, float, float]]:
    """Return whether the page was open, seconds per step and CPU seconds per step of each block."""
    blocks: list[tuple[bool, float, float]] = []
    times = _wait_for(folder, run, block)
    page.begin()
    while times:
        is_open = len(blocks) % 4 in (0, 3)
        (page.open if is_open else page.stop)()
        first, cpu = len(times), here.total_cpu_s()
        later = _wait_for(folder, run, first + block)
        if later:
            seconds = (later[first + block - 1] - times[first - 1]) / block
            blocks.append((is_open, seconds, (here.total_cpu_s() - cpu) / block))
        times = later[: first + block]
    return blocks


def _wait_for(folder: Path, run: "subprocess.Popen[bytes]", number: int) -> list[float]:
    """Return the times of the steps so far once there are `number`; an empty list when the run has ended before."""
    path = folder / "metrics.jsonl"
    while True:
        is_over = run.poll() is not None
        lines = path.read_bytes().splitlines() if path.exists() else []
        if len(lines) >= number:
            return [json.loads(line)["at_s"] for line in lines]
        if is_over:
            return []
        time.sleep(_POLL_S)


def _report(blocks: list[tuple[bool, float, float]], page_cpu: float) -> int:
    ratios: dict[str, list[float]] = {"step_s": [], "cpu_s": []}
    for first, second in zip(blocks[::2], blocks[1::2], strict=False):
        opened, stopped = (first, second) if first[0] else (second, first)
        for place, values in enumerate(ratios.values(), 1):
            values.append(float(opened[place]) / float(stopped[place]))
    figures: dict[str, float] = {}
    for name, values in ratios.items():
        low, middle, high = quantiles(values)
        print(f"{name}: with the page / without: {middle:.4f}; half of the pairs from {low:.3f} to {high:.3f}")
        figures[f"{name}_ratio"] = median(values)
    holds = max(figures.values()) <= _LIMIT
    return conclude("dash_beside", holds, **figures, pairs=len(ratios["step_s"]), page_cpu=page_cpu)


@contextmanager
def _running_page(work: Path) -> Iterator[Page]:
    page = Page(work)
    try:
        yield page
    finally:
        page.close()


if __name__ == "__main__":
    sys.exit(main())
