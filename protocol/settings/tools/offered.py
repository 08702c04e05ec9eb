"""Settings of the tools that a policy may call: rollout.environment = tools."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from protocol.settings.section import CountAboveZero, Seconds, Section
from protocol.settings.tools.outside import HttpTool, McpServer

BUNDLED_TOOLS = ("calculator", "python", "search")


class ToolsSettings(Section):
    names: list[str] = Field([], max_length=64, description=f"Tools offered to the policy: {', '.join(BUNDLED_TOOLS)}.")
    http: list[HttpTool] = Field([], max_length=64, description="Tools behind URLs, offered beside these.")
    mcp: list[McpServer] = Field([], max_length=64, description="MCP servers whose tools are offered beside these.")
    call_format: Literal["auto", "hermes", "llama3", "mistral", "qwen3_coder"] = Field(
        "auto", description="How the model writes a call; auto: as its chat template says."
    )
    max_calls_per_turn: CountAboveZero = Field(
        8, le=64, description="Calls of one turn that are run; each one more is refused."
    )

    python_timeout_s: Seconds = Field(10.0, description="Longest run of a program that the policy wrote.")
    python_memory_mb: CountAboveZero = Field(512, ge=64, le=1 << 20, description="Memory of each of its processes.")
    python_unsafe: bool = Field(
        False,
        description="Run the policy's programs without locking them in: with the server's files, network and rights.",
    )
    reward: Literal["none", "steps", "final"] = Field(
        "none", description="Of verl's tools: not used; what calls give is added; what calc_reward says at the end is."
    )

    @field_validator("names")
    @classmethod
    def _check_names(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in BUNDLED_TOOLS:
                raise ValueError(f"{name!r} is no tool. There are: {', '.join(BUNDLED_TOOLS)}")
        if len(set(names)) < len(names):
            raise ValueError("names a tool twice. Name each once")
        return names

    @property
    def is_empty(self) -> bool:
        """True when the policy could call nothing."""
        return not (self.names or self.http or self.mcp)

    @model_validator(mode="after")
    def _check_distinct(self) -> Self:
        """Raise ValueError for two tools of one name; those of MCP servers are not known yet."""
        own = [tool.name for tool in self.http]
        for name in own:
            if name in BUNDLED_TOOLS:
                raise ValueError(f"http names {name!r}, which is a tool of Sluice's own. Give yours another name")
            if own.count(name) > 1:
                raise ValueError(f"http names {name!r} twice. Give each tool a name of its own")
        servers = [server.name for server in self.mcp]
        if twice := [name for name in servers if servers.count(name) > 1]:
            raise ValueError(f"mcp names {twice[0]!r} twice. Give each server a name of its own")
        return self
