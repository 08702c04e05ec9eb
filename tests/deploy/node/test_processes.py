"""Processes of the cluster: only the recorded ones are found, and they end, stubborn ones too."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from deploy.node.processes import check_port, end, family, find, find_own_processes, has_ended
from protocol.errors import OperatorError
from protocol.http.listen import bind
from protocol.node.home import ProcessRecord
from protocol.node.identity import process_space, started_ticks

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"


def record_of(process: psutil.Process, shift_s: float = 0.0) -> ProcessRecord:
    started_at = process.create_time() + shift_s
    return ProcessRecord(name="reward", pid=process.pid, started_at=started_at, url=None, log="")


def test_process_is_found_by_pid_and_start_time_together() -> None:
    own = psutil.Process()
    assert find(record_of(own)) == own
    assert find(record_of(own, 1.0)) is None


def test_process_is_the_recorded_one_after_the_clock_was_set() -> None:
    own = psutil.Process()
    told = {"ticks": started_ticks(own.pid), "processes": process_space()}
    recorded = record_of(own, 3600.0).model_copy(update=told)
    assert find(recorded) == own
    assert find(recorded.model_copy(update={"ticks": (recorded.ticks or 0) - 1})) is None
    assert find(recorded.model_copy(update={"processes": "before-the-machine-started-again/4026531836"})) is None


def test_process_that_ends_while_it_is_asked_about_has_ended() -> None:
    for _ in range(60):  # one that is asked about all the time ends between two questions in a third of the tries
        with subprocess.Popen(["sleep", "0.01"]) as child:
            process = psutil.Process(child.pid)
            threading.Thread(target=child.wait).start()
            while not has_ended(process):
                pass


def test_family_is_everything_that_was_started_but_not_the_one_who_asks() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        found = [process.pid for process in family([psutil.Process(), psutil.Process()])]
        child.kill()
    assert (found.count(child.pid), os.getpid() in found) == (1, False)


def test_process_that_ignores_the_polite_signal_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as stubborn:
        assert stubborn.stdout is not None
        stubborn.stdout.readline()
        process = psutil.Process(stubborn.pid)
        end([process], term_s=0.2)
        assert not process.is_running()


def test_marked_are_the_users_processes_that_are_said_to_be_the_clusters() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        found = find_own_processes(lambda process: process.pid in (child.pid, os.getpid()))
        child.kill()
    assert [process.pid for process in found] == [child.pid]


def test_address_of_another_machine_is_not_told_as_a_taken_port() -> None:
    with pytest.raises(
        OperatorError, match=r"^203\.0\.113\.7, wanted by the Ray head, is not an address of this machine"
    ):
        check_port("Ray head", "203.0.113.7", 0, "--node-ip")


def test_taken_port_is_told_with_pid_and_program_alone() -> None:
    with bind("test", "127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OperatorError) as told:
            check_port("retriever", "127.0.0.1", port, "--retriever-port")
    assert str(told.value) == (
        f"Port {port} of 127.0.0.1, wanted by the retriever, is taken by process {os.getpid()} "
        f"({psutil.Process().name()}). Stop that process, or choose another port with --retriever-port."
    )


def test_shared_memory_of_an_ended_process_is_removed_and_a_users_file_stays() -> None:
    made = [Path(f"/dev/shm/{kind}_{os.getpid()}") for kind in ("psm", "users_index")]  # noqa: S108  shared memory
    for path in made:
        path.write_bytes(b"x" * 4096)
    mapping = (
        "import mmap, sys, time; files = [open(path, 'r+b') for path in sys.argv[1:]];"
        "maps = [mmap.mmap(file.fileno(), 0) for file in files]"
    )
    command = [sys.executable, "-c", f"{mapping}; print(1, flush=True); time.sleep(60)", *map(str, made)]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            end([psutil.Process(process.pid)])
        assert [path.exists() for path in made] == [False, True]
    finally:
        for path in made:
            path.unlink(missing_ok=True)
