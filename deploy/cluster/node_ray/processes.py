"""Ray's processes on this node: started for this cluster alone, recognised, and ended.

`ray stop` is never used: it would end every Ray cluster of the machine, other people's too.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil
from pydantic import ValidationError

from deploy.cluster.options.start_options import LOOPBACK, StartOptions
from deploy.node.home import Home
from deploy.node.processes import MARK, end, family, last_lines, marked
from protocol import ports
from protocol.errors import OperatorError
from protocol.http.listen import bind
from protocol.node.home import ClusterState, ProcessRecord, cluster_path
from protocol.node.process_space import process_space, started_ticks

# Ray carries neither trajectories nor weights here; the smallest store that it takes is 75 MB.
_OBJECT_STORE_BYTES = 200_000_000
# Ray has nothing to save: its processes wait for each other more than they clear up.
_TERM_S = 3.0
# Of a node that does not answer Ray's questions, each waited for 10 s with 3 s in between, so many: then it is dead to
# Ray, and its processes end when they hear of it. Ray's own 5 are a minute. A link that is cut for a minute costs a run
# nothing but that server's answers, and TCP may need most of another minute to find out that it is back.
_UNANSWERED = "RAY_health_check_failure_threshold"
_NUM_UNANSWERED = "10"
# How long a run that `ray job stop` ends may save; Ray's own 3 s are less than a step and its checkpoint take.
_JOB_STOP = "RAY_JOB_STOP_WAIT_TIME_S"
_JOB_STOP_S = "1800"
# What Ray's head keeps to tell of, the newest of each: of calls, 3 KB each, Ray's own 100,000 are 300 MB after an hour;
# of actors that ended, 17 KB each, it keeps as many. Never 0: the head dies of it.
_KEPT = {
    "RAY_task_events_max_num_task_in_gcs": "1000",
    "RAY_maximum_gcs_destroyed_actor_cached_count": "100",
    "RAY_maximum_gcs_dead_worker_cached_count": "100",
}
# Whose logs are kept after their end.
_KEPT_SESSIONS = 3


def ray_environment(home: Home, node_ip: str) -> dict[str, str]:
    """Return what Ray and everything it starts find in their environment."""
    venv = Path(sys.executable).parent
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(home.ray_token_file),
        "RAY_USAGE_STATS_ENABLED": "0",
        _UNANSWERED: os.environ.get(_UNANSWERED, _NUM_UNANSWERED),
        _JOB_STOP: os.environ.get(_JOB_STOP, _JOB_STOP_S),
        **{name: os.environ.get(name, number) for name, number in _KEPT.items()},
        # Ray lowers its workers' priority; the learner and the engine are what this machine is here for.
        "RAY_worker_niceness": "0",
        # Importing torch, vLLM and DeepSpeed takes three times as long when Python may not keep what it compiled.
        "PYTHONDONTWRITEBYTECODE": "",
        # Ray takes 127.0.0.1 for "find my address on the network" and listens there, unless it is told that this
        # machine is no part of a cluster of machines.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0" if node_ip == LOOPBACK else "1",
        "SLUICE_HOME": str(home.root),
        MARK: str(home.ray_folder),
        # DeepSpeed builds an extension at its first use, and finds ninja on PATH only.
        "PATH": f"{venv}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }


def environment_of_ray(options: StartOptions, home: Home) -> dict[str, str]:
    """Return all of the environment that Ray's processes of this node are started with."""
    return {**os.environ, **ray_environment(home, options.node_ip), ports.VARIABLE: _ours(options)}


def launch_ray(options: StartOptions, home: Home) -> "subprocess.Popen[bytes]":
    """Begin `ray start` for this node; `await_ray` waits for its end."""
    with open(home.logs / "ray_start.log", "wb") as log:
        return subprocess.Popen(  # noqa: S603  # our own command, without a shell
            _command(options, home),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment_of_ray(options, home),
            start_new_session=True,
        )


def await_ray(starting: "subprocess.Popen[bytes]", home: Home, options: StartOptions) -> ProcessRecord:
    """Return the record of this node's raylet, which ends when Ray does. Raises: OperatorError with Ray's reason."""
    log = home.logs / "ray_start.log"
    try:
        status = starting.wait(options.start_timeout_s)
    except subprocess.TimeoutExpired:
        starting.kill()
        starting.wait()
        raise OperatorError(
            f"Ray did not start within {options.start_timeout_s:g} s: {last_lines(log)} (log: {log})"
        ) from None
    raylet = _first_named("raylet", ray_processes(home))
    if status or raylet is None:
        raise OperatorError(f"Ray did not start: {last_lines(log)} (log: {log})")
    logs = home.ray_folder / "r" / "session_latest" / "logs"
    return ProcessRecord(
        name="ray",
        pid=raylet.pid,
        started_at=raylet.create_time(),
        ticks=started_ticks(raylet.pid),
        processes=process_space(),
        url=options.ray_address,
        log=str(logs.resolve()),
        command=told_to_ray(options),
    )


def ray_processes(home: Home) -> list[psutil.Process]:
    """Return this cluster's Ray processes on this node, and all that they started."""
    folders = _ray_folders(home)
    return family(marked(lambda process: any(_belongs(process, folder) for folder in folders)))


def _first_named(name: str, processes: Iterable[psutil.Process]) -> psutil.Process | None:
    """Return the first of these that has this name; those that have ended since they were listed are passed over."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == name:
                return process
    return None


def end_ray(home: Home) -> None:
    """End this cluster's Ray on this node and remove its folder, but for the last sessions' logs.

    A run that failed has named a log to look at: it is still there when one looks.
    """
    folders = _ray_folders(home)
    while processes := ray_processes(home):
        end(processes, term_s=_TERM_S)
    for folder in folders:
        _clear(folder)


def _ray_folders(home: Home) -> list[Path]:
    """Return where Ray of this cluster has its files: it may have been started with another TMPDIR than now."""
    folders = {home.ray_folder}
    with contextlib.suppress(OSError, ValidationError):
        state = ClusterState.model_validate_json((home.root / cluster_path().name).read_bytes())
        logs = next((Path(record.log) for record in state.processes if record.name == "ray"), Path())
        folders |= {folder for folder in logs.parents if folder.name == home.ray_folder.name}
    return sorted(folders)


def _clear(ray_folder: Path) -> None:
    """Remove a folder of Ray, which has ended, but for the last sessions' logs."""
    sessions = sorted((ray_folder / "r").glob("session_*-*"))  # their names begin with date and time
    for session in sessions[:-_KEPT_SESSIONS]:
        shutil.rmtree(session, ignore_errors=True)
    for part in (*ray_folder.glob("*"), *ray_folder.glob("r/*"), *ray_folder.glob("r/session_*-*/*")):
        if part.name != "logs" and part != ray_folder / "r" and part not in sessions:
            _remove(part)
    for folder in (*sessions, ray_folder / "r", ray_folder):
        with contextlib.suppress(OSError):
            folder.rmdir()  # stays while it holds logs


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _belongs(process: psutil.Process, folder: Path) -> bool:
    """Return whether Ray of this cluster started the process: it says so in its environment, or logs into the folder.

    Workers overwrite the memory where the environment was when they set their title, so both are looked at.
    """
    if process.environ().get(MARK) == str(folder):
        return True
    for descriptor in (1, 2):
        try:
            if os.readlink(f"/proc/{process.pid}/fd/{descriptor}").startswith(f"{folder}/"):
                return True
        except OSError:
            return False
    return False


def _command(options: StartOptions, home: Home) -> list[str]:
    command = [str(Path(sys.executable).parent / "ray"), "start", "--disable-usage-stats"]
    command += ["--node-ip-address", options.node_ip, "--object-store-memory", str(_OBJECT_STORE_BYTES)]
    command += ["--temp-dir", str(home.ray_folder / "r")]
    if options.ports is None:
        # Ports that the system chooses: two clusters on one machine do not meet.
        command += ["--min-worker-port", "0", "--max-worker-port", "0", "--dashboard-agent-listen-port", "0"]
    # Nobody reads workers' logs through Ray: they are files.
    command += ["--include-log-monitor", "false", *told_to_ray(options)]
    if options.head is not None:
        return [*command, "--address", options.head]
    # Its proxy for remote drivers cannot be switched off; on its usual port 10001 two clusters would meet.
    client_port = _free_port(options.node_ip) if options.ports is None else options.ports.for_ray_client
    command += ["--head", "--port", str(options.ray_port), "--ray-client-server-port", str(client_port)]
    is_shown = "false" if options.dashboard_port is None else "true"
    address = [] if options.dashboard_host is not None else ["--dashboard-host", LOOPBACK]
    return [*command, "--include-dashboard", is_shown, *address]


def told_to_ray(options: StartOptions) -> tuple[str, ...]:
    """Return what `ray start` is told of this node's ports and resources, and of the head's dashboard; of what is not
    told it has its own guess.
    """
    told: dict[str, int | str | None] = {**(options.ports.for_ray if options.ports is not None else {})}
    told |= {"--num-cpus": options.num_cpus, "--num-gpus": options.num_gpus, "--resources": options.resources}
    if options.head is None:
        told |= {"--dashboard-port": options.dashboard_port, "--dashboard-host": options.dashboard_host}
    return tuple(part for flag, value in told.items() if value is not None for part in (flag, str(value)))


def _ours(options: StartOptions) -> str:
    return "" if options.ports is None else options.ports.ours


def _free_port(host: str) -> int:
    with bind("ray client proxy", host, 0) as free:
        return int(free.getsockname()[1])
