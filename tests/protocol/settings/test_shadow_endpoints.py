"""Shadow endpoints in the settings: something else scores, and nothing is decided by them."""

from typing import Any

import pytest
from pydantic import ValidationError

from protocol.settings.settings import Settings


def endpoint(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "url": "http://127.0.0.1:1/r", **more}


def test_a_shadow_beside_an_endpoint_that_scores_is_taken() -> None:
    rewards = Settings.model_validate({"rewards": {"endpoints": [endpoint("em"), endpoint("f1", shadow=True)]}}).rewards
    assert [one.name for one in rewards.scoring] == ["em"]


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        (
            {"rewards": {"endpoints": [endpoint("f1", shadow=True)]}},
            "rewards.endpoints holds shadows alone (f1), and none that scores. Set shadow to false for one of them",
        ),
        (
            {
                "rewards": {"endpoints": [endpoint("em"), endpoint("f1", shadow=True)]},
                "filter": {"dynamic_sampling": True, "score": "f1"},
            },
            "filter.score = f1 is none of rewards.endpoints that are no shadows (em). Use one of them",
        ),
        (
            {"rewards": {"combine": "mean", "endpoints": [endpoint("em", weight=0), endpoint("f1", shadow=True)]}},
            "rewards.combine = mean over endpoints whose weights add up to 0. Change a weight, or use sum.",
        ),
    ],
)
def test_settings_in_which_a_shadow_would_decide_are_refused(sections: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(sections)
    assert text in str(caught.value)
