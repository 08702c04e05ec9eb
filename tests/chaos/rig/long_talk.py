"""Conversations of many turns, one call of a tool in each, and an engine whose every token says who wrote it.

What a rigged run's servers and learner are made of for `tests.chaos.long_conversations`.
"""

import asyncio
import json
import os
import uuid
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from learner.run.start import RunStart
from protocol.node.home import Keys
from protocol.settings.run_spec import EngineRequest
from protocol.settings.settings import Settings
from protocol.wire.trajectory import Trajectory
from rollout.engine.generation import Generation, Sampling
from rollout.environments.base import Resources, Step, Task, Turn
from rollout.neighbours.node import Node
from rollout.server import RolloutServer
from tests.chaos.rig.processes import ENGINE, CountingLearner, Pace, obey
from tests.fakes.engines import PacedEngine

TALKS = "talks.jsonl"
_NUM_LETTERS = 26


class LongTalk:
    """Calls the tool "count" in each turn. A label that 3 divides is a long conversation's, any other ends at once."""

    stop: tuple[str, ...] = ()
    requires = frozenset({"count"})

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._turn = 0
        self._last = 0
        self._conversation = uuid.uuid4().hex

    async def reset(self, task: Task) -> str:
        self._last = self._resources.max_turns if int(task.label) % 3 == 0 else 1
        return str(task.prompt)

    def snapshot(self) -> list[Any]:
        return [self._conversation, self._turn]

    async def resume(self, snapshot: list[Any]) -> None:
        self._conversation, self._turn = snapshot

    async def step(self, turn: Turn) -> Step:
        if self._turn == self._last:
            return Step(is_done=True, finish="answer")
        self._turn += 1
        arguments = {"conversation": self._conversation, "turn": self._turn, "process": os.getpid()}
        return Step(str(await self._resources.tool("count")(**arguments)))


class SigningEngine(PacedEngine):
    """Token i of a turn is the letter of the version that wrote it, and has the logprob -(i + 1) / 64."""

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        written = await super().generate(prompt_tokens, sampling, request_id)
        tokens = [letter_of(version) for start, end, version in written.version_spans for _ in range(start, end)]
        return Generation(
            tokens=tokens,
            logprobs=[-(place + 1) / 64 for place in range(len(tokens))],
            version_spans=written.version_spans,
            finish_reason="stop",
            stop_string=None,
            text=self.decode(tokens),
        )


def letter_of(version: int) -> int:
    """Return the token that this policy version writes."""
    return ord("A") + version % _NUM_LETTERS


def run_talking_server(pipe: Connection, name: str, node: Node, pace: Pace) -> None:
    """Be a rollout server whose engine signs what it writes."""

    async def start_engine(_: EngineRequest) -> SigningEngine:
        return SigningEngine(pace.seed ^ os.getpid(), pace.token_s, pace.mean_tokens)

    asyncio.run(obey(pipe, RolloutServer(name, ENGINE, start_engine, lambda: node)))


def run_noting_learner(
    pipe: Connection, settings: Settings, start: RunStart, where: tuple[str, int], keys: Keys, pace: Pace
) -> None:
    """Be the only rank, and write each trajectory that it is given into the run's folder."""
    learner = CountingLearner(pipe, settings, start, where, keys)
    with (start.folder / TALKS).open("w", encoding="utf-8") as file:
        taken = learner._client.next_batch

        def noted(*arguments: Any) -> Any:
            answer = taken(*arguments)
            if answer is not None and not isinstance(answer, str):
                for trajectory in answer[1].values():
                    file.write(json.dumps(_told(trajectory)) + "\n")
                file.flush()
            return answer

        learner._client.next_batch = noted  # type: ignore[method-assign]
        pipe.send(("ended", learner.train(pace.step_s)))


def _told(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "spans": [[span.start, span.end, span.version] for span in trajectory.facts.version_spans],
        "turns": trajectory.facts.num_turns,
        "prompt": trajectory.facts.num_prompt_tokens,
        "tokens": trajectory.tokens.tolist(),
        "logprobs": trajectory.behaviour_logprobs.tolist(),
        "mask": trajectory.loss_mask.tolist(),
    }


def read_talks(folder: Path) -> list[dict[str, Any]]:
    """Return what the rank was given."""
    return [json.loads(line) for line in (folder / TALKS).read_text(encoding="utf-8").splitlines()]
