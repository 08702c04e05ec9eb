"""Programs in the sandbox: what they print, how they are ended, and what of the host they cannot reach."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from protocol.errors import NeighbourError, OperatorError
from protocol.sandbox.run import Limits, Sandbox, _wait_until_gone

# A loaded machine may take seconds to start a process.
ROOMY = Limits(wall_s=60.0)


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(4)
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module", autouse=True)
def _is_possible() -> None:
    """Skip where the kernel lets nobody be locked in: the product refuses to start there."""

    async def check() -> None:
        sandbox = Sandbox()
        try:
            await sandbox.check()
        finally:
            sandbox.close()

    try:
        asyncio.run(check())
    except OperatorError as error:
        pytest.skip(str(error))


async def test_program_prints_reads_and_ends_with_its_code(sandbox: Sandbox) -> None:
    program = "import sys\nprint(sys.stdin.read()[::-1])\nprint('é', file=sys.stderr)\nsys.exit(3)"
    ran = await sandbox.run(program, b"abc", ROOMY)
    assert (ran.output, ran.errors, ran.how, ran.exit_code) == ("cba\n", "é\n", "exit", 3)


@pytest.mark.parametrize("code", [0, 1, 97, 255])
async def test_any_exit_code_is_returned(sandbox: Sandbox, code: int) -> None:
    ran = await sandbox.run(f"raise SystemExit({code})", limits=ROOMY)
    assert (ran.how, ran.exit_code) == ("exit", code)


async def test_program_that_is_ended_by_a_signal_says_which(sandbox: Sandbox) -> None:
    assert (await sandbox.run("import os; os.abort()", limits=ROOMY)).exit_code == 128 + 6


async def test_program_that_never_ends_is_ended_with_all_that_it_started(sandbox: Sandbox) -> None:
    program = "import os, time\nfor _ in range(3):\n    os.fork()\nprint('up', flush=True)\ntime.sleep(600)"
    before = set(psutil.Process().children(recursive=True))
    ran = await sandbox.run(program, limits=Limits(wall_s=3.0))
    assert ran.how == "time"
    deadline = time.monotonic() + 20
    while set(psutil.Process().children(recursive=True)) - before:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_flood_of_output_is_cut(sandbox: Sandbox, stream: str) -> None:
    program = f"import sys\nwhile True: print('x' * 1000, file=sys.{stream})"
    ran = await sandbox.run(program, limits=Limits(wall_s=60.0, output_bytes=5000))
    assert (ran.how, {len(ran.output), len(ran.errors)}) == ("output", {0, 5000})


async def test_program_with_a_full_pipe_is_gone_after_its_kill(sandbox: Sandbox) -> None:
    report = os.memfd_create("report")
    process = await sandbox._start("while True: print('x' * 1000)", b"", ROOMY, report)
    os.close(report)
    assert process.stdout is not None
    async with asyncio.timeout(60.0):
        # Until asyncio has taken as much as it holds, and the pipe is full behind it.
        while not process.stdout._paused:  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        await _wait_until_gone(process)
    assert process.returncode is not None


async def test_unread_input_does_not_block(sandbox: Sandbox) -> None:
    ran = await sandbox.run("print(1)", b"x" * (4 << 20), ROOMY)
    assert (ran.output, ran.how) == ("1\n", "exit")


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03, 0.06, 0.1, 0.2])
async def test_run_that_is_cancelled_at_any_moment_leaves_no_process(sandbox: Sandbox, after_s: float) -> None:
    task = asyncio.create_task(sandbox.run("import time; time.sleep(600)", limits=Limits(wall_s=600.0)))
    await asyncio.sleep(after_s)
    task.cancel()
    await asyncio.wait([task])
    deadline = time.monotonic() + 60
    while _guards(sandbox):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_program_ends_with_the_outermost_process(sandbox: Sandbox) -> None:
    task = asyncio.create_task(sandbox.run("import time; time.sleep(600)", limits=Limits(wall_s=600.0)))
    deadline = time.monotonic() + 60
    while len(_guards(sandbox)) < 2:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    next(guard for guard in _guards(sandbox) if guard.ppid() == os.getpid()).kill()
    async with asyncio.timeout(60):
        await task
    while _guards(sandbox):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def _guards(sandbox: Sandbox) -> list[psutil.Process]:
    """Return the processes that stand round this sandbox's programs: each names its folder."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if sandbox.folder in " ".join(process.info["cmdline"] or ())
    ]


async def test_processes_that_together_hold_more_memory_than_one_may_are_ended(sandbox: Sandbox) -> None:
    hog = "import os, time\nfor _ in range(20):\n    if not os.fork(): break\nx = b'x' * (60 << 20)\ntime.sleep(600)"
    ran = await sandbox.run(hog, limits=Limits(wall_s=120.0, memory_bytes=256 << 20))
    assert (ran.how, ran.exit_code) == ("exit", 128 + 9)


async def test_memory_that_processes_share_counts_once(sandbox: Sandbox) -> None:
    sharing = "import os\nx = b'x' * (60 << 20)\nfor _ in range(3):\n    os.fork()\nimport time; time.sleep(1)"
    ran = await sandbox.run(sharing, limits=Limits(wall_s=120.0, memory_bytes=256 << 20))
    assert (ran.how, ran.exit_code) == ("exit", 0)


async def test_program_can_use_threads_processes_and_sockets(sandbox: Sandbox) -> None:
    program = """
import concurrent.futures, multiprocessing, socket, subprocess
print(list(concurrent.futures.ThreadPoolExecutor(4).map(abs, [-1, -2])))
print(subprocess.run(['echo', 'hello'], capture_output=True, text=True, check=True).stdout, end='')
ours, theirs = socket.socketpair()
ours.send(b'x')
print(theirs.recv(1))
process = multiprocessing.get_context('fork').Process(target=print, args=('forked',))
process.start()
process.join()
"""
    ran = await sandbox.run(program, limits=ROOMY)
    assert ran.output == "[1, 2]\nhello\nb'x'\nforked\n", ran


async def test_limits_hold_without_isolation() -> None:
    sandbox = Sandbox(is_isolated=False)
    ran = await sandbox.run("print(6 * 7)", limits=ROOMY)
    assert (ran.output, ran.exit_code) == ("42\n", 0)
    ran = await sandbox.run("x = bytearray(4 << 30)", limits=ROOMY)
    assert "MemoryError" in ran.errors
    ran = await sandbox.run("import time; time.sleep(600)", limits=Limits(wall_s=1.0))
    assert ran.how == "time"
    sandbox.close()


@pytest.fixture
def one_busy_core() -> Iterator[None]:
    """Give this process and its children one core, which eight endless loops use."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in range(8)]
    yield
    os.sched_setaffinity(0, cores)
    for loop in loops:
        loop.kill()
        loop.wait()


_WORK = "import os, time\nwhile time.process_time() < {}: pass\nprint('done')"


@pytest.mark.usefixtures("one_busy_core")
async def test_a_wait_for_a_processor_is_no_part_of_a_programs_time_and_sleep_is(sandbox: Sandbox) -> None:
    worked = await sandbox.run(_WORK.format(0.5), limits=Limits(wall_s=2.0))
    slept = await sandbox.run("import time\ntime.sleep(60)", limits=Limits(wall_s=1.0))

    assert (worked.how, worked.output, slept.how) == ("exit", "done\n", "time")


@pytest.mark.usefixtures("one_busy_core")
async def test_a_program_that_gets_no_processor_is_a_failure_of_the_machine(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.sandbox.run._LEAST_MOST_S", 1.2)
    with pytest.raises(NeighbourError, match=r"waited \d+ s for a processor\. Run fewer processes"):
        await sandbox.run("while True: pass", limits=Limits(wall_s=0.3, cpu_s=10))
