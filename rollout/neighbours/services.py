"""The services of one run's samples, from its settings and this node's cluster.

They are opened and checked at attach, and once by the fleet before anything slow starts.
"""

import json
from collections.abc import Collection, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from pydantic import HttpUrl

from protocol.errors import OperatorError
from protocol.message_texts import render_prompt, with_texts
from protocol.settings.rewards import RewardEndpoint, RewardsSettings
from protocol.settings.run_spec import SEARCH_INDEX, TOOL_LIST, RunSpec
from rollout.environments.base import Messages, Resources
from rollout.environments.loading import load_environment, required_tools
from rollout.environments.tool_use.tool_use import MakeToolUse
from rollout.neighbours.http.pool import ClosedAtExit
from rollout.neighbours.node import Node
from rollout.neighbours.reward_client import NoRewards, RewardClient, ScoreRequest
from rollout.neighbours.tools.by_name import no_such_tool, open_tools
from rollout.neighbours.tools.search import SearchTool

if TYPE_CHECKING:
    from rollout.neighbours.tools.mcp.server import McpTools

BUNDLED_REWARD = "bundled"
_BUNDLED_BATCH = 16  # samples per request to the cluster's own service


class Services(ClosedAtExit):
    """Environment, reward services and tools of one run, in one event loop.

    Raises: SettingsError for an unknown environment or tool, and for other files of the user than the command's;
    OperatorError for a service without an address.
    """

    def __init__(self, spec: RunSpec, node: Node, tokenizer: Any = None, ends: Collection[int] = ()) -> None:
        """tokenizer: of the model; None: the model is unknown and not checked. ends: tokens that end its turns."""
        spec.check_code()
        self.make_environment = load_environment(spec.rollout.environment, spec.tools)
        if isinstance(self.make_environment, MakeToolUse):
            self.make_environment.template_kwargs = spec.rollout.chat_template_kwargs
        self._tokenizer = tokenizer
        self._spec = spec
        self._required = required_tools(self.make_environment)
        self.tools = open_tools(self._required, spec, node)
        self._mcp = self._open_mcp()
        self.tools_digest = ""  # of the MCP servers' tools, once they are listed
        self.rewards = _open_rewards(spec.rewards, node, getattr(self.make_environment, "gives_reward", False))
        # Arguments of environments.
        self.resources = Resources(
            spec.rollout.max_turns, self.tools, tokenizer, self._render, spec.retriever.words, ends
        )

    @property
    def is_accepting(self) -> bool:
        """False while no sample can finish: a service that every sample needs is down."""
        return self.rewards.is_accepting and all(tool.is_accepting for tool in self.tools.values())

    @property
    def content_hash(self) -> str:
        """Content hash of the own retriever's index; "" without a search tool, or if unknown."""
        return next((tool.content_hash for tool in self.tools.values() if isinstance(tool, SearchTool)), "")

    @property
    def digests(self) -> dict[str, str]:
        """Digests of what the policy reads besides its prompt, by their names for the user, as far as checked."""
        known = {TOOL_LIST: self.tools_digest, SEARCH_INDEX: self.content_hash}
        return {name: digest for name, digest in known.items() if digest}

    async def check(self, row: Mapping[str, Any] | None = None) -> None:
        """Call each service once. row: prompt, label and columns of a data row, for the reward services.

        Raises: NeighbourError with the first unusable service and the remedy; SettingsError for a model that the
        environment cannot use.
        """
        if self._tokenizer is not None and isinstance(self.make_environment, MakeToolUse):
            self.make_environment.check_model(self._tokenizer, self.resources.end_tokens)
        await self.rewards.check(None if row is None else _score_request_of(row))
        for tool in self.tools.values():
            await tool.check()
        if self._mcp is not None:
            # Environments share this dictionary.
            listed = await self._mcp.list_tools(self.tools)
            schemas = [listed[name].schema for name in sorted(listed)]
            self.tools_digest = sha256(json.dumps(schemas, sort_keys=True).encode()).hexdigest()
            self.tools.update(listed)
            if missing := self._required - self.tools.keys():
                raise no_such_tool(min(missing), self.tools, self._spec)
        if self._tokenizer is not None and isinstance(self.make_environment, MakeToolUse):
            self.make_environment.check_names(self.resources)

    async def close(self) -> None:
        await self.rewards.close()
        for tool in self.tools.values():
            await tool.close()
        if self._mcp is not None:
            await self._mcp.close()

    def _open_mcp(self) -> "McpTools | None":
        """Return the MCP servers' tools; None if the environment uses no such tool."""
        offers = isinstance(self.make_environment, MakeToolUse) and self.make_environment.offers_mcp
        if not self._spec.tools.mcp or not (offers or self._required - self.tools.keys()):
            return None
        try:
            # Half a second of import time, only for runs with such a server.
            from rollout.neighbours.tools.mcp.server import McpTools
        except ImportError as error:
            raise OperatorError(f"settings: tools.mcp needs the package mcp, which is missing: {error}.") from error
        return McpTools(self._spec.tools.mcp)

    def _render(self, messages: Messages) -> str:
        """Return chat messages in the model's template."""
        return render_prompt(self._tokenizer, with_texts(messages), **self._spec.rollout.chat_template_kwargs)


def _score_request_of(row: Mapping[str, Any]) -> ScoreRequest:
    """Return a data row with a short response, most likely a wrong one."""
    prompt = row["prompt"]
    text = prompt if isinstance(prompt, str) else "\n".join(str(message.get("content")) for message in prompt)
    return ScoreRequest(key="sluice-check", prompt=text, response=" 2", label=row["label"], columns=row["columns"])


def _open_rewards(rewards: RewardsSettings, node: Node, is_given: bool) -> RewardClient | NoRewards:
    """Return the reward services. is_given: the environment returns the reward if there is no endpoint."""
    if rewards.endpoints:
        return RewardClient(rewards.endpoints, rewards.combine)
    if is_given:
        return NoRewards()
    if node.reward_url is None:
        raise OperatorError(
            "settings: rewards.endpoints is empty and this cluster has no bundled reward service. "
            "Name an endpoint, start the cluster with its reward service, or write gives_reward = True in your own "
            "environment if it gives rewards."
        )
    bundled = RewardEndpoint(name=BUNDLED_REWARD, url=HttpUrl(node.reward_url), batch_size=_BUNDLED_BATCH)
    return RewardClient([bundled], rewards.combine, default_token=node.token)
