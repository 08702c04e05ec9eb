"""How much of a reward service's ideal rate a run gets: a slow endpoint, and a slow function that is not async.

    python -m tests.benchmarks.rewards [--seed N] [--short]

Clients are the rollout servers' own. 200 ms an answer, 64 in flight, from one server: ideal 320 samples/s. A plain
function of 50 ms with `rewards.serve --workers 4`, asked by one server and by four, 64 in flight each: ideal 80
samples/s. The service is a process of its own. holds: at least 90 % of the ideal each time, and no call failed.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from protocol.settings.rewards import RewardEndpoint
from rollout.neighbours.reward_client import RewardClient
from rollout.neighbours.reward_endpoint import ScoreRequest
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.http_servers import module_serving

_IN_FLIGHT = 64
_SLOW_ENDPOINT = "import asyncio\nasync def score(sample):\n    await asyncio.sleep(0.2)\n    return 1.0\n"
_SLOW_FUNCTION = "import time\ndef score(sample):\n    time.sleep(0.05)\n    return 1.0\n"


def main() -> int:
    arguments = options(__doc__ or "")
    seconds = 4.0 if arguments.short else 20.0
    figures = {}
    with served(_SLOW_ENDPOINT) as url:
        figures["endpoint"] = rate(url, 1, 320.0, seconds) / 320.0
    with served(_SLOW_FUNCTION, "--workers", "4") as url:
        figures["function"] = rate(url, 1, 80.0, seconds) / 80.0
        figures["function_4_servers"] = rate(url, 4, 80.0, seconds) / 80.0
    return conclude("rewards", min(figures.values()) >= 0.9, **figures)


def rate(url: str, num_servers: int, ideal_per_s: float, seconds: float) -> float:
    """Return samples per second of so many rollout servers together, from the first request to the last reward."""
    num_samples = int(seconds * ideal_per_s)

    async def ask_all() -> float:
        endpoint = RewardEndpoint.model_validate({"name": "slow", "url": url, "max_concurrency": _IN_FLIGHT})
        numbers = iter(range(num_samples))
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(RewardClient([endpoint], "sum")) for _ in range(num_servers)]
            started = time.perf_counter()
            await asyncio.gather(*(_ask(client, numbers) for client in clients for _ in range(_IN_FLIGHT)))
            return num_samples / (time.perf_counter() - started)

    measured = asyncio.run(ask_all())
    print(f"{num_servers} servers, ideal {ideal_per_s:g}: {measured:.1f} samples/s", flush=True)
    return measured


async def _ask(client: RewardClient, numbers: Iterator[int]) -> None:
    for number in numbers:
        score = await client.score(ScoreRequest(f"e0-{number}/0/1", f"sample {number}: ", "answer", None))
        assert score.reward == 1.0


@contextmanager
def served(function: str, *arguments: str) -> Iterator[str]:
    """Yield the address of a reward service with this function."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "reward.py").write_text(function)
        with module_serving("rewards.serve", "--function", str(Path(folder) / "reward.py"), *arguments) as (url, _):
            yield url


if __name__ == "__main__":
    sys.exit(main())
