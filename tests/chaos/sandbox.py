"""Programs that try to leave the sandbox, take more than their share or never end.

    python -m tests.chaos.sandbox [--seed N] [--short] [--calls N] [--programs N]

Every escape of `tests.chaos.rig.escapes` runs against a host that has something to find: a file, sockets, shared
memory, processes. Then so many calls, one in ten of which hangs, as many at a time as there are cores.
At last the scorer `code_tests` gets so many programs that loop, flood or recurse, as many at a time as there are cores,
and again and again a sound one beside them; before each hundred, a sound one alone.
holds: none gets out; each call ends within its limit and 0.5 s, beside what one that does next to nothing took at most
among them; every bad program gets 0 within the limit of one test, beside a wait for a sound one; the sound ones get 1,
half of them within twice the time that one takes alone; afterwards no process is left. --short: bad programs and
sound ones get their rewards; their times are printed only, because other tests share the cores.
"""

import asyncio
import ctypes
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import psutil

from protocol.sandbox.run import Limits, ProgramResult, Sandbox
from rewards.bundled import _MAX_PROGRAMS
from rewards.code_tests import CodeScorer
from rewards.sample import ScorerFailure, make_sample
from tests.chaos.rig.escapes import ESCAPES, HANGING
from tests.chaos.rig.verdict import conclude, options

LATE_S = 0.5
_LIMIT_S = 2.0
_TEST_S, _WALL_PER_TEST, _ROUND = 1.0, 3.0, 100
_SOUND = "def square(x):\n    return sum(x for _ in range(x))"
BAD = {
    "loop": "while True: pass",
    "loop in a test": "def square(x):\n    while True: pass",
    "flood": "import sys\nwhile True:\n    print('x' * 999)\n    print('x' * 999, file=sys.stderr)",
    "flood of values": "def square(x):\n    return list(range(10**9))",
    "recursion": "def square(x):\n    return square(x + 1)",
    "recursion by a generator": "def square(x):\n    yield from square(x)",
    "memory": "held = []\nwhile True: held.append(bytearray(1 << 20))",
    "sleep": "import time; time.sleep(600)",
}
_ROOMY = Limits(wall_s=60.0, memory_bytes=256 << 20)


def main() -> int:
    chosen = options(__doc__, calls=0, programs=0)
    calls, programs = (20, 8) if chosen.short else (1000, 2000)
    numbers = chosen.calls or calls, chosen.programs or programs
    return asyncio.run(_measured(*numbers, Random(chosen.seed), is_timed=not chosen.short))


async def _measured(num_calls: int, num_programs: int, random: Random, *, is_timed: bool) -> int:
    sandbox, scoring = Sandbox(), Sandbox(_MAX_PROGRAMS)
    try:
        await sandbox.check()
        out = await escaped(sandbox)
        print(f"{len(ESCAPES)} escapes, out: {', '.join(out) or 'none'}", flush=True)
        late, start_s = await late_calls(sandbox, num_calls, random)
        print(f"{num_calls} calls, late by more than {LATE_S} s: {late or 'none'}", flush=True)
        scored = await score_bad_programs(scoring, num_programs, random)
        print(f"{num_programs} bad programs: {scored}", flush=True)
        num_left = await processes_left(sandbox)
    finally:
        sandbox.close()
        scoring.close()
    return conclude(
        "sandbox",
        not out and not late and not num_left and scored.is_right and (scored.is_quick or not is_timed),
        escapes=len(ESCAPES),
        out=len(out),
        calls=num_calls,
        late=len(late),
        start_s=start_s,
        left=num_left,
        programs=num_programs,
        rewarded=scored.num_rewarded,
        missed=scored.num_missed,
        failed=scored.num_failed,
        longest_s=round(scored.longest_s, 2),
        alone_s=round(scored.alone_s, 2),
        beside_s=round(scored.beside_s, 2),
    )


async def escaped(sandbox: Sandbox) -> list[str]:
    """Return the ways by which a program got out."""
    async with host_to_find() as values:
        rans = await asyncio.gather(*(attempted(sandbox, way, values) for way in ESCAPES))
    return [way for way, ran in zip(ESCAPES, rans, strict=True) if "out" in ran.output.split()]


async def attempted(sandbox: Sandbox, way: str, values: dict[str, Any]) -> ProgramResult:
    """Return how an escape went. values: of the host, by the names that stand for them in the program."""
    program = ESCAPES[way]
    for name, value in values.items():
        program = program.replace(f"{{{name}}}", repr(value))
    return await sandbox.run(program, limits=_ROOMY)


@asynccontextmanager
async def host_to_find() -> AsyncIterator[dict[str, Any]]:
    """Yield what escapes look for, while it is there."""
    os.environ["SECRET_OF_THE_HOST"] = "1"
    abstract, key = f"sluice-{os.getpid()}", 1 + os.getpid()
    libc = ctypes.CDLL(None)
    shared = libc.shmget(key, 4096, 0o1666)  # made if it is not there
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_text("secret")
        os.chmod(folder, 0o755)  # noqa: S103  for a program under any user to read, if it gets here
        try:
            async with (
                await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0) as server,
                await asyncio.start_unix_server(lambda reader, writer: writer.close(), f"\0{abstract}"),
            ):
                port = server.sockets[0].getsockname()[1]
                # A number that no process in a fresh namespace has.
                pid = max(os.getpid(), 1000)
                yield {"secret": str(secret), "folder": Path(folder).name, "port": port, "abstract": abstract,
                       "shared": key, "pid": pid}  # fmt: skip
        finally:
            libc.shmctl(shared, 0, None)
            del os.environ["SECRET_OF_THE_HOST"]


async def late_calls(sandbox: Sandbox, num_calls: int, random: Random) -> tuple[list[str], float]:
    """Return the calls that hung longer than their limit and LATE_S, and the seconds of the longest that did not hang.

    The latter is what starting a process takes here, and part of every call.
    """
    hanging = set(random.sample(range(num_calls), num_calls // 10))
    ways = {number: random.choice(list(HANGING)) for number in sorted(hanging)}
    slots = asyncio.Semaphore(os.cpu_count() or 1)

    async def call(number: int) -> float:
        program = HANGING[ways[number]] if number in ways else f"print(sum(range({number})))"
        async with slots:
            return await _timed(sandbox, program, Limits(wall_s=_LIMIT_S) if number in ways else _ROOMY)

    took_s = await asyncio.gather(*(call(number) for number in range(num_calls)))
    start_s = max(took for number, took in enumerate(took_s) if number not in ways)
    late_after_s = _LIMIT_S + start_s + LATE_S
    return [f"{way} {took_s[n]:.2f} s" for n, way in ways.items() if took_s[n] > late_after_s], start_s


async def _timed(sandbox: Sandbox, program: str, limits: Limits) -> float:
    started = time.monotonic()
    await sandbox.run(program, limits=limits)
    return time.monotonic() - started


@dataclass(frozen=True)
class BadPrograms:
    """What the scorer made of bad programs and of a sound one beside them."""

    num_rewarded: int  # bad programs that got anything but 0
    num_missed: int  # sound programs that got anything but 1
    num_failed: int  # programs that waited too long for a core, and got no reward
    longest_s: float  # for a bad program
    slowest_s: float  # for a sound program
    alone_s: float  # for the sound program alone, median
    beside_s: float  # for the sound program beside bad ones, median

    @property
    def is_right(self) -> bool:
        return not self.num_rewarded and not self.num_missed

    @property
    def is_quick(self) -> bool:
        # A bad program may wait for a sound one, whose tests came first.
        longest_s = _WALL_PER_TEST * _TEST_S + LATE_S + self.slowest_s
        return not self.num_failed and self.longest_s < longest_s and self.beside_s < 2 * self.alone_s


async def score_bad_programs(sandbox: Sandbox, num_programs: int, random: Random) -> BadPrograms:
    cores = os.cpu_count() or 1
    scorer, slots, rewards = CodeScorer(sandbox, _TEST_S, 2 * cores), asyncio.Semaphore(cores), []
    label = [f"assert square({number}) == {number**2}" for number in range(6)]

    async def timed(code: str) -> tuple[float | None, float]:
        started = time.monotonic()
        try:
            (score,) = await scorer.score([make_sample(f"```python\n{code}\n```", None, label)])
        except ScorerFailure as failure:
            print(failure, flush=True)
            return None, time.monotonic() - started
        return score.reward, time.monotonic() - started

    async def bad(way: str) -> float:
        async with slots:
            reward, took_s = await timed(BAD[way])
        rewards.append(reward)
        return took_s

    alone, beside, bad_s = [], [], list[float]()
    for first in range(0, num_programs, _ROUND):  # the load of other work changes: each round measures both
        alone += [await timed(_SOUND) for _ in range(3)]
        ways = random.choices(list(BAD), k=min(_ROUND, num_programs - first))
        running = [asyncio.ensure_future(bad(way)) for way in ways]
        while not all(each.done() for each in running):
            beside.append(await timed(_SOUND))
            await asyncio.sleep(1.0)
        bad_s += await asyncio.gather(*running)
        print(f"{len(bad_s)} of {num_programs} bad programs, {max(bad_s):.1f} s at most", flush=True)
    sound = [reward for reward, _ in (*alone, *beside)]
    return BadPrograms(
        sum(reward not in (0.0, None) for reward in rewards),
        sum(reward not in (1.0, None) for reward in sound),
        [*rewards, *sound].count(None),
        max(bad_s),
        max(took_s for _, took_s in (*alone, *beside)),
        statistics.median(took_s for _, took_s in alone),
        statistics.median(took_s for _, took_s in beside),
    )


async def processes_left(sandbox: Sandbox) -> int:
    """Return how many processes of the sandbox there still are after 20 s in which they may end."""
    deadline = time.monotonic() + 20
    while (left := _ours(sandbox)) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return len(left)


def _ours(sandbox: Sandbox) -> list[psutil.Process]:
    """Return this process's descendants, the guards that name the sandbox's folder, and users that only it makes."""
    found = set(psutil.Process().children(recursive=True))
    for process in psutil.process_iter(["cmdline"]):
        if sandbox.folder in " ".join(process.info["cmdline"] or ()):
            found.add(process)
    return list(found)


if __name__ == "__main__":
    sys.exit(main())
