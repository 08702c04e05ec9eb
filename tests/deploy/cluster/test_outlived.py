"""What a head does whose raylet cannot be begun again beside its GCS; that it can is shown in test_command.py."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.exceptions import RpcError

from deploy.cluster.node_ray import outlived
from deploy.cluster.node_ray.processes import first_named
from deploy.cluster.options.start_options import read_start_options
from deploy.node.home import Home
from protocol.errors import OperatorError
from protocol.node.home import ProcessRecord


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    home = Home(tmp_path)
    monkeypatch.setattr(Home, "ray_folder", property(lambda self: tmp_path))
    return home


@pytest.mark.parametrize("text", ["", '["raylet", "--node_id=a', "[]", "7", '["raylet", 3]', "{}", '["raylet"]'])
def test_command_that_is_damaged_is_named(text: str, home: Home, tmp_path: Path) -> None:
    (tmp_path / "raylet.json").write_text(text)
    with pytest.raises(OperatorError, match=r"could not be begun again: .*raylet\.json holds no command of it"):
        outlived.launch_raylet(read_start_options([]), home)


def test_gcs_that_stands_still_is_said_to(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_still(**address: Any) -> None:
        raise RpcError("Timed out while waiting for GCS to become available.", rpc_code=4)

    monkeypatch.setattr("ray._raylet.GcsClient", stand_still)
    monkeypatch.setattr(outlived, "read_cluster", lambda: None)
    monkeypatch.setattr(outlived, "connect_environment", lambda state: None)
    (tmp_path / "raylet.json").write_text('["raylet", "--node_id=a"]')
    raylet = ProcessRecord(name="ray", pid=1, started_at=0.0, ticks=0, command=(), log="", url="127.0.0.1:1")
    with pytest.raises(OperatorError, match=r"GCS on the head does not answer: Timed out while waiting for GCS"):
        outlived.await_raylet(raylet, home, 1.0)


def test_process_is_found_among_workers_that_end_meanwhile() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as worker:
        ended = psutil.Process(worker.pid)
    itself = psutil.Process()
    assert first_named(itself.name(), [ended, itself]) == itself
    assert first_named("gcs_server", [ended, itself]) is None
