"""What Ray is told by its environment."""

from pathlib import Path

import pytest
import ray

from deploy.cluster.node_ray.processes import ray_environment
from deploy.node.home import Home

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
