"""The parts of a run as a start and a plan show them."""

from pathlib import Path
from typing import Any

import pytest

from learner.run.parts import describe_parts
from protocol.node.home import ClusterState
from protocol.settings.settings import Settings
from tests.fakes.cluster_state import cluster_state


def cluster(**options: Any) -> ClusterState:
    url = None if options.get("no_reward") else "http://127.0.0.1:8001/"
    return cluster_state(reward_url=url, options=options)


ENDPOINT = {"rewards": {"endpoints": [{"name": "mine", "url": "http://127.0.0.1:9/"}]}}


@pytest.mark.parametrize(
    ("given", "there", "rewards"),
    [
        (
            {},
            cluster(reward_scorer="math_answer"),
            "the cluster's scorer math_answer, because rewards.endpoints is empty",
        ),
        (
            {"rollout": {"environment": "mine.py:Game"}},
            cluster(),
            "the cluster's scorer exact_match, because rewards.endpoints is empty, unless the environment gives them",
        ),
        ({}, cluster(no_reward=True), "the environment, if it has gives_reward = True: rewards.endpoints is empty"),
        ({}, None, "the cluster's reward server (sluice start --reward-scorer), because rewards.endpoints is"),
        ({"rollout": {"environment": "openrlhf_agent:a.py"}}, cluster(), "the environment."),
        ({"rollout": {"environment": "agents"}}, cluster(), "the environment."),
        ({"rollout": {"environment": "agent:a.py:solve"}}, cluster(), "the environment."),
        (
            {"rollout": {"environment": "agents_of_mine:Game"}},
            cluster(),
            "the cluster's scorer exact_match, because rewards.endpoints is empty, unless the environment gives them",
        ),
        (ENDPOINT, cluster(), "mine (http://127.0.0.1:9/)."),
        (
            {**ENDPOINT, "rollout": {"environment": "agent:a.py:solve"}},
            cluster(),
            "mine (http://127.0.0.1:9/), added to the environment's own.",
        ),
    ],
)
def test_source_of_the_rewards_is_named_as_resolved(
    given: dict[str, Any], there: ClusterState | None, rewards: str
) -> None:
    settings = Settings.model_validate({"policy": {"model": "a/b"}, **given})
    model, sampled = describe_parts(settings, there)
    assert model == "Model a/b; recipe grpo: advantage grpo, loss ppo, correction tis."
    environment = settings.rollout.environment
    assert sampled.startswith(f"Environment {environment}; rewards from {rewards}")


@pytest.mark.parametrize(("field", "rewards"), [("gives_reward: bool = True", "the environment."), ("x = 1", "the cl")])
def test_class_that_gives_rewards_is_their_source(tmp_path: Path, field: str, rewards: str) -> None:
    (tmp_path / "mine.py").write_text(f"class Game:\n    {field}\n")
    given = {"policy": {"model": "a/b"}, "rollout": {"environment": f"{tmp_path / 'mine.py'}:Game"}}
    assert f"; rewards from {rewards}" in describe_parts(Settings.model_validate(given), cluster())[1]
