"""Settings of the tools that a policy may call, for rollout.environment = tools: bundled, HTTP and MCP tools."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from protocol.settings.paths import absolute_path
from protocol.settings.section import CountAboveZero, Seconds, Section, ServiceUrl, is_secret_name

BUNDLED_TOOLS = ("calculator", "python", "search")

# Models are trained to write such names.
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
_Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_HEADERS_ENV = "HTTP header -> environment variable that holds its value."


class HttpTool(Section):
    name: ToolName = Field(description="Tool name in the policy's calls.")
    url: ServiceUrl = Field(description="POST address, used exactly as given.")
    description: str = Field(max_length=4000, description="Description in the policy's prompt.")
    parameters: dict[str, Any] = Field(
        {"type": "object", "properties": {}}, description="JSON schema of its arguments, an object."
    )
    timeout_s: Seconds = Field(30.0, description="Longest wait for one request.")
    max_concurrency: CountAboveZero = Field(64, description="Calls in flight from one server.")
    headers_env: dict[str, _Variable] = Field({}, description=_HEADERS_ENV)
    check: dict[str, Any] | None = Field(
        None, description="Arguments of a test call at the run's start; null: only the connection is tested."
    )

    @field_validator("parameters")
    @classmethod
    def _check_parameters(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        properties = parameters.get("properties", {})
        if parameters.get("type") != "object" or not isinstance(properties, dict):
            raise ValueError('is not a JSON schema of an object. Expected {"type": "object", "properties": {..}}')
        for name, schema in properties.items():
            if not isinstance(schema, dict):
                raise ValueError(
                    f"has the property {name!r}, which is not a schema. Expected one such as {{'type': ..}}"
                )
        required = parameters.get("required", [])
        if not isinstance(required, list):
            raise ValueError("has a `required` that is not a list of names")
        if unknown := [name for name in required if name not in properties]:
            raise ValueError(f"requires {unknown[0]!r}, which is none of its properties")
        return parameters


class McpServer(Section):
    name: ToolName = Field(description="Prefix of tool names that other servers have too: NAME.tool.")
    url: ServiceUrl | None = Field(None, description="Address (streamable HTTP); null: the server is a command.")
    command: list[str] = Field([], description="Program and arguments; each rollout server starts its own (stdio).")
    folder: str = Field(
        "", validate_default=True, description="Working folder of the command; empty: the run command's."
    )
    env: dict[_Variable, str] = Field({}, description="Environment of the command: variable -> value.")
    env_from: dict[_Variable, _Variable] = Field(
        {}, description="Secrets in that environment: variable -> environment variable that holds the value."
    )
    headers_env: dict[str, _Variable] = Field({}, description=_HEADERS_ENV)
    tools: list[str] | None = Field(None, description="Tools to offer; null: all of the server's.")
    timeout_s: Seconds = Field(60.0, description="Longest call.")
    start_timeout_s: Seconds = Field(60.0, description="Longest start.")
    max_concurrency: CountAboveZero = Field(64, description="Calls in flight from one server.")
    tool_errors: Literal["told", "fail"] = Field(
        "told", description="A result marked as an error: told passes it to the policy; fail fails the sample."
    )

    @field_validator("folder")
    @classmethod
    def _make_absolute(cls, folder: str, info: ValidationInfo) -> str:
        is_loading = (info.context or {}).get("folder") is not None
        return absolute_path(folder or ".", info) if is_loading and info.data.get("command") else folder

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if is_secret_name(name):
                raise ValueError(f"holds the secret {name!r}, which would be in settings.yaml and logs. Use env_from.")
        return env

    @model_validator(mode="after")
    def _check_one_way(self) -> Self:
        if (self.url is None) == (not self.command):
            raise ValueError("needs a url or a command, and not both")
        if self.url is not None and (self.env or self.env_from or self.folder):
            raise ValueError("has a url, and env, env_from or folder, which are a command's")
        if self.url is None and self.headers_env:
            raise ValueError("has a command, and headers_env, which is a url's")
        return self


class ToolsSettings(Section):
    names: list[str] = Field([], max_length=64, description=f"Tools offered to the policy: {', '.join(BUNDLED_TOOLS)}.")
    http: list[HttpTool] = Field([], max_length=64, description="HTTP tools, offered in addition.")
    mcp: list[McpServer] = Field([], max_length=64, description="MCP servers; their tools are offered in addition.")
    call_format: str = Field(
        "auto",
        pattern=r"^[a-z0-9_-]+$",
        max_length=40,
        description="Format of calls: name of a vLLM tool parser, such as hermes, qwen3_coder, llama3_json or mistral; "
        "auto: the first parser that reads a call of the chat template.",
    )
    max_calls_per_turn: CountAboveZero = Field(
        8, le=64, description="Calls executed in one turn; further ones are refused."
    )

    python_timeout_s: Seconds = Field(10.0, description="Longest run of a policy's program.")
    python_memory_mb: CountAboveZero = Field(512, ge=64, le=1 << 20, description="Memory of each of its processes.")
    python_unsafe: bool = Field(
        False,
        description="Run the policy's programs without a sandbox: with the server's files, network and rights.",
    )
    reward: Literal["none", "steps", "final"] = Field(
        "none",
        description="verl tools' rewards: none: ignored; steps: sum over calls; final: calc_reward's value.",
    )

    @field_validator("names")
    @classmethod
    def _check_names(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in BUNDLED_TOOLS:
                raise ValueError(f"{name!r} is not a tool. Expected some of: {', '.join(BUNDLED_TOOLS)}")
        if len(set(names)) < len(names):
            raise ValueError("names a tool twice. Name each once")
        return names

    @property
    def is_empty(self) -> bool:
        """True when no tool is offered."""
        return not (self.names or self.http or self.mcp)

    @model_validator(mode="after")
    def _check_distinct(self) -> Self:
        """Raise ValueError for two tools of one name. The tools of MCP servers are not known yet."""
        own = [tool.name for tool in self.http]
        for name in own:
            if name in BUNDLED_TOOLS:
                raise ValueError(f"tools.http names {name!r}, which is a tool of Sluice's own. Give yours another name")
            if own.count(name) > 1:
                raise ValueError(f"tools.http names {name!r} twice. Give each tool a name of its own")
        servers = [server.name for server in self.mcp]
        if twice := [name for name in servers if servers.count(name) > 1]:
            raise ValueError(f"tools.mcp names {twice[0]!r} twice. Give each server a name of its own")
        return self
