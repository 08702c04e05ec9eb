"""Tools of the user's own that a policy may call: one behind a URL, and those of an MCP server."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from protocol.settings.section import CountAboveZero, Seconds, Section, ServiceUrl, is_secret_name

# What models are taught to write as a tool's name.
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
_Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_HEADERS_ENV = "HTTP header -> environment variable that holds its value."


class HttpTool(Section):
    name: ToolName = Field(description="What the policy calls it.")
    url: ServiceUrl = Field(description="POST address, used exactly as given.")
    description: str = Field(max_length=4000, description="What the policy is told of it.")
    parameters: dict[str, Any] = Field(
        {"type": "object", "properties": {}}, description="JSON schema of its arguments, an object."
    )
    timeout_s: Seconds = Field(30.0, description="Longest wait for one attempt.")
    max_concurrency: CountAboveZero = Field(64, description="Calls in flight from one server.")
    headers_env: dict[str, _Variable] = Field({}, description=_HEADERS_ENV)
    check: dict[str, Any] | None = Field(
        None, description="Arguments of a first call, made at the start; null: it is only looked whether one answers."
    )

    @field_validator("parameters")
    @classmethod
    def _check_parameters(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        properties = parameters.get("properties", {})
        if parameters.get("type") != "object" or not isinstance(properties, dict):
            raise ValueError('is no JSON schema of an object. Expected {"type": "object", "properties": {..}}')
        for name, schema in properties.items():
            if not isinstance(schema, dict):
                raise ValueError(f"has the property {name!r}, which is no schema. Expected one such as {{'type': ..}}")
        required = parameters.get("required", [])
        if not isinstance(required, list) or (unknown := [name for name in required if name not in properties]):
            what = f"requires {unknown[0]!r}, which is none of its properties" if isinstance(required, list) else ""
            raise ValueError(what or "has a `required` that is no list of names")
        return parameters


class McpServer(Section):
    name: ToolName = Field(description="Stands before names of its tools that others have too: NAME.tool.")
    url: ServiceUrl | None = Field(None, description="Where it listens (streamable HTTP); null: it is a command.")
    command: list[str] = Field([], description="Program and arguments by which each rollout server starts it (stdio).")
    folder: str = Field("", description="Working folder of the command; empty: the run command's.")
    env: dict[_Variable, str] = Field({}, description="Environment of the command: variable -> value.")
    env_from: dict[_Variable, _Variable] = Field(
        {}, description="The same for secrets: variable -> environment variable that holds its value."
    )
    headers_env: dict[str, _Variable] = Field({}, description=_HEADERS_ENV)
    tools: list[str] | None = Field(None, description="Which of its tools are offered; null: all.")
    timeout_s: Seconds = Field(60.0, description="Longest call.")
    start_timeout_s: Seconds = Field(60.0, description="Longest start.")
    max_concurrency: CountAboveZero = Field(64, description="Calls in flight from one server.")
    tool_errors: Literal["told", "fail"] = Field(
        "told", description="A result that its tool calls an error: told to the policy, or a failure of the sample."
    )

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
