"""The soak's faults hit each kind of process, and leave none of them standing still."""

import random
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.chaos.soak.nemesis import Lasting, Nemesis
from tests.chaos.soak.processes import processes_of_hosts
from tests.fakes.waiting import wait_until


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


def is_stopped(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_STOPPED


def test_each_kind_of_fault_comes_once_before_one_comes_again(sleeper: psutil.Process) -> None:
    kinds = ["stop rank", "stop server", "stop engine"]
    nemesis = Nemesis(
        lambda: {"rank": [sleeper], "server": [sleeper], "engine": [sleeper]},
        kinds,
        {"fill disk": Lasting(lambda: None, lambda: None, 1.0)},
        random.Random(1),
        (1.0, 1.0),
    )
    drawn = [name for second in range(400) if (name := nemesis.poll(float(second))) is not None]
    nemesis.rest()
    assert sorted(drawn[:4]) == sorted(drawn[4:8]) == sorted([*kinds, "fill disk"])


def test_stopped_process_goes_on_when_the_fault_ends(sleeper: psutil.Process) -> None:
    nemesis = Nemesis(lambda: {"rank": [sleeper]}, ["stop rank"], {}, random.Random(1), (0.0, 0.0))
    assert nemesis.poll(0.0) == "stop rank"
    wait_until(lambda: is_stopped(sleeper))
    assert nemesis.poll(1.0) is None
    assert is_stopped(sleeper)
    nemesis.poll(30.0)
    wait_until(lambda: not is_stopped(sleeper))


def test_what_a_stopped_process_was_begun_by_goes_on_too() -> None:
    shell = psutil.Popen(["bash", "-c", f"{sys.executable} -c 'import time; time.sleep(600)' & kill -STOP $$; wait"])
    try:
        wait_until(lambda: is_stopped(shell) and bool(shell.children()))
        (child,) = shell.children()
        nemesis = Nemesis(lambda: {"command": [child]}, ["stop command"], {}, random.Random(1), (0.0, 0.0))
        assert nemesis.poll(0.0) == "stop command"
        wait_until(lambda: is_stopped(child))
        nemesis.rest()
        wait_until(lambda: not is_stopped(child) and not is_stopped(shell))
    finally:
        for process in (*shell.children(), shell):
            process.kill()
        shell.wait()


def test_what_there_is_none_of_is_passed_over(sleeper: psutil.Process) -> None:
    nemesis = Nemesis(
        lambda: {"rank": [sleeper]}, ["stop rank", "kill fleet", "stop keeper"], {}, random.Random(1), (0.0, 0.0)
    )
    assert {name for second in range(200) if (name := nemesis.poll(float(second))) is not None} == {"stop rank"}
    nemesis.rest()
    assert set(nemesis.begun) == {"stop rank"}
    assert nemesis.unmet == ["kill fleet", "stop keeper"]


def test_processes_of_a_host_are_found_whoever_began_them(sleeper: psutil.Process) -> None:
    named = subprocess.Popen(
        ["python -m retriever.serve --port 1", "-c", "import time; time.sleep(600)"], executable=sys.executable
    )
    try:
        # Not its descendants: of the same numbering as this process.
        wait_until(lambda: named.pid in [each.pid for each in processes_of_hosts([sleeper]).get("retriever", [])])
    finally:
        named.kill()
        named.wait()


def test_shell_that_repeats_a_command_is_not_the_command(sleeper: psutil.Process) -> None:
    shell = subprocess.Popen(["bash", "-c", "sleep 600; :", "python -m rewards.serve --port 1"])
    try:
        wait_until(lambda: "rewards.serve" in " ".join(psutil.Process(shell.pid).cmdline()))
        assert shell.pid not in [each.pid for each in processes_of_hosts([sleeper]).get("reward", [])]
    finally:
        shell.kill()
        shell.wait()
