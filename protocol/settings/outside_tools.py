"""Tools of the user's own that a policy may call: one behind a URL, and those of an MCP server."""

from typing import Annotated, Any

from pydantic import Field, field_validator

from protocol.settings.section import CountAboveZero, Seconds, Section, ServiceUrl

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
