"""Settings of the tools: what is refused before anything starts."""

from typing import Any

import pytest
from pydantic import ValidationError

from protocol.settings.settings import Settings
from protocol.settings.tools import BUNDLED_TOOLS
from rollout.neighbours.tools.by_name import TOOLS

HTTP = {"name": "weather", "url": "http://a/", "description": "Says how it is."}


def _http(**changes: Any) -> dict[str, Any]:
    return {"tools": {"http": [{**HTTP, **changes}]}}


def _mcp(**settings: Any) -> dict[str, Any]:
    return {"tools": {"mcp": [{"name": "things", **settings}]}}


def test_settings_know_the_tools_by_name() -> None:
    assert set(BUNDLED_TOOLS) == set(TOOLS)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"rollout": {"environment": "tools"}},
            "rollout.environment = tools, and tools.names, http and mcp are empty: the policy could call nothing. "
            f"Name some of {', '.join(BUNDLED_TOOLS)}, or set rollout.environment to single_turn.",
        ),
        ({"tools": {"names": ["calc"]}}, f"'calc' is not a tool. Expected some of: {', '.join(BUNDLED_TOOLS)}"),
        ({"tools": {"names": ["search", "search"]}}, "names a tool twice. Name each once"),
        (_http(name="search"), "http names 'search', which is a tool of Sluice's own. Give yours another name"),
        ({"tools": {"http": [HTTP, HTTP]}}, "http names 'weather' twice. Give each tool a name of its own"),
        (_http(name="a b"), "tools.http.0.name"),
        (_http(url="http://me:secret@a/"), "holds a user or password"),
        (_http(parameters={"type": "string"}), "is not a JSON schema of an object"),
        (_http(parameters={"type": "object", "properties": {"x": 1}}), "has the property 'x', which is not a schema"),
        (_http(parameters={"type": "object", "required": ["y"]}), "requires 'y', which is none of its properties"),
        (_http(headers_env={"X": "a value"}), "tools.http.0.headers_env.X"),
        (_mcp(), "needs a url or a command, and not both"),
        (_mcp(url="http://a/", command=["x"]), "needs a url or a command, and not both"),
        (_mcp(url="http://a/", env={"MODE": "x"}), "has a url, and env, env_from or folder, which are a command's"),
        (_mcp(command=["x"], headers_env={"X": "Y"}), "has a command, and headers_env, which is a url's"),
        (_mcp(command=["x"], env={"API_KEY": "x"}), "holds the secret 'API_KEY', which would be in settings.yaml"),
    ],
)
def test_tools_that_cannot_be_offered_are_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Settings(**given)
    assert problem in str(refused.value)
