"""The services one run's samples need, as its settings and this node's cluster name them.

Opened by `rollout.server` at attach, and by the fleet to check a run's services before anything slow starts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pydantic import HttpUrl

from protocol.errors import OperatorError
from protocol.http.bearer import read_token
from protocol.node.home import Keys, load_keys, read_cluster
from protocol.settings.rewards import RewardEndpoint
from protocol.settings.run_spec import RunSpec
from rollout.environments.base import Resources
from rollout.environments.loading import load_environment, uses_retriever
from rollout.neighbours.retriever_client import RetrieverClient
from rollout.neighbours.reward_client import RewardClient

BUNDLED_REWARD = "bundled"


@dataclass(frozen=True)
class Node:
    """What this node's cluster offers to every run. The token is sent to the cluster's own services only."""

    reward_url: str | None
    retriever_url: str | None
    token: str
    keys: Keys


FindNode = Callable[[], Node]


def this_node() -> Node:
    """Return what the cluster's files on this node say. Raises: OperatorError when no cluster runs here."""
    cluster = read_cluster()
    return Node(cluster.reward_url, cluster.retriever_url, read_token(cluster.token_file), load_keys())


class Services:
    """Environment, reward services and retriever of one run; an async context manager, of one event loop.

    Raises: SettingsError when the environment cannot be found, OperatorError when there is no address for a service.
    """

    def __init__(self, spec: RunSpec, node: Node) -> None:
        self.make_environment = load_environment(spec.rollout.environment)
        self.retriever = _retriever(spec, node) if uses_retriever(self.make_environment) else None
        self.rewards = _rewards(spec, node)
        self._max_turns = spec.rollout.max_turns

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def is_accepting(self) -> bool:
        """False while no sample could be finished: a service that every sample needs is down."""
        return self.rewards.is_accepting and (self.retriever is None or self.retriever.is_accepting)

    @property
    def resources(self) -> Resources:
        """What environments are made with."""
        retriever = self.retriever
        if retriever is None:
            return Resources(self._max_turns)

        async def search(query: str) -> list[str]:
            return [passage.contents for passage in await retriever.search(query)]

        return Resources(self._max_turns, search)

    async def check(self) -> None:
        """Ask each service once. Raises: NeighbourError naming the first that cannot be used, and what to change."""
        await self.rewards.check()
        if self.retriever is not None:
            await self.retriever.check()

    async def close(self) -> None:
        """Close the connections."""
        await self.rewards.__aexit__(None, None, None)
        if self.retriever is not None:
            await self.retriever.__aexit__(None, None, None)


def _rewards(spec: RunSpec, node: Node) -> RewardClient:
    if spec.rewards.endpoints:
        return RewardClient(spec.rewards.endpoints, spec.rewards.combine)
    if node.reward_url is None:
        raise OperatorError(
            "settings: rewards.endpoints is empty and this cluster has no bundled reward service. "
            "Name an endpoint, or start the cluster with its reward service."
        )
    bundled = RewardEndpoint(name=BUNDLED_REWARD, url=HttpUrl(node.reward_url))
    return RewardClient([bundled], spec.rewards.combine, default_token=node.token)


def _retriever(spec: RunSpec, node: Node) -> RetrieverClient:
    if spec.retriever.url is not None:
        return RetrieverClient([str(spec.retriever.url)], spec.retriever.topk)
    return RetrieverClient([node.retriever_url] if node.retriever_url else [], spec.retriever.topk, node.token)
