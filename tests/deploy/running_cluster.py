"""A cluster started and stopped as a user does it, by command; for the tests of this room."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from deploy.cluster.ray_processes import ray_processes
from deploy.node.home import Home
from deploy.node.processes import find
from protocol.node.home import ClusterState
from tests.fakes.ports import free_port

_CHECKOUT = Path(__file__).parents[2]
TINY_SERVER = """
import asyncio, os, sys
from protocol.errors import NeighbourError
from protocol.settings.run_spec import EngineRequest


class TinyServer:
    def __init__(self, name, spec):
        self.name, self.is_started = name, False
        self.spec = EngineRequest.model_validate(spec)

    async def start(self, files=None):
        if self.spec.seed == 13:
            print("the engine's own words", file=sys.stderr, flush=True)
            raise NeighbourError("engine", "unlucky")
        if self.spec.seed == 16 and self.name.endswith("1") and not os.path.exists(self.spec.model):
            raise NeighbourError("engine", "unlucky")
        if self.spec.seed == 14:
            os._exit(3)
        if self.spec.seed == 15:
            await asyncio.sleep(8)
        self.is_started = True

    async def describe(self):
        about = {"name": self.name, "fingerprint": self.spec.fingerprint()}
        return about | {"is_started": self.is_started, "is_alive": self.is_started}

    async def stop(self):
        self.is_started = False

    async def die(self):
        os._exit(1)


class Whereabouts:
    def where(self):
        import ray
        from deploy.fleet.processes import assigned_here

        return ray.util.get_node_ip_address(), assigned_here()
"""


class RunningCluster:
    """Everything of it is in `folder`; its servers can import the module tiny_server from there.

    checkout: the code that it runs.
    """

    def __init__(self, folder: Path, checkout: Path = _CHECKOUT) -> None:
        self._checkout = checkout
        self.home = folder / "home"
        self.ray_port, self.retriever_port, self.reward_port = free_port(), free_port(), free_port()
        self.corpus = folder / "corpus.jsonl"
        self.corpus.write_text('{"id": "a", "contents": "\\"Belarus\\"\\ncountry; alpha-2 BY."}\n', encoding="utf-8")
        (folder / "tiny_server.py").write_text(TINY_SERVER, encoding="utf-8")
        self._environment = {
            **os.environ,
            "SLUICE_HOME": str(self.home),
            "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "COLUMNS": "200",
        }

    @property
    def state(self) -> ClusterState:
        return ClusterState.model_validate_json((self.home / "cluster.json").read_bytes())

    @property
    def pids(self) -> dict[str, int]:
        return {record.name: record.pid for record in self.state.processes}

    @property
    def processes(self) -> list[psutil.Process]:
        """Return the services and every process of Ray."""
        services = [process for record in self.state.processes if (process := find(record))]
        return list({process.pid: process for process in [*services, *ray_processes(Home(self.home))]}.values())

    @property
    def leavings(self) -> set[str]:
        """Return what a stop has left of Ray's folder, but for the folders on the way to it."""
        return {path.name for path in Home(self.home).ray_folder.glob("r/*/*")}

    def start(self, *options: str) -> "subprocess.CompletedProcess[str]":
        ports = ["--ray-port", str(self.ray_port), "--retriever-port", str(self.retriever_port)]
        ports += ["--reward-port", str(self.reward_port)]
        return self.command("start", *ports, "--corpus-path", str(self.corpus), *options)

    def stop(self) -> "subprocess.CompletedProcess[str]":
        return self.command("stop")

    def status(self) -> "subprocess.CompletedProcess[str]":
        return self.command("status")

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Be a driver of this cluster within the block; conftest.py has set what Ray needs to be let in."""
        from deploy.cluster.fleet_client import connection

        with connection(self.state.ray_address):
            yield

    def python(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Return the finished `python ARGUMENTS` in the cluster's checkout, with its output as text."""
        return subprocess.run(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
            env=self._environment,
            cwd=self._checkout,
        )

    def popen(self, *arguments: str) -> "subprocess.Popen[str]":
        """Return `python ARGUMENTS` in the cluster's checkout, started."""
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
            cwd=self._checkout,
        )

    def command(self, verb: str, *options: str) -> "subprocess.CompletedProcess[str]":
        """Return the finished `deploy.cluster VERB OPTIONS`."""
        return self.python("-m", "deploy.cluster", verb, *options)
