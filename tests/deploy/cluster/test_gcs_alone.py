"""A start on a head of which Ray's GCS alone is left, and that fails or is told to end: without Ray."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from deploy.cluster.kept import find_kept
from deploy.cluster.node_ray.outlived import GCS, end_what_raylet_ran, launch_raylet
from deploy.cluster.node_ray.processes import end_ray, ray_processes, told_to_ray
from deploy.cluster.options.start_options import read_start_options
from deploy.cluster.wanted_services import wanted_services
from deploy.node.home import Home
from deploy.node.processes import MARK, find
from protocol.node.home import ClusterState, ProcessRecord, cluster_path, write_cluster
from protocol.node.process_space import process_space, started_ticks
from tests.fakes.ports import free_port
from tests.fakes.waiting import wait_until

# Takes connections, and answers nothing.
_GCS = "import socket, sys, time; listener = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(600)"
_NAME = "0123456789abcdef"
_RAYLET = (sys.executable, "-c", "import time; time.sleep(600)", f"--node_id={_NAME}")


class Head:
    """A head with a process that stands for its GCS, a raylet that has ended, and a retriever that is never healthy."""

    def __init__(self, folder: Path) -> None:
        self.home = Home(folder / "home")
        self.ray_port, self.retriever_port = free_port(), free_port()
        (folder / "corpus.jsonl").write_text('{"id": "a", "contents": "a"}\n', encoding="utf-8")
        self.is_begun = folder / "is_begun"
        (folder / "own.sh").write_text(f"touch {self.is_begun}; exec sleep 600\n", encoding="utf-8")
        self.options = ["--ray-port", str(self.ray_port), "--retriever-port", str(self.retriever_port), "--no-reward"]
        self.options += ["--corpus-path", str(folder / "corpus.jsonl"), "--retriever-script", str(folder / "own.sh")]
        for made in (self.home.root, self.home.logs, self.home.ray_folder, folder / "gcs"):
            made.mkdir(mode=0o700)
        (folder / "gcs" / "gcs_server").symlink_to(sys.executable)
        command = [str(folder / "gcs" / "gcs_server"), "-c", _GCS, str(self.ray_port)]
        self.gcs = subprocess.Popen(command, env={**os.environ, MARK: str(self.home.ray_folder)})
        wait_until(self.listens)
        (self.home.ray_folder / "raylet.json").write_text(json.dumps(_RAYLET), encoding="utf-8")
        with subprocess.Popen([sys.executable, "-c", ""]) as ended:
            pass
        self.raylet = ended.pid
        self.write_cluster(self.raylet)

    @contextmanager
    def start(self, *options: str) -> "Iterator[subprocess.Popen[str]]":
        command = [sys.executable, "-m", "deploy.cluster", "start", *self.options, *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
            try:
                yield started
            finally:
                for each in below(started):
                    each.kill()
                started.kill()

    def listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.ray_port), 1.0).close()
        except OSError:
            return False
        return True

    def write_cluster(self, raylet: int) -> None:
        """Have the cluster be known that a start left. raylet: the process that stands for it."""
        options = read_start_options(self.options)
        url, told = options.ray_address, told_to_ray(options)
        record = ProcessRecord(
            name="ray",
            pid=raylet,
            started_at=1.0,
            ticks=started_ticks(raylet),
            processes=process_space(),
            url=url,
            log="r/logs",
            command=told,
        )
        write_cluster(
            ClusterState(
                ray_address=url,
                namespace="sluice",
                node_ip="127.0.0.1",
                retriever_url="http://127.0.0.1:1/retrieve",
                reward_url=None,
                token_file=str(self.home.token_file),
                ray_token_file=str(self.home.ray_token_file),
                keys_dir=str(self.home.keys),
                processes=[record],
                options=options.to_remember(),
            )
        )


def below(command: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Return the processes that a command has started and that run."""
    try:
        return psutil.Process(command.pid).children(recursive=True) if command.poll() is None else []
    except psutil.NoSuchProcess:
        return []


def makes_files(process: psutil.Process) -> bool:
    try:
        return "deploy.quickstart" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def command_of(pid: int) -> list[str]:
    """Return a process's command once it is that of the program, and no more of the shell that starts it."""
    process = psutil.Process(pid)
    wait_until(lambda: process.name() != "bash")
    return process.cmdline()


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path / "home"))
    head = Head(tmp_path)
    yield head
    end_ray(head.home)  # and all else that belongs to this home
    head.gcs.wait()
    shutil.rmtree(head.home.ray_folder, ignore_errors=True)


def test_gcs_is_kept_for_a_raylet_of_the_same_options_alone(head: Head) -> None:
    options = read_start_options(head.options)
    kept = find_kept(options, wanted_services(options, head.home), head.home)
    assert {name: record.pid for name, record in kept.items()} == {GCS: head.gcs.pid}
    for other in (["--num-cpus", "3"], ["--ray-port", str(free_port())]):
        options = read_start_options([*head.options, *other])
        assert find_kept(options, wanted_services(options, head.home), head.home) == {}


def test_gcs_is_not_kept_where_the_raylets_command_is_not_known(head: Head) -> None:
    options = read_start_options(head.options)
    (head.home.ray_folder / "raylet.json").unlink()
    assert find_kept(options, wanted_services(options, head.home), head.home) == {}


def test_raylet_is_begun_again_under_a_new_name_each_time(head: Head, tmp_path: Path) -> None:
    options, left = read_start_options(head.options), tmp_path / "raylet.sock"
    remembered = head.home.ray_folder / "raylet.json"
    remembered.write_text(json.dumps([*_RAYLET, f"--raylet_socket_name={left}", f"--agent={_NAME}"]), encoding="utf-8")
    names = [_NAME]
    for _ in range(2):
        left.touch()
        *_, name, _, agent = command_of(launch_raylet(options, head.home).pid)
        names.append(name.removeprefix("--node_id="))
        assert agent == f"--agent={names[-1]}"
        assert not left.exists()
    assert len(set(names)) == 3
    assert remembered.stat().st_mode & 0o077 == 0


def test_raylet_that_was_begun_again_in_vain_is_ended_without_the_gcs(head: Head) -> None:
    raylet = launch_raylet(read_start_options(head.options), head.home)
    head.write_cluster(raylet.pid)
    end_what_raylet_ran(head.home)
    assert find(raylet) is None
    assert head.gcs.poll() is None


def test_start_at_a_port_that_was_taken_meanwhile_leaves_the_gcs_to_the_other_nodes(head: Head) -> None:
    with socket.create_server(("127.0.0.1", head.retriever_port)), head.start() as started:
        out, err = started.communicate(timeout=60.0)
    assert "choose another port with --retriever-port" in err, out + err
    assert head.gcs.poll() is None
    assert (head.home.ray_folder / "raylet.json").is_file()


def test_sigterm_while_a_start_that_stays_begins_the_raylet_again_stops_the_node(head: Head) -> None:
    with head.start("--block") as started:
        wait_until(head.is_begun.exists)
        started.send_signal(signal.SIGTERM)
        out, err = started.communicate(timeout=60.0)
    assert started.returncode == 0, out + err
    assert "Told to end (SIGTERM)." in out
    assert head.gcs.wait(10.0) == -signal.SIGTERM
    assert not cluster_path().exists()
    assert ray_processes(head.home) == []


def test_sigterm_while_the_quick_starts_files_are_made_ends_that_too(head: Head) -> None:
    corpus = head.options.index("--corpus-path")
    del head.options[corpus : corpus + 2]
    head.write_cluster(head.raylet)
    with head.start("--block") as started:
        wait_until(lambda: any(map(makes_files, below(started))))
        making = [process for process in below(started) if makes_files(process)]
        started.send_signal(signal.SIGTERM)
        started.communicate(timeout=60.0)
    assert not [process for process in making if process.is_running()]


def test_service_that_ends_at_its_start_is_told_before_another_one_is_healthy(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head.write_cluster(head.gcs.pid)
    head.options.remove("--no-reward")
    # What of all that is started the reward server alone imports.
    (tmp_path / "uvicorn.py").write_text("raise SystemExit('a package is broken')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with head.start("--reward-scorer", "exact_match", "--reward-port", str(free_port())) as started:
        out, err = started.communicate(timeout=60.0)
    assert "The reward ended at its start" in err, out + err
    assert head.gcs.poll() is None
