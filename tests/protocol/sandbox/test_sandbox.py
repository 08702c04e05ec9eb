"""Programs in the sandbox: what they print, how they are ended, and what of the host they cannot reach."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from protocol.errors import OperatorError
from protocol.sandbox.limits import Limits
from protocol.sandbox.run import Sandbox

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
async def test_no_exit_code_of_a_program_is_taken_for_a_failure_of_the_sandbox(sandbox: Sandbox, code: int) -> None:
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


async def test_flood_of_output_is_cut(sandbox: Sandbox) -> None:
    ran = await sandbox.run("while True: print('x' * 1000)", limits=Limits(wall_s=60.0, output_bytes=5000))
    assert (ran.how, len(ran.output)) == ("output", 5000)


async def test_input_that_nobody_reads_holds_nothing_up(sandbox: Sandbox) -> None:
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


async def test_program_ends_with_the_outermost_of_the_processes_round_it(sandbox: Sandbox) -> None:
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


_LIBC = "import ctypes; c = ctypes.CDLL(None)"
# Each prints "out" if it gets out, and what stopped it otherwise.
ESCAPES = {
    "read a file of the host": "print('out' if open({secret}).read() else '')",
    "list the host's folders": "import os; print('out' if {folder} in os.listdir('/tmp') else '')",
    "read accounts": "open('/etc/passwd'); print('out')",
    "read the root's home": "import os; os.listdir('/root/.ssh'); print('out')",
    "write beside Python": "import sys; open(sys.base_prefix + '/lib/x', 'w'); print('out')",
    "write into /usr": "open('/usr/lib/x', 'w'); print('out')",
    "write into the root": "open('/x', 'w'); print('out')",
    "write through a link": "import os; os.symlink('/usr/lib/x', 'l'); open('l', 'w'); print('out')",
    "open the memory of its guard": "open('/proc/1/mem', 'rb').read(1); print('out')",
    "read the host's root": "import os; print('out' if 'home' in os.listdir('/proc/1/root') else '')",
    "connect to the world": "import socket; socket.create_connection(('1.1.1.1', 53), 2); print('out')",
    "connect to this host": "import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('out')",
    "kill a process of the host": "import os; os.kill({pid}, 0); print('out')",
    "see processes of the host": "import os; print('out' if str({pid}) in os.listdir('/proc') else '')",
    "trace its guard": f"{_LIBC}; print('out' if c.ptrace(16, 1, 0, 0) == 0 else '')",
    "read the environment": "import os; print('out' if 'SECRET_OF_THE_HOST' in os.environ else '')",
    "mount": f"{_LIBC}; print('out' if c.mount(b'none', b'/work', b'tmpfs', 0, None) == 0 else '')",
    "make the root writable": f"{_LIBC}; print('out' if c.mount(None, b'/', None, 32 | 4096, None) == 0 else '')",
    "become root": "import os; os.setuid(0) if os.getuid() else os.chown('/usr', 1, 1); print('out')",
    "get rights by a program": "import os; os.system('mount -t tmpfs x /usr && echo out')",
    "raise its limits": "import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40)); print('out')",
    "make a device": "import os; os.mknod('d', 0o20666, os.makedev(1, 1)); open('d', 'rb'); print('out')",
    "leave by chroot": "import os; os.chroot('/proc/1/root'); print('out')",
    "fork without end": """
import os, time
for _ in range(1000):
    if not os.fork():
        time.sleep(30)
print('out')
""",
    "take all memory": "x = bytearray(4 << 30); print('out')",
    "fill the disk": "open('a', 'wb').write(bytes(200 << 20)); print('out')",
    "name the host": "import socket; socket.sethostname('x'); print('out')",
}


@pytest.mark.parametrize("way", ESCAPES)
async def test_program_does_not_get_out(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "1")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        # A number that no process in a fresh namespace has.
        values = {"secret": str(secret), "folder": secret.parts[2], "port": port, "pid": max(os.getpid(), 1000)}
        program = ESCAPES[way]
        for name, value in values.items():
            program = program.replace(f"{{{name}}}", repr(value))
        ran = await sandbox.run(program, limits=Limits(wall_s=60.0, memory_bytes=256 << 20))
    assert "out" not in ran.output.split(), ran
    assert ran.how == "exit", ran


async def test_limits_alone_hold_where_nothing_is_locked_in() -> None:
    sandbox = Sandbox(is_isolated=False)
    ran = await sandbox.run("print(6 * 7)", limits=ROOMY)
    assert (ran.output, ran.exit_code) == ("42\n", 0)
    ran = await sandbox.run("x = bytearray(4 << 30)", limits=ROOMY)
    assert "MemoryError" in ran.errors
    ran = await sandbox.run("import time; time.sleep(600)", limits=Limits(wall_s=1.0))
    assert ran.how == "time"
    sandbox.close()
