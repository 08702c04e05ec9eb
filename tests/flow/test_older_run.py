"""A run folder that an older version left goes on: its checkpoint, ledger, settings and records are still read.

older_run.tar.xz was made by version 0.1.0, commit 3904adf: four steps of this folder's user's run, with checkpoints of
steps 2 and 4, of a model whose weights repeat, so that it packs small.
"""

import tarfile
from pathlib import Path

import pytest

from learner import audit
from tests.fakes.http_servers import ScriptedServer
from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import Bring, each_trained_once

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


def test_a_run_of_an_older_version_goes_on_from_its_checkpoint(
    cluster: FlowCluster, rewards: ScriptedServer, tmp_path: Path
) -> None:
    with tarfile.open(Path(__file__).parent / "older_run.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    user = Bring(tmp_path, tmp_path / "model", f"{rewards.address}/fast")
    left = user.left("old")

    command = cluster.run(*user.options("old", {"run.max_steps": 6}))

    assert command.returncode == 0, command.stdout + command.stderr
    assert "from step 4." in command.stdout
    assert [line["step"] for line in left.metrics] == [1, 2, 3, 4, 5, 6]
    assert left.trained == each_trained_once(6)
    assert audit.main([str(left.folder)]) == 0
