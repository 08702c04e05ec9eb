"""A checkout that changes under a running cluster: the next run gets a fleet of the new code, or hears why not, and the
next start replaces the services that changed."""

import json
from pathlib import Path

import pytest

from tests.deploy.running_cluster import RunningCluster

pytestmark = pytest.mark.stack

_RENEW = """
import json, os
from protocol.node.home import read_cluster
cluster = read_cluster()
os.environ |= cluster.ray_environment()
from learner.cluster import fleet, ray_door as door
with door.connect(cluster):
    if {is_lending}:
        sleeper = {{"live": lambda self: __import__("time").sleep(60)}}
        borrower = door.ray.remote(num_cpus=0)(type("Borrower", (), sleeper))
        door.ray.get(fleet.find_fleet().lend_processes.remote(1, False, [borrower.remote()]))
    try:
        fleet.renew_fleet()
    finally:
        print(json.dumps(door.ray.get(fleet.find_fleet().describe_self.remote())))
"""


def renew(cluster: RunningCluster, *, is_lending: bool = False) -> tuple[dict[str, object], str]:
    """Return what the fleet says of itself after a driver asked for one of its own code, and that driver's errors."""
    finished = cluster.python("-c", _RENEW.format(is_lending=is_lending))
    assert finished.stdout, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1]), finished.stderr


def test_fleet_is_started_anew_when_its_code_has_changed_and_no_run_uses_it(
    changeable: RunningCluster, checkout: Path
) -> None:
    first, _ = renew(changeable)
    same, _ = renew(changeable)
    with (checkout / "deploy" / "fleet" / "fleet.py").open("a") as file:
        file.write("# another line\n")
    second, errors = renew(changeable)
    with (checkout / "learner" / "run" / "driver.py").open("a") as file:
        file.write("# no part of the fleet\n")
    third, _ = renew(changeable)
    with (checkout / "rollout" / "session" / "session.py").open("a") as file:
        file.write("# another line\n")
    lent, refusal = renew(changeable, is_lending=True)

    assert (same["pid"], same["code"]) == (first["pid"], first["code"])
    assert second["pid"] != first["pid"]
    assert second["code"] != first["code"]
    assert "Error" not in errors
    assert third["pid"] == second["pid"]
    assert lent["pid"] == third["pid"]
    assert "another run is using that fleet" in refusal


def test_start_replaces_the_service_whose_code_has_changed_and_no_other(
    changeable: RunningCluster, checkout: Path
) -> None:
    before = changeable.pids
    with (checkout / "retriever" / "indexes" / "bm25.py").open("a") as file:
        file.write("# another line\n")
    assert changeable.start().returncode == 0
    after = changeable.pids

    assert after["retriever"] != before["retriever"]
    assert (after["reward"], after["ray"]) == (before["reward"], before["ray"])


def test_start_replaces_a_retriever_script_that_was_edited(changeable: RunningCluster, checkout: Path) -> None:
    script = checkout / "mine.sh"
    script.write_text(f'exec {checkout}/deploy/launch_retriever.sh "$@"\n')
    assert changeable.start("--retriever-script", str(script)).returncode == 0
    before = changeable.pids["retriever"]
    with script.open("a") as file:
        file.write("# another line\n")
    assert changeable.start("--retriever-script", str(script)).returncode == 0

    assert changeable.pids["retriever"] != before
