"""Settings of the tools: what is refused before anything starts."""

from typing import Any

import pytest
from pydantic import ValidationError

from protocol.settings.settings import Settings
from protocol.settings.tools import BUNDLED_TOOLS
from rollout.neighbours.tools.by_name import TOOLS


def test_settings_know_the_tools_by_name() -> None:
    assert set(BUNDLED_TOOLS) == set(TOOLS)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"rollout": {"environment": "tools"}},
            "rollout.environment = tools, and tools.names is empty: the policy could call nothing. "
            f"Name some of {', '.join(BUNDLED_TOOLS)}, or set rollout.environment to single_turn.",
        ),
        ({"tools": {"names": ["calc"]}}, f"'calc' is no tool. There are: {', '.join(BUNDLED_TOOLS)}"),
        ({"tools": {"names": ["search", "search"]}}, "names a tool twice. Name each once"),
    ],
)
def test_tools_that_cannot_be_offered_are_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Settings(**given)
    assert problem in str(refused.value)
