"""Ray's folder, in the temporary folder: that of the shell that gives a command need not be that of the start."""

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from deploy.cluster.node_ray.processes import end_ray, ray_processes
from deploy.node.home import Home
from deploy.node.processes import MARK
from protocol.node.home import ClusterState, ProcessRecord, write_cluster


def test_ray_that_was_started_with_another_tmpdir_is_found_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path / "home"))
    home = Home(tmp_path / "home")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a"))
    folder = home.ray_folder
    logs = folder / "r" / "session_2026-11-24_06-25-32_1_1" / "logs"
    logs.mkdir(parents=True)
    (folder / "raylet.json").touch()
    ray = ProcessRecord(name="ray", pid=1, started_at=0.0, url="127.0.0.1:6379", log=str(logs))
    fields = dict.fromkeys(("retriever_url", "token_file", "ray_token_file", "keys_dir"), "")
    state = {"ray_address": "127.0.0.1:6379", "namespace": "sluice", "node_ip": "127.0.0.1", "reward_url": None}
    write_cluster(ClusterState.model_validate({**fields, **state, "processes": [ray]}))
    gcs = subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: str(folder)})
    try:
        while psutil.Process(gcs.pid).environ().get(MARK) is None:
            pass  # it is no sleep yet
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "b"))
        assert [process.pid for process in ray_processes(home)] == [gcs.pid]
        end_ray(home)
        assert not psutil.pid_exists(gcs.pid)
    finally:
        gcs.kill()
        gcs.wait()
    assert (logs.is_dir(), (folder / "raylet.json").exists()) == (True, False)
