"""deploy/slurm/run.sbatch beside commands that stand for Slurm's and write down what they are asked.

Under a real Slurm it runs in tests/machines/slurm.sh.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from deploy.cluster.options import read_start_options
from tests.fakes.ipv6 import needs_ipv6

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
LEARNER = """
mkdir -p "$RUN/checkpoints/$CHECKPOINT"
echo '{"run_id":"mine","folder":"'"$RUN"'","pid":1}' >"$SLUICE_HOME/run.lock"
trap 'echo "learner is told" >>"$CALLS"; exit 0' TERM
echo "learner $*" >>"$CALLS"
for ((i = 0; i < ${LEARNER_TENTHS:-5}; i++)); do sleep 0.1; done
exit "${LEARNER_STATUS:-0}\""""
COMMANDS = {
    "checkout/deploy/setup.sh": '[[ -z ${SETUP_S:-} ]] || { echo setup >>"$CALLS"; sleep "$SETUP_S"; }',
    "checkout/deploy/start_cluster.sh": """
echo "start ${SLUICE_HOME##*/} $*" >>"$CALLS"
sleep "${START_S:-0}"
[[ $* != *--block* ]] || (($(grep -c -- --block "$CALLS") > ${JOINS_FAIL:-0}))""",
    "checkout/deploy/stop_cluster.sh": 'echo "stop ${SLUICE_HOME##*/}" >>"$CALLS"; sleep "${STOP_S:-0}"',
    "checkout/.venv/bin/python": f"""
case "$*" in
    "-m learner.run"*) {LEARNER} ;;
    "-m "*) echo "python $*" >>"$CALLS" ;;
    *) PYTHONPATH={ROOT} exec python3 "$@" ;;
esac""",
    "bin/srun": """
[[ -z ${SLURM_GPUS:-} ]] || exit 1
[[ ${SLURM_EXPORT_ENV:-ALL} == ALL || $* == *--export=ALL* ]] || unset SLUICE_HOME
[[ $* != *--job-name=learner* ]] || echo $$ >"$CALLS.learner"
while [[ $1 == --* ]]; do shift; done
exec "$@\"""",
    "bin/squeue": """
echo squeue >>"$CALLS"
(($(grep -c ^squeue "$CALLS") > ${SQUEUE_FAILS:-0})) || exit 1
echo "7.batch batch"; [[ ! -f $CALLS.learner ]] || echo "7.2 learner\"""",
    "bin/scancel": 'echo "scancel $*" >>"$CALLS"; kill -TERM "$(cat "$CALLS.learner")"',
    "bin/scontrol": """
[[ "$*" != "show hostnames "* ]] || { [[ -z $NODES ]] || printf '%s\\n' $NODES; exit; }
[[ "$*" != "show job "* ]] || { printf '%s\\n' "JobId=7" "   $JOB_STATE" "   Comment="; exit; }
echo "scontrol $*" >>"$CALLS\"""",
}


class Job:
    """A job of the script, with a checkout and commands of its own in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.calls_file = folder / "calls"
        self.home = folder / "checkout" / ".sluice" / "slurm" / "7"
        self._folder = folder
        for name, text in COMMANDS.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
            (folder / name).chmod(0o755)
        shutil.copy(DEPLOY / "slurm" / "run.sbatch", folder)

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text("utf-8").splitlines() if self.calls_file.is_file() else []

    def run(self, *arguments: str, told: str = "", when: str = "", **environment: str) -> tuple[int, str]:
        """Return status and output. told: the signal that the script gets once a call begins with `when`."""
        self.calls_file.unlink(missing_ok=True)
        job = subprocess.Popen(
            ["bash", str(self._folder / "run.sbatch"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                "PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}",
                "CALLS": str(self.calls_file),
                "NODES": "localhost",
                "RUN": str(self._folder / "runs" / "my run"),
                "JOB_STATE": "PreemptEligibleTime=2026-11-24T06:00:00 PreemptTime=None",
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NODELIST": "nodes",
                "SLURM_SUBMIT_DIR": str(self._folder / "checkout"),
                **environment,
            },
        )
        deadline = time.monotonic() + 20
        while told and not any(call.startswith(when) for call in self.calls) and time.monotonic() < deadline:
            time.sleep(0.05)
        if told:
            job.send_signal(signal.Signals[f"SIG{told}"])
        output, _ = job.communicate(timeout=60)
        return job.returncode, output


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_job_runs_the_learner_and_ends_with_it(job: Job) -> None:
    status, output = job.run("--config", "MINE.yaml")
    assert (status, job.calls[-1]) == (0, "stop 7")
    assert any(call.startswith("learner -m learner.run --config MINE.yaml") for call in job.calls)
    assert "learner.run ended with 0" in output


def test_job_whose_time_is_up_has_the_learner_save_and_is_requeued(job: Job) -> None:
    status, _ = job.run(told="USR1", when="learner", LEARNER_TENTHS="200")
    assert status == 0
    assert job.calls[-3:] == ["learner is told", "stop 7", "scontrol requeue 7"]


def test_job_asks_again_where_the_controller_does_not_answer(job: Job) -> None:
    status, _ = job.run(told="USR1", when="learner", LEARNER_TENTHS="200", SQUEUE_FAILS="1")
    assert status == 0
    assert job.calls[-6:] == [
        *("squeue", "squeue", "scancel --signal TERM 7.2", "learner is told", "stop 7", "scontrol requeue 7"),
    ]


@pytest.mark.parametrize(("other", "own"), [("127.0.0.2", "127.0.0.1"), pytest.param("::1", "::1", marks=needs_ipv6)])
def test_head_is_told_the_address_by_which_the_next_node_sees_it(job: Job, other: str, own: str) -> None:
    status, _ = job.run(NODES=f"localhost {other}")
    assert status == 0
    assert [call.split()[-2:] for call in job.calls if call.startswith("start 7 ")] == [["--node-ip", own]]


def test_job_whose_next_node_has_no_address_says_so(job: Job) -> None:
    status, output = job.run(NODES="localhost no-such-node.invalid")
    assert (status, [call for call in job.calls if call.startswith("start 7 ")]) == (2, [])
    assert "no-such-node.invalid has no address here. The nodes" in output


def drain_of_learner(job: Job) -> list[str]:
    """Return what the learner is told of run.drain_s, with what stands before it."""
    (learner,) = [call for call in job.calls if call.startswith("learner -m")]
    return [part for part in learner.split() if part in ("--run.drain_s", "240", "840")]


def test_learner_may_end_its_step_for_as_long_as_the_job_has_left(job: Job) -> None:
    lead = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", (DEPLOY / "slurm" / "run.sbatch").read_text("utf-8"), re.M)
    job.run("--config", "MINE.yaml")
    assert (drain_of_learner(job), lead) == (["--run.drain_s", "240"], ["300"])


@pytest.mark.parametrize("form", [["--config", "{}"], ["--config={}"]])
def test_time_to_end_a_step_in_the_settings_file_stands(job: Job, tmp_path: Path, form: list[str]) -> None:
    settings = tmp_path / "MINE.yaml"
    settings.write_text("run: {name: mine, drain_s: 840}\n")
    job.run(*(part.format(settings) for part in form))
    assert drain_of_learner(job) == []


def test_time_to_end_a_step_that_is_given_stands(job: Job) -> None:
    job.run("--run.drain_s", "840")
    assert drain_of_learner(job) == ["--run.drain_s", "840"]


def test_job_that_makes_checkpoints_is_requeued_each_time(job: Job) -> None:
    for count, step in enumerate(("step_000050", "step_000100")):
        job.run(told="USR1", when="learner", LEARNER_TENTHS="200", CHECKPOINT=step, SLURM_RESTART_COUNT=str(count))
        assert job.calls[-1] == "scontrol requeue 7"


def test_job_that_makes_no_checkpoint_any_more_is_not_requeued_for_ever(job: Job) -> None:
    ended = [
        job.run(told="USR1", when="learner", LEARNER_TENTHS="200", CHECKPOINT="step_000050", SLURM_RESTART_COUNT=count)
        for count in "01"
    ]
    assert [status for status, _ in ended] == [0, 2]
    assert job.calls[-1] == "stop 7"
    assert "not requeued: no checkpoint was made since the last time limit. Give the job a longer --time" in ended[1][1]


def test_job_whose_learner_never_begins_is_not_requeued_for_ever(job: Job) -> None:
    """In the set-up, which a job shorter than the signal's lead does not survive, and in the cluster's start."""
    for wait, when in (("SETUP_S", "setup"), ("START_S", "start")):
        ended = [job.run(told="USR1", when=when, **{wait: "1", "SLURM_RESTART_COUNT": count}) for count in "01"]
        assert [status for status, _ in ended] == [143, 2]
        assert "Give the job a longer --time" in ended[1][1]
    assert [call for call in job.calls if call.startswith(("learner", "scontrol"))] == []


@pytest.mark.parametrize(
    ("options", "seconds"), [("", 360), ("--topk 5 --start-timeout-s 1800", 1860), ("--start-timeout-s=0900", 960)]
)
def test_job_waits_for_its_nodes_as_long_as_their_services_may_take(job: Job, options: str, seconds: int) -> None:
    job.run(NODES="localhost 127.0.0.2", SLUICE_START_OPTIONS=options)
    assert [call for call in job.calls if "wait-nodes" in call] == [f"python -m deploy.cluster wait-nodes 2 {seconds}"]


@pytest.mark.parametrize("options", ["--start-timeout-s 1e3", "--start-timeout-s"])
def test_time_for_nodes_that_is_no_number_of_seconds_is_refused(job: Job, options: str) -> None:
    status, output = job.run(SLUICE_START_OPTIONS=options)
    assert (status, job.calls) == (2, [])
    assert "in SLUICE_START_OPTIONS: give whole seconds." in output


def test_job_on_other_nodes_takes_nothing_over_from_its_earlier_start(job: Job) -> None:
    job.run()
    (given,) = [call.split()[2:] for call in job.calls if call.startswith("start 7 ")]
    before = read_start_options([*given, "--node-ip", "10.77.0.1", "--num-gpus", "8"]).to_remember()
    assert read_start_options(given, before) == read_start_options(given)


def test_nodes_of_a_job_end_side_by_side(job: Job) -> None:
    began = time.monotonic()
    job.run(
        told="USR1", when="learner", NODES="localhost 127.0.0.2 127.0.0.3 127.0.0.4", STOP_S="3", LEARNER_TENTHS="200"
    )
    assert time.monotonic() - began < 10  # four times 3 s, the head's among them, are 12
    assert sorted(call for call in job.calls if call.startswith("stop")) == [
        *("stop 127.0.0.2", "stop 127.0.0.3", "stop 127.0.0.4", "stop 7")
    ]
    assert job.calls[-1] == "scontrol requeue 7"


def test_job_whose_run_has_ended_is_not_requeued_while_its_nodes_end(job: Job) -> None:
    status, _ = job.run(told="USR1", when="stop", STOP_S="1")
    assert (status, job.calls[-1]) == (0, "stop 7")


def test_task_of_an_array_requeues_itself_alone(job: Job) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}  # 7 is the number of the job and of the array
    job.run(told="USR1", when="learner", LEARNER_TENTHS="200", **array)
    assert job.calls[-1] == "scontrol requeue 7_3"


def test_job_that_is_preempted_is_requeued(job: Job) -> None:
    job.run(JOB_STATE="PreemptEligibleTime=2026-11-24T06:00:00 PreemptTime=2026-11-24T06:01:00")
    assert job.calls[-1] == "scontrol requeue 7"


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"SLURM_HET_SIZE": "2"}, "a heterogeneous job would use its first component's nodes only"),
        ({"NODES": ""}, "scontrol show hostnames nodes names no node."),
        ({"SLURM_SUBMIT_DIR": "/"}, "/ is not a checkout of Sluice. Submit from one, or set SLUICE_CHECKOUT."),
    ],
)
def test_job_that_cannot_be_is_refused_before_anything_starts(job: Job, environment: dict[str, str], says: str) -> None:
    status, output = job.run(**environment)
    assert (status, job.calls) == (2, [])
    assert says in output


def test_steps_of_a_job_do_not_each_ask_for_the_gpus_of_the_whole_job(job: Job) -> None:
    status, _ = job.run(NODES="localhost 127.0.0.2", SLURM_GPUS="16")
    assert (status, [call for call in job.calls if call.startswith("learner -m")] != []) == (0, True)


@pytest.mark.parametrize(("fail", "joins"), [(1, 2), (1000, 2)])
def test_node_whose_ray_dies_joins_again_until_the_run_has_ended(job: Job, fail: int, joins: int) -> None:
    status, _ = job.run(NODES="localhost 127.0.0.2", JOINS_FAIL=str(fail), LEARNER_TENTHS="60")
    assert (status, len([call for call in job.calls if call.startswith("start 127.0.0.2 ")])) == (0, joins)


def test_nodes_of_a_job_that_was_submitted_without_the_environment_have_homes_of_their_own(job: Job) -> None:
    job.run(NODES="localhost 127.0.0.2", SLURM_EXPORT_ENV="NONE")
    assert [call.split()[1] for call in job.calls if call.startswith(("start", "stop"))] == [
        *("7", "127.0.0.2", "127.0.0.2", "7")
    ]


def test_status_of_a_learner_that_ends_while_it_is_to_be_told_is_the_jobs(job: Job) -> None:
    told = {"told": "USR1", "when": "learner", "LEARNER_TENTHS": "10", "LEARNER_STATUS": "3", "SQUEUE_FAILS": "99"}
    status, output = job.run(**told)
    assert (status, "learner.run ended with 3" in output) == (3, True)


def test_every_node_is_given_the_same_options(job: Job) -> None:
    (job.home.parents[2] / "mine.sh").touch()  # in the script's working folder
    options = '--retriever-script *.sh --resources {"h100":8}'
    job.run(NODES="localhost 127.0.0.2", SLUICE_START_OPTIONS=options)
    starts = [call for call in job.calls if call.startswith("start")]
    assert (len(starts), [call for call in starts if f" {options}" not in call]) == (2, [])
