"""A command where no cluster runs, or a broken one, or where a port of one is taken: one line says what to do."""

from pathlib import Path

import pytest

from protocol.http.listen import bind
from tests.fakes.cluster_state import cluster_state
from tests.fakes.ports import free_port
from tests.flow.refusals import no_cluster_in, run_without_cluster
from tests.flow.user_run import Bring


@pytest.mark.parametrize("has_own_settings", [True, False], ids=["own settings", "quick start"])
def test_without_a_cluster_the_command_says_how_to_start_one(
    user: Bring, tmp_path: Path, has_own_settings: bool
) -> None:
    finished = run_without_cluster(tmp_path / "home", user.options("lonely") if has_own_settings else [])
    assert (finished.returncode, finished.stderr) == (
        1,
        f"{no_cluster_in(tmp_path / 'home')}\n",
    )
    assert not (user.folder / "runs" / "lonely").exists()


def test_a_broken_record_of_the_cluster_is_named(user: Bring, tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text("{", encoding="utf-8")
    finished = run_without_cluster(tmp_path, user.options("broken-record"))
    assert (finished.returncode, finished.stderr) == (
        1,
        f"{tmp_path}/cluster.json cannot be used (ValidationError). {no_cluster_in(tmp_path)}\n",
    )


def test_a_cluster_that_is_gone_is_found_within_seconds(user: Bring, tmp_path: Path) -> None:
    with bind("test", "127.0.0.1", 0) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    state = cluster_state(ray_address=address, node_ip="127.0.0.1", token_file=f"{tmp_path}/token")
    (tmp_path / "cluster.json").write_text(state.model_dump_json(), encoding="utf-8")
    finished = run_without_cluster(tmp_path, user.options("gone"))
    assert (finished.returncode, finished.stderr) == (
        1,
        f"Ray at {address} does not answer (Connection refused). Start the cluster with sluice start.\n",
    )
    assert not (user.folder / "runs" / "gone").exists()


def test_a_taken_port_is_named_with_who_has_it(tmp_path: Path) -> None:
    with bind("test", "127.0.0.1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        wanted = ["start", "--ray-port", str(port), "--retriever-port", str(free_port())]
        finished = run_without_cluster(tmp_path / "home", wanted, "deploy.cluster")
    assert finished.returncode == 1
    assert finished.stderr.startswith(f"Port {port} of 127.0.0.1, wanted by the Ray head, is taken by process ")
    assert finished.stderr.endswith("Stop that process, or choose another port with --ray-port.\n")
    assert finished.stderr.count("\n") == 1
    assert not (tmp_path / "home" / "cluster.json").exists()
