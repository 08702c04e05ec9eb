"""What Ray is told by its environment."""

import os
import subprocess
from pathlib import Path

import psutil
import pytest
import ray

from deploy.cluster.ray_processes import end_ray, ray_environment, ray_processes
from deploy.node.home import Home
from deploy.node.processes import MARK
from protocol.node.home import ClusterState, ProcessRecord, write_cluster

_NAME = "RAY_health_check_failure_threshold"


def test_node_whose_link_is_cut_for_a_minute_stays_in_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(_NAME, raising=False)
    assert int(ray_environment(Home(tmp_path), "10.0.0.1")[_NAME]) * 13 > 120


def test_number_of_unanswered_questions_that_the_user_set_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_NAME, "3")
    assert ray_environment(Home(tmp_path), "10.0.0.1")[_NAME] == "3"


def test_run_that_is_stopped_as_a_ray_job_has_the_time_to_save_that_stop_cluster_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_JOB_STOP_WAIT_TIME_S", raising=False)
    assert ray_environment(Home(tmp_path), "127.0.0.1")["RAY_JOB_STOP_WAIT_TIME_S"] == "1800"


def test_threads_of_a_rank_sleep_while_they_wait_unless_the_user_decides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert ray_environment(Home(tmp_path), "127.0.0.1")["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert ray_environment(Home(tmp_path), "127.0.0.1")["OMP_WAIT_POLICY"] == "active"


@pytest.mark.parametrize("maker", ["CUDA", "HIP"])
def test_every_process_sees_its_own_gpu_only_whatever_other_frameworks_scripts_export(
    maker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"RAY_EXPERIMENTAL_NOSET_{maker}_VISIBLE_DEVICES"
    monkeypatch.setenv(name, "1")
    assert {**os.environ, **ray_environment(Home(tmp_path), "10.0.0.1")}[name] == "0"
    managers = Path(str(ray.__file__)).parent / "_private" / "accelerators"
    assert any(name in path.read_text("utf-8") for path in managers.glob("*.py"))


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("RAY_task_events_max_num_task_in_gcs", "1000"),
        ("RAY_maximum_gcs_destroyed_actor_cached_count", "100"),
        ("RAY_maximum_gcs_dead_worker_cached_count", "100"),
    ],
)
def test_rays_head_keeps_few_of_the_calls_and_of_the_actors_that_ended(
    name: str, number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    assert ray_environment(Home(tmp_path), "10.0.0.1")[name] == number
    monkeypatch.setenv(name, "500")
    assert ray_environment(Home(tmp_path), "10.0.0.1")[name] == "500"
    # Ray says nothing of a name that it does not know.
    (head,) = Path(str(ray.__file__)).parent.rglob("gcs_server")
    assert name.encode() in head.read_bytes()


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
            pass  # it does not sleep yet
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "b"))
        assert [process.pid for process in ray_processes(home)] == [gcs.pid]
        end_ray(home)
        assert not psutil.pid_exists(gcs.pid)
    finally:
        gcs.kill()
        gcs.wait()
    assert (logs.is_dir(), (folder / "raylet.json").exists()) == (True, False)
