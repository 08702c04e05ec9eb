"""The bundled retriever and reward service under a keeper, without a cluster, and a run that searches and is scored."""

import json
import os
import random
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from deploy.node.home import Home
from deploy.node.keeper import SERVICES, Keeper
from deploy.node.processes import end, family, find, launch
from deploy.node.service import await_healthy
from protocol.http.listen import bind
from protocol.node.home import ClusterState, ProcessRecord, read_cluster, write_cluster, write_secret
from protocol.settings.rewards import RewardEndpoint
from rollout.environments.base import Resources
from rollout.environments.search import Search
from rollout.neighbours.retriever_client import RetrieverClient
from rollout.neighbours.reward_client import RewardClient, Score, ScoreRequest
from tests.chaos.bad_rewards import SHORT_POLICY
from tests.chaos.rig.neighbours import Outcome, Seat, play_run, under_way

_PACE = 16.0
_NUM_TOWNS = 40
_START_S = 60.0
_SCORER = """
def reward_func(queries, prompts, labels, **kwargs):
    return [query.count("a") + 0.5 for query in queries]
"""


def passage_of(query: str) -> str:
    """Return the text of the one document that a query of this run must find."""
    return f"lies at mile {query.split()[1]}."


def reward_of(text: str) -> float:
    return text.count("a") + 0.5


@contextmanager
def kept_services(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the URLs of a retriever and a reward service that a keeper in this process watches."""
    before, home = os.environ.get("SLUICE_HOME"), Home(folder / "home")
    os.environ["SLUICE_HOME"] = str(home.root)
    home.logs.mkdir(parents=True)
    write_secret(home.token_file, "0123456789abcdef")
    records = [_launch(name, home, folder) for name in SERVICES]
    try:
        for record in records:
            await_healthy(record, home.token_file, _START_S)
        _write_state(home, records)
        keeper = Keeper(str(home.root))
        yield f"{records[0].url}retrieve", f"{records[1].url}score"
        keeper.forget(list(SERVICES))
    finally:
        known = read_cluster().processes if (home.root / "cluster.json").exists() else records
        end(family(process for record in known if (process := find(record))))
        os.environ.pop("SLUICE_HOME")
        if before is not None:
            os.environ["SLUICE_HOME"] = before


async def play_against(
    retriever: str, reward: str, num_groups: int, draw: random.Random, during: Callable[[], Awaitable[None]]
) -> Outcome:
    """Return what became of a run whose every sample searches once and is then scored."""
    endpoint = RewardEndpoint.model_validate({"name": "count", "url": reward, "timeout_s": 5.0, "batch_size": 4})
    async with AsyncExitStack() as stack:
        searches = await stack.enter_async_context(RetrieverClient([retriever], 1, None, SHORT_POLICY))
        scores = await stack.enter_async_context(RewardClient([endpoint], "sum", None, SHORT_POLICY))
        both = _Both(searches, scores)

        async def search(query: str) -> list[str]:
            return [passage.contents for passage in await searches.search(query)]

        def progress() -> tuple[int, int]:
            return both.num_scored, 0

        async def during_the_run() -> None:
            await under_way(progress)
            await during()

        def write(context: str, number: int) -> str:
            if "</information>" in context:
                return f"<answer>it is {draw.getrandbits(40):x}</answer>"
            return f"<search>town {draw.randrange(_NUM_TOWNS)}</search>"

        seats = [Seat(both, Resources(2, {"search": search}), both, Search)]
        return await play_run(seats, write, num_groups, _PACE, progress, during_the_run)


class _Both:
    """Scores, and says whether both services accept work."""

    def __init__(self, searches: RetrieverClient, scores: RewardClient) -> None:
        self._searches = searches
        self._scores = scores
        self.num_scored = 0

    @property
    def is_accepting(self) -> bool:
        return self._searches.is_accepting and self._scores.is_accepting

    async def score(self, request: ScoreRequest) -> Score:
        score = await self._scores.score(request)
        self.num_scored += 1
        return score


def _launch(name: str, home: Home, folder: Path) -> ProcessRecord:
    with bind("test", "127.0.0.1", 0) as free:
        port = str(free.getsockname()[1])
    if name == "retriever":
        corpus = folder / "corpus.jsonl"
        towns = [{"id": str(n), "contents": f'"town {n}"\nIt lies at mile {n}.'} for n in range(_NUM_TOWNS)]
        corpus.write_text("".join(json.dumps(town) + "\n" for town in towns))
        options = ["-m", "retriever.serve", "--corpus-path", str(corpus), "--index-path", str(folder / "index")]
    else:
        scorer = folder / "scorer.py"
        scorer.write_text(_SCORER)
        options = ["-m", "rewards.serve", "--function", str(scorer)]
    command, url = [sys.executable, *options, "--port", port], f"http://127.0.0.1:{port}/"
    return launch(name, command, "code", home.logs / f"{name}.log", os.environ, url, Path.cwd())


def _write_state(home: Home, records: list[ProcessRecord]) -> None:
    write_cluster(
        ClusterState(
            ray_address="127.0.0.1:1",
            namespace="none",
            node_ip="127.0.0.1",
            retriever_url="",
            reward_url=None,
            token_file=str(home.token_file),
            ray_token_file=str(home.ray_token_file),
            keys_dir=str(home.keys),
            processes=records,
        )
    )
