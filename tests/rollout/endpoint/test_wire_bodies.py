"""Bodies that unmodified clients sent, recorded: the turns of the policy are one conversation and are trained.

`wire_bodies.json` holds, by client, what the policy writes, the requests in order, and the number of trained turns.
"{previous}" stands for the id of the response before. smolagents changes turns, so that its last turn alone is trained.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.endpoint.agents_scene import taken

_RECORDED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("wire_bodies.json").read_text())


@pytest.mark.parametrize("client", _RECORDED)
async def test_turns_of_an_unmodified_client_are_trained(client: str) -> None:
    turns = iter(_RECORDED[client]["turns"])
    requests = _RECORDED[client]["requests"]
    async with taken(lambda context: next(turns), max_response_tokens=2000, max_context_tokens=60_000) as (
        scene,
        told,
        _,
    ):
        previous = ""
        for path, body in requests:
            sent = json.dumps(body).replace("{previous}", previous)
            headers = {"Authorization": f"Bearer {told['api_key']}", "Content-Type": "application/json"}
            reply = await scene.http.post(path, content=sent, headers=headers)
            assert reply.status_code == 200, reply.text
            previous = "" if body.get("stream") else reply.json()["id"]
        trajectory = await scene.rewarded(told)
    num_trained = _RECORDED[client]["num_trained"]
    own = [int(t) for t, is_own in zip(trajectory.tokens, trajectory.loss_mask, strict=True) if is_own]
    assert own == [token for _, turn in scene.engine.wrote[-num_trained:] for token in turn]
    assert trajectory.facts.num_turns == num_trained
    assert ("environment/changed_turns" in trajectory.facts.reward_logs) is (num_trained < len(requests))
