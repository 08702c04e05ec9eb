"""`search(query)`: passages from the run's retriever, or from this node's."""

from collections.abc import Mapping, Sequence
from typing import Any

from protocol.settings.run_spec import RunSpec
from rollout.environments.search import render_passages
from rollout.environments.timed_calls import timed_call
from rollout.neighbours.node import Node
from rollout.neighbours.retriever_client import RetrieverClient
from rollout.neighbours.tools.tool import function_schema


class SearchTool:
    """Gives environments a list of passages, best first, and the policy one line per passage."""

    schema = function_schema(
        "search",
        "Searches a collection of documents and returns the passages that fit best.",
        query="What to look for.",
    )

    def __init__(self, spec: RunSpec, node: Node) -> None:
        settings = spec.retriever
        if settings.url is not None:
            urls, token = [str(settings.url)], None
        else:
            urls, token = _retriever_urls(node, spec.shared_retrievers), node.token
        self._client = RetrieverClient(urls, settings.topk, token, batch_size=settings.batch_size)

    @property
    def content_hash(self) -> str:
        """Digest of the index of the last search; "": the retriever reports none."""
        return self._client.content_hash

    @property
    def is_accepting(self) -> bool:
        return self._client.is_accepting

    async def __call__(self, query: str) -> list[str]:
        with timed_call("tool", "search"):
            return [passage.contents for passage in await self._client.search(query)]

    async def answer(self, arguments: Mapping[str, Any]) -> str:
        return render_passages(await self(arguments["query"])).strip()

    async def check(self) -> None:
        await self._client.check()

    async def close(self) -> None:
        await self._client.close()


def _retriever_urls(node: Node, shared: Sequence[str]) -> list[str]:
    """Return this node's retriever, if it has one, then the other nodes' from the next one on.

    shared: all nodes' URLs, in one order. So the fallback load is spread over the nodes.
    """
    if not node.retriever_url:
        return []
    own = node.shared_retriever_url
    after = shared.index(own) + 1 if own in shared else 0
    return [node.retriever_url, *(url for url in (*shared[after:], *shared[:after]) if url != own)]
