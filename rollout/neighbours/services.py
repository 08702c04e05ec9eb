"""The services one run's samples need, as its settings and this node's cluster name them.

They are opened and checked at attach, and once by the fleet before anything slow starts.
"""

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pydantic import HttpUrl

from protocol.errors import OperatorError
from protocol.message_texts import with_texts
from protocol.settings.rewards import RewardEndpoint, RewardsSettings
from protocol.settings.run_spec import RunSpec
from rollout.environments.base import Messages, Resources
from rollout.environments.loading import load_environment, required_tools
from rollout.environments.tool_use.make import MakeToolUse
from rollout.neighbours.no_rewards import NoRewards
from rollout.neighbours.node import Node
from rollout.neighbours.reward_client import RewardClient
from rollout.neighbours.tools.by_name import no_such_tool, open_tools
from rollout.neighbours.tools.search import SearchTool

if TYPE_CHECKING:
    from rollout.neighbours.tools.mcp.tools import McpTools

BUNDLED_REWARD = "bundled"
_BUNDLED_BATCH = 16  # samples that the cluster's own service is given in one request


class Services:
    """Environment, reward services and tools of one run; an async context manager, of one event loop.

    Raises: SettingsError when the environment or a tool of it cannot be found, OperatorError when there is no address
    for a service.
    """

    def __init__(self, spec: RunSpec, node: Node, tokenizer: Any = None) -> None:
        """tokenizer: the model's; None: the model is not known yet, and not checked."""
        self.make_environment = load_environment(spec.rollout.environment, spec.tools)
        self._tokenizer = tokenizer
        self._spec = spec
        self._required = required_tools(self.make_environment)
        self.tools = open_tools(self._required, spec, node)
        self._mcp = self._open_mcp()
        self.rewards = _open_rewards(spec.rewards, node, getattr(self.make_environment, "gives_reward", False))
        # What environments are made with.
        self.resources = Resources(spec.rollout.max_turns, self.tools, self._chat_template, self._rendered)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def is_accepting(self) -> bool:
        """False while no sample could be finished: a service that every sample needs is down."""
        return self.rewards.is_accepting and all(tool.is_accepting for tool in self.tools.values())

    @property
    def content_hash(self) -> str:
        """Digest of the index that searches ask first; "" without a search, or where its service tells none."""
        return next((tool.content_hash for tool in self.tools.values() if isinstance(tool, SearchTool)), "")

    async def check(self) -> None:
        """Ask each service once.

        Raises: NeighbourError naming the first that cannot be used, and what to change; SettingsError for a model that
        the environment cannot use.
        """
        if self._tokenizer is not None and isinstance(self.make_environment, MakeToolUse):
            self.make_environment.check_model(self._chat_template)
        await self.rewards.check()
        for tool in self.tools.values():
            await tool.check()
        if self._mcp is not None:
            # The dictionary that environments are made with.
            self.tools.update(await self._mcp.listed(self.tools))
            if missing := self._required - self.tools.keys():
                raise no_such_tool(min(missing), self.tools, self._spec)

    async def close(self) -> None:
        """Close the connections."""
        await self.rewards.close()
        for tool in self.tools.values():
            await tool.close()
        if self._mcp is not None:
            await self._mcp.close()

    def _open_mcp(self) -> "McpTools | None":
        """Return the MCP servers' tools, to be listed; None where the environment uses none of them."""
        offers = isinstance(self.make_environment, MakeToolUse) and self.make_environment.offers_mcp
        if not self._spec.tools.mcp or not (offers or self._required - self.tools.keys()):
            return None
        try:
            # Half a second, and a library, that only those pay who have such a server.
            from rollout.neighbours.tools.mcp.tools import McpTools
        except ImportError as error:
            raise OperatorError(f"settings: tools.mcp needs the package mcp, which is not here: {error}.") from error
        return McpTools(self._spec.tools.mcp)

    def _rendered(self, messages: Messages) -> str:
        """Return chat messages by the model's template. A BOS that the tokenizer puts before every text is left out."""
        text = str(
            self._tokenizer.apply_chat_template(with_texts(messages), add_generation_prompt=True, tokenize=False)
        )
        bos = getattr(self._tokenizer, "bos_token", None)
        has_two = bool(bos) and self._tokenizer.encode("")[:1] == [self._tokenizer.bos_token_id]
        return text.removeprefix(str(bos)) if has_two else text

    @property
    def _chat_template(self) -> Any:
        return getattr(self._tokenizer, "chat_template", None)


def _open_rewards(rewards: RewardsSettings, node: Node, is_given: bool) -> RewardClient | NoRewards:
    """Return the run's reward services. is_given: the environment gives the reward, where no endpoint is named."""
    if rewards.endpoints:
        return RewardClient(rewards.endpoints, rewards.combine)
    if is_given:
        return NoRewards()
    if node.reward_url is None:
        raise OperatorError(
            "settings: rewards.endpoints is empty and this cluster has no bundled reward service. "
            "Name an endpoint, or start the cluster with its reward service."
        )
    bundled = RewardEndpoint(name=BUNDLED_REWARD, url=HttpUrl(node.reward_url), batch_size=_BUNDLED_BATCH)
    return RewardClient([bundled], rewards.combine, default_token=node.token)
