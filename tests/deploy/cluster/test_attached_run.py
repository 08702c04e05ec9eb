"""A run that uses the cluster: what a start and a stop may do to it, and what they say."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protocol.http.listen import bind
from tests.deploy.running_cluster import RunningCluster
from tests.fakes.ports import free_port

pytestmark = pytest.mark.stack

# What a run's command has of the cluster, and how it ends: after SIGTERM, in its own time.
COMMAND = """
import signal, sys, time
from pathlib import Path
from protocol.node.current_run import using_cluster
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
with using_cluster("my-run", Path("folder")):
    print("attached", flush=True)
    while not stopped:
        time.sleep(0.05)
    time.sleep(1.0)
    open(sys.argv[1], "w").write("saved")
"""


@contextmanager
def attached(cluster: RunningCluster, saved: Path) -> Iterator["subprocess.Popen[str]"]:
    process = cluster.popen("-c", COMMAND, str(saved))
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "attached\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Yield a cluster that the tests here may stop."""
    from tests.deploy.conftest import started

    with started(RunningCluster(tmp_path_factory.mktemp("attached"))) as running:
        yield running


def test_start_with_other_options_is_refused_while_a_run_is_attached(own: RunningCluster, tmp_path: Path) -> None:
    before = own.state
    with attached(own, tmp_path / "saved") as run:
        refused = own.command("start", "--retriever-port", str(free_port()), "--ray-port", str(free_port()))
        assert (refused.returncode, own.state) == (1, before)
        assert refused.stderr.startswith(
            "sluice start: these options would replace ray, retriever, which the run my-run "
            f"(process {run.pid}) uses. Give the options of the earlier start (--"
        )
        assert f"--retriever-port {own.retriever_port}" in refused.stderr
        bare = own.command("start")
        assert (bare.returncode, own.state) == (0, before)
        assert run.poll() is None


def test_stop_waits_until_the_attached_run_has_saved_and_keeps_the_logs(own: RunningCluster, tmp_path: Path) -> None:
    log = Path(own.state.processes[0].log)
    with attached(own, tmp_path / "saved") as run:
        stopped = own.stop()
        assert (stopped.returncode, run.wait(30)) == (0, 0), stopped.stderr
        *lines, again = stopped.stdout.splitlines()
        assert lines == [
            f"Stopping the run my-run (process {run.pid}) first: it ends after its step, with a checkpoint. "
            "sluice stop --now does not wait for it.",
            "Stopped.",
        ]
        _, sluice, start, *options = again.replace("The same cluster again:", "again").split()
        assert (Path(sluice).name, start) == ("sluice", "start")
        assert ["--ray-port", str(own.ray_port), "--retriever-port", str(own.retriever_port)] == options[:4]
        assert "--topk" not in options, "an option with its default value"
    assert (tmp_path / "saved").read_text() == "saved"
    assert list(log.glob("raylet.out"))


def test_stop_now_waits_for_no_run_and_leaves_no_process_port_or_folder(own: RunningCluster, tmp_path: Path) -> None:
    shared_before = set(Path("/dev/shm").iterdir())  # noqa: S108  # where shared memory is
    assert own.start("--no-reward").returncode == 0
    processes = own.processes
    assert len(processes) > 3
    with attached(own, tmp_path / "saved"):
        stopped = own.command("stop", "--now")
        assert stopped.returncode == 0, stopped.stderr
        assert "at once: the steps after its last checkpoint are lost." in stopped.stdout
    assert not (tmp_path / "saved").exists()
    assert [process for process in processes if process.is_running()] == []
    for port in (own.ray_port, own.retriever_port):
        bind("test", "127.0.0.1", port).close()
    assert own.leavings == {"logs"}  # a run that failed has named one of them
    ours = [path for path in set(Path("/dev/shm").iterdir()) - shared_before if "plasma" in path.name]  # noqa: S108
    assert ours == []
    again = own.stop()
    assert (again.returncode, again.stdout) == (0, "No Sluice cluster runs here.\n")
