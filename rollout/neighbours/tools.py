"""The tools that an environment may ask for, by name; a new tool is a class and one line in TOOLS.

A tool lives as long as its run is attached. Its own limits (deadlines, requests at a time) are its own matter.
"""

from collections.abc import Callable, Collection
from typing import Any, Protocol

from protocol.errors import SettingsError
from protocol.settings.run_spec import RunSpec
from rollout.neighbours.node import Node
from rollout.neighbours.retriever_client import RetrieverClient


class Tool(Protocol):
    """Something that environments call. A call that fails raises NeighbourError with the tool's boundary."""

    @property
    def is_accepting(self) -> bool:
        """False while calls would only wait: no new leases are asked for."""

    async def __call__(self, *args: Any) -> Any: ...

    async def check(self) -> None:
        """Use it once, without retries. Raises: NeighbourError saying what to change."""

    async def close(self) -> None: ...


class SearchTool:
    """`search(query)`: contents of the passages found, best first, from the run's retriever or this node's own."""

    def __init__(self, spec: RunSpec, node: Node) -> None:
        if spec.retriever.url is not None:
            self._client = RetrieverClient([str(spec.retriever.url)], spec.retriever.topk)
        else:
            urls = [node.retriever_url] if node.retriever_url else []
            self._client = RetrieverClient(urls, spec.retriever.topk, node.token)

    @property
    def is_accepting(self) -> bool:
        return self._client.is_accepting

    async def __call__(self, query: str) -> list[str]:
        return [passage.contents for passage in await self._client.search(query)]

    async def check(self) -> None:
        await self._client.check()

    async def close(self) -> None:
        await self._client.close()


TOOLS: dict[str, Callable[[RunSpec, Node], Tool]] = {"search": SearchTool}


def open_tools(names: Collection[str], spec: RunSpec, node: Node) -> dict[str, Tool]:
    """Return these tools, ready to be checked.

    Raises: SettingsError for a name that is no tool's, OperatorError where there is no address for one.
    """
    for name in names:
        if name not in TOOLS:
            environment = spec.rollout.environment
            raise SettingsError(
                f"settings: rollout.environment = {environment}: its class requires the tool {name!r}. "
                f"There are: {', '.join(TOOLS)}."
            )
    return {name: TOOLS[name](spec, node) for name in sorted(names)}
