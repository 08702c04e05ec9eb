"""Ray's processes on this node: started for this cluster only, recognised, and ended.

`ray stop` is never used: it ends every Ray cluster of the machine, other users' too.
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

from deploy.cluster.options import LOOPBACK, StartOptions
from deploy.node.home import Home
from deploy.node.processes import MARK, end, family, find_own_processes, last_lines, search_path
from protocol.addresses import PORTS_VARIABLE
from protocol.errors import OperatorError
from protocol.http.listen import bind
from protocol.node.home import ClusterState, ProcessRecord, cluster_path
from protocol.node.identity import process_space, started_ticks

# No trajectories or weights pass through Ray. Its minimum is 75 MB.
_OBJECT_STORE_BYTES = 200_000_000
_TERM_S = 3.0  # Ray has nothing to save
_NUM_SESSIONS = 3  # sessions whose logs are kept
# Defaults of Ray's own settings and of its processes; a user's values stay.
_RAY_SETTINGS = {
    # Ranks on CPUs: threads that spin while they wait take the cores of engines, coordinator and other programs.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Health checks, 13 s each, that a node may miss before Ray takes it for dead. Ray's default of 5 is a minute: too
    # short for a network cut of a minute, after which TCP may need most of another minute.
    "RAY_health_check_failure_threshold": "10",
    # Time that `ray job stop` gives a run for its checkpoint. Ray's default is 3 s.
    "RAY_JOB_STOP_WAIT_TIME_S": "1800",
    # History on the head. Ray's default of 100,000 calls takes 300 MB after an hour. With 0 the head crashes.
    "RAY_task_events_max_num_task_in_gcs": "1000",
    "RAY_maximum_gcs_destroyed_actor_cached_count": "100",
    "RAY_maximum_gcs_dead_worker_cached_count": "100",
}


def ray_environment(home: Home, node_ip: str) -> dict[str, str]:
    """Return the environment variables of Ray and of everything it starts, beyond the caller's own."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(home.ray_token_file),
        "RAY_USAGE_STATS_ENABLED": "0",
        **{name: os.environ.get(name, default) for name, default in _RAY_SETTINGS.items()},
        # Ray lowers its workers' priority; learner and engine are this machine's main work.
        "RAY_worker_niceness": "0",
        # A process without GPUs sees none: else all ranks of `--num-gpus 0` would share the first.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
        # verl's and OpenRLHF's scripts export these as 1: every process would then use the node's first GPU.
        **{f"RAY_EXPERIMENTAL_NOSET_{maker}_VISIBLE_DEVICES": "0" for maker in ("CUDA", "HIP")},
        # Without bytecode files importing torch, vLLM and DeepSpeed takes three times as long.
        "PYTHONDONTWRITEBYTECODE": "",
        # With 1 Ray replaces 127.0.0.1 by the machine's network address, and listens there.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0" if node_ip == LOOPBACK else "1",
        "SLUICE_HOME": str(home.root),
        MARK: str(home.ray_folder),
        # DeepSpeed builds an extension at its first use, and searches ninja on PATH only.
        "PATH": search_path(),
    }


def launch_ray(options: StartOptions, home: Home) -> "subprocess.Popen[bytes]":
    """Launch `ray start` for this node; `await_ray` waits for its end."""
    ours = "" if options.ports is None else options.ports.ours
    environment = {**os.environ, **ray_environment(home, options.node_ip), PORTS_VARIABLE: ours}
    with open(home.logs / "ray_start.log", "wb") as log:
        return subprocess.Popen(  # noqa: S603  # our own command, without a shell
            _command(options, home),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
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
    raylet = _find_raylet(ray_processes(home))
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
        command=ray_flags(options),
    )


def ray_processes(home: Home) -> list[psutil.Process]:
    """Return this cluster's Ray processes on this node, and all that they started."""
    folders = _ray_folders(home)
    return family(find_own_processes(lambda process: any(_belongs(process, folder) for folder in folders)))


def end_ray(home: Home) -> None:
    """End this cluster's Ray on this node and remove its folder, except the logs of the last three sessions."""
    folders = _ray_folders(home)
    while processes := ray_processes(home):
        end(processes, term_s=_TERM_S)
    for folder in folders:
        _clear(folder)


def _find_raylet(processes: Iterable[psutil.Process]) -> psutil.Process | None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == "raylet":
                return process
    return None


def _ray_folders(home: Home) -> list[Path]:
    """Return the folders of this cluster's Ray: an earlier start may have had another TMPDIR."""
    folders = {home.ray_folder}
    with contextlib.suppress(OSError, ValidationError):
        state = ClusterState.model_validate_json((home.root / cluster_path().name).read_bytes())
        logs = next((Path(record.log) for record in state.processes if record.name == "ray"), Path())
        folders |= {folder for folder in logs.parents if folder.name == home.ray_folder.name}
    return sorted(folders)


def _clear(ray_folder: Path) -> None:
    """Remove an ended Ray's folder, except the logs of the last sessions."""
    sessions = sorted((ray_folder / "r").glob("session_*-*"))  # names begin with date and time
    for session in sessions[:-_NUM_SESSIONS]:
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
    """Return whether this cluster's Ray started the process, by the mark in its environment or by its log file.

    Workers overwrite their environment's memory when they set their title.
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
        # Ports chosen by the system: two clusters on one machine do not collide.
        command += ["--min-worker-port", "0", "--max-worker-port", "0", "--dashboard-agent-listen-port", "0"]
    # Workers' logs are read as files, not through Ray.
    command += ["--include-log-monitor", "false", *ray_flags(options)]
    if options.address is not None:
        return [*command, "--address", options.address]
    # Ray's proxy for remote drivers cannot be switched off; on its default port 10001 two clusters collide.
    client_port = _free_port(options.node_ip) if options.ports is None else options.ports.ray_client_port
    command += ["--head", "--port", str(options.ray_port), "--ray-client-server-port", str(client_port)]
    is_shown = "false" if options.dashboard_port is None else "true"
    address = [] if options.dashboard_host is not None else ["--dashboard-host", LOOPBACK]
    return [*command, "--include-dashboard", is_shown, *address]


def ray_flags(options: StartOptions) -> tuple[str, ...]:
    """Return the flags of `ray start` that a start's options decide: with other flags Ray is started again."""
    flags: dict[str, int | str | None] = {**(options.ports.ray_flags if options.ports is not None else {})}
    flags |= {"--num-cpus": options.num_cpus, "--num-gpus": options.num_gpus, "--resources": options.resources}
    if options.address is None:
        flags |= {"--dashboard-port": options.dashboard_port, "--dashboard-host": options.dashboard_host}
    return tuple(part for flag, value in flags.items() if value is not None for part in (flag, str(value)))


def _free_port(host: str) -> int:
    with bind("ray client proxy", host, 0) as free:
        return int(free.getsockname()[1])
