"""A cluster started and stopped as a user does it, and the runs on it: all by command, in a home of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from deploy.cluster.ray_processes import ray_processes
from deploy.node.home import Home
from deploy.node.processes import family
from protocol.node.home import ClusterState
from tests.fakes.ports import free_port
from tests.fakes.process_facts import has_open, title_of
from tests.fakes.warm_process import run_warm

_RUN_S = 500.0  # of a test's 600: a run of half a minute took over four on a busy machine
_STOP_S = 60.0


class FlowCluster:
    """Everything of it is in `folder` and on ports of its own."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.corpus = folder / "corpus.jsonl"
        self.corpus.write_text('{"id": "a", "contents": "\\"Belarus\\"\\ncountry; alpha-2 BY."}\n', encoding="utf-8")
        self._changes = {"SLUICE_HOME": str(self.home), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self._environment = {**os.environ, **self._changes}

    def start(self, *options: str) -> "subprocess.CompletedProcess[str]":
        ports = [f"--{name}-port={free_port()}" for name in ("ray", "retriever", "reward")]
        return self._command("deploy.cluster", "start", *ports, "--corpus-path", str(self.corpus), *options)

    def stop(self) -> "subprocess.CompletedProcess[str]":
        return self._command("deploy.cluster", "stop")

    def run(
        self, *options: str, timeout_s: float = _RUN_S, environment: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Return the finished `sluice run OPTIONS`, with its output as text.

        environment: what the user has set besides.
        """
        return self._warm("learner.run", *options, timeout_s=timeout_s, environment=environment)

    def command(self, module: str, *options: str, timeout_s: float = _RUN_S) -> "subprocess.CompletedProcess[str]":
        """Return the finished command of a module, with its output as text."""
        return self._warm(module, *options, timeout_s=timeout_s)

    def evaluate(self, *options: str) -> "subprocess.CompletedProcess[str]":
        """Return the finished `sluice eval OPTIONS`, with its output as text."""
        return self._warm("learner.evaluate", *options)

    def runs(self, *options: str) -> "subprocess.CompletedProcess[str]":
        """Return the finished `sluice runs OPTIONS`, with its output as text."""
        return self._warm("deploy.runs", *options)

    @contextmanager
    def running(self, *options: str, module: str = "learner.run") -> Iterator["Run"]:
        """Yield a run that has been started; one that is still there when the block ends is ended.

        module: of the command.
        """
        process = subprocess.Popen(
            [sys.executable, "-m", module, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment,
        )
        try:
            yield Run(process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.communicate(timeout=_STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.communicate()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:  # of a run that had ended before a test failed
                    pipe.close()

    def processes(self) -> list[psutil.Process]:
        """Return every process of this cluster: Ray's, those of its actors, retriever and reward server."""
        state = ClusterState.model_validate_json((self.home / "cluster.json").read_bytes())
        services = [psutil.Process(record.pid) for record in state.processes]
        return list({process.pid: process for process in [*ray_processes(Home(self.home)), *family(services)]}.values())

    def actors(self, name: str) -> list[psutil.Process]:
        """Return the processes of the actors of a class, which Ray titles `ray::CLASS` with the method that runs."""
        return [process for process in self.processes() if title_of(process).startswith(f"ray::{name}")]

    def ranks(self) -> list[psutil.Process]:
        """Return the processes that are learner ranks of a run: each has its log open in the run folder."""
        return [process for process in self.actors("StandbyProcess") if has_open(process, "/logs/rank_")]

    def _command(self, module: str, *options: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", module, *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=_RUN_S, env=self._environment)

    def _warm(
        self, module: str, *options: str, timeout_s: float = _RUN_S, environment: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Return a finished command without the seconds of its imports; `running` and the tutorials pay for them."""
        changes = {**self._changes, **(environment or {})}
        return run_warm(module, *options, timeout=timeout_s, environment=changes)


class Run:
    """A `sluice run` that is under way."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float = _RUN_S) -> None:
        """Return as soon as it is so. Raises: AssertionError with the run's output when the run ended before."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert self.process.poll() is None, "\n".join(self.process.communicate())
            assert time.monotonic() < deadline, f"not so within {timeout_s:g} s"
            time.sleep(0.05)

    def finished(self, timeout_s: float = _RUN_S) -> "subprocess.CompletedProcess[str]":
        """Return how the run ended; blocks until it has."""
        output, errors = self.process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, output, errors)


def expect_no_leavings(cluster: FlowCluster) -> None:
    """Assert that no rank and no coordinator runs; Ray ends an actor's process after the command that asked for it."""
    _, alive = psutil.wait_procs([*cluster.ranks(), *cluster.actors("CoordinatorProcess")], timeout=30)
    assert alive == []
