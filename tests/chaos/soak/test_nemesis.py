"""The soak's faults hit each kind of process, and leave none of them standing still."""

import random
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.chaos.soak.nemesis import Lasting, Nemesis
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


def test_what_there_is_none_of_is_passed_over(sleeper: psutil.Process) -> None:
    nemesis = Nemesis(
        lambda: {"rank": [sleeper]}, ["stop rank", "kill fleet", "stop keeper"], {}, random.Random(1), (0.0, 0.0)
    )
    assert {name for second in range(200) if (name := nemesis.poll(float(second))) is not None} == {"stop rank"}
    nemesis.rest()
    assert set(nemesis.begun) == {"stop rank"}
    assert nemesis.unmet == ["kill fleet", "stop keeper"]
