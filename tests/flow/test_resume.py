"""Runs that are interrupted: the command, a part of the learner or an engine is killed."""

import re
import subprocess
from dataclasses import dataclass

import psutil
import pytest

from learner import audit
from tests.fakes.process_facts import title_of
from tests.flow.flow_cluster import FlowCluster, expect_no_leavings
from tests.flow.user_run import Bring, Left, each_trained_once

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

# Slow steps, so that each is met in its middle, and checkpoints behind the books.
_OPTIONS = {"run.max_steps": 6, "learner.checkpoint_every_steps": 2, "learner.max_staleness": 0}
_STEPS_SURVIVED = 30  # more than a run makes while a test looks for its engine


@pytest.fixture(scope="module")
def copied(slow_user: Bring) -> dict[str, object]:
    """Return the options of a run whose checkpoints are copied to another folder."""
    return {**_OPTIONS, "learner.copy_checkpoints_to": f"file://{slow_user.folder}/store"}


@dataclass(frozen=True)
class Killed:
    """What stood in the folder of a run whose command was killed."""

    steps: list[int]
    newest_checkpoint: int


@pytest.fixture(scope="module")
def killed(cluster: FlowCluster, slow_user: Bring, copied: dict[str, object]) -> Killed:
    left = slow_user.left("killed")
    with cluster.running(*slow_user.options("killed", copied)) as run:
        run.wait_until(lambda: left.last_step >= 3)
        run.process.kill()
        run.finished()
    return Killed([int(line["step"]) for line in left.metrics], left.newest_checkpoint)


@pytest.fixture(scope="module")
def resumed(
    cluster: FlowCluster, slow_user: Bring, copied: dict[str, object], killed: Killed
) -> "subprocess.CompletedProcess[str]":
    return cluster.run(*slow_user.options("killed", copied))


def test_a_killed_command_leaves_nothing_running_but_its_warm_servers(killed: Killed, cluster: FlowCluster) -> None:
    expect_no_leavings(cluster)


def test_the_run_was_killed_past_its_newest_checkpoint(killed: Killed) -> None:
    # On a machine that stands still for a moment the kill may come a step later.
    assert killed.steps == list(range(1, len(killed.steps) + 1))
    assert (len(killed.steps), killed.newest_checkpoint) in [(3, 2), (4, 2), (4, 4), (5, 4)]


def test_the_same_command_goes_on_from_the_newest_checkpoint(
    killed: Killed, resumed: "subprocess.CompletedProcess[str]", slow_user: Bring
) -> None:
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "Resuming" in resumed.stdout
    assert f"from step {killed.newest_checkpoint}." in resumed.stdout
    assert slow_user.left("killed").newest_checkpoint == 6


def test_after_a_resume_every_prompt_is_trained_once(
    resumed: "subprocess.CompletedProcess[str]", slow_user: Bring
) -> None:
    left = slow_user.left("killed")

    assert left.states == {"trained": 12}
    assert left.trained == each_trained_once(6)
    assert left.most_often_trained == 1
    assert left.rows("SELECT value FROM meta WHERE key = 'incarnation'") == [("2",)]


def test_after_a_resume_metrics_and_samples_have_every_step_once(
    resumed: "subprocess.CompletedProcess[str]", slow_user: Bring
) -> None:
    left = slow_user.left("killed")

    assert [line["step"] for line in left.metrics] == [1, 2, 3, 4, 5, 6]
    assert [line["policy_version"] for line in left.metrics] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in left.samples] == [step for step in range(1, 7) for _ in range(4)]  # whole groups
    times = [line["at_s"] for line in left.metrics]
    assert times == sorted(times)


def test_a_run_goes_on_without_its_folder_with_another_number_of_ranks_and_zero_stage(
    resumed: "subprocess.CompletedProcess[str]", cluster: FlowCluster, slow_user: Bring, copied: dict[str, object]
) -> None:
    left = slow_user.left("killed")
    left.folder.rename(left.folder.with_name("lost"))
    options = {**copied, "run.max_steps": 8, "learner.num_ranks": 2, "learner.zero_stage": 3}

    command = cluster.run(*slow_user.options("killed", options))

    assert command.returncode == 0, command.stdout + command.stderr
    assert f"Fetching the checkpoint of step 6 from {copied['learner.copy_checkpoints_to']}/killed." in command.stdout
    assert "from step 6." in command.stdout
    assert left.trained == each_trained_once(8)
    assert [line["policy_version"] for line in left.metrics] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert left.newest_checkpoint == 8
    assert audit.main([str(left.folder)]) == 0


# -- parts of the learner die -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lived_on(cluster: FlowCluster, slow_user: Bring) -> "tuple[Left, subprocess.CompletedProcess[str]]":
    """Return what is left of a run whose rank was killed after step 3, and its coordinator after step 5."""
    left = slow_user.left("lived_on")
    with cluster.running(*slow_user.options("lived_on", {**_OPTIONS, "run.max_steps": 8})) as run:
        run.wait_until(lambda: left.last_step >= 3)
        killed = cluster.ranks()
        for process in killed:
            process.kill()
        run.wait_until(lambda: left.last_step >= 5 and bool(set(cluster.ranks()) - set(killed)))
        for process in cluster.actors("CoordinatorProcess"):
            process.kill()
        return left, run.finished()


def test_a_run_goes_on_from_its_newest_checkpoint_when_a_part_of_the_learner_dies(
    lived_on: "tuple[Left, subprocess.CompletedProcess[str]]",
) -> None:
    left, command = lived_on

    assert command.returncode == 0, command.stdout + command.stderr
    first, second = (int(step) for step in re.findall(r"Resuming\s+from\s+step\s+(\d+)\.", command.stdout))
    assert first in (2, 4)
    assert second in (4, 6)
    assert left.trained == each_trained_once(8)
    assert left.rows("SELECT value FROM meta WHERE key = 'incarnation'") == [("3",)]
    assert [line["step"] for line in left.metrics] == list(range(1, 9))
    assert audit.main([str(left.folder)]) == 0


def test_a_killed_learner_rank_ends_a_command_that_may_not_start_again_with_a_report(
    cluster: FlowCluster, slow_user: Bring
) -> None:
    left = slow_user.left("no_restart")
    with cluster.running(*slow_user.options("no_restart", {**_OPTIONS, "run.max_restarts": 0})) as run:
        run.wait_until(lambda: left.last_step >= 1)
        for rank in cluster.ranks():
            rank.kill()
        command = run.finished()

    assert command.returncode == 1
    (line,) = command.stderr.strip().splitlines()
    assert line.startswith("learner rank 0: died")
    assert "</html>" in (left.folder / "report.html").read_text(encoding="utf-8")
    expect_no_leavings(cluster)


# -- a rollout server dies with its engine ----------------------------------------------------------------------------


def _engines(cluster: FlowCluster) -> list[psutil.Process]:
    found = [process for process in cluster.processes() if title_of(process).startswith("VLLM::EngineCore")]
    return found or [process for process in psutil.process_iter() if _is_of_a_server(process)]


def _is_of_a_server(process: psutil.Process) -> bool:
    """Return whether this is the engine of a rollout server; psutil's descendants of Ray sometimes lack it."""
    try:
        parents = process.parents() if title_of(process).startswith("VLLM::EngineCore") else []
    except psutil.Error:
        return False
    return any(title_of(parent).startswith("ray::RolloutServer") for parent in parents)


@pytest.fixture(scope="module")
def survived(cluster: FlowCluster, slow_user: Bring) -> "tuple[Left, subprocess.CompletedProcess[str]]":
    num_tries = len(list((slow_user.folder / "runs").glob("survived_*")))  # a second try is a new run
    left = slow_user.left(f"survived_{num_tries}")
    options = {"run.max_steps": _STEPS_SURVIVED, "learner.max_staleness": 4}
    with cluster.running(*slow_user.options(left.folder.name, options)) as run:
        run.wait_until(lambda: left.last_step >= 2)
        run.wait_until(lambda: _engines(cluster) != [], 30.0)
        for engine in _engines(cluster):  # an earlier test may have left a warm server
            engine.kill()
        return left, run.finished()


def test_a_run_whose_only_engine_was_killed_ends_well(
    survived: "tuple[Left, subprocess.CompletedProcess[str]]",
) -> None:
    _, command = survived
    assert command.returncode == 0, command.stdout + command.stderr
    assert "sluice-rollout-0 stopped serving" in command.stdout
    assert "sluice-rollout-0 serves again" in command.stdout


def test_no_prompt_is_lost_or_given_up_with_an_engine(
    survived: "tuple[Left, subprocess.CompletedProcess[str]]",
) -> None:
    left, _ = survived

    assert left.trained == each_trained_once(_STEPS_SURVIVED)
    assert left.most_often_trained == 1
    assert left.states.keys() == {"trained"}
    assert left.rows("SELECT COUNT(*) FROM failures WHERE boundary != 'server'") == [(0,)]
    assert 0 < max(left.staleness) <= 4
