"""A conversation of three turns that another server can go on with, and who keeps it for that."""

import msgspec

from rollout.environments.base import Resources, Step, Task, Turn
from rollout.episodes.sample import Interrupted
from rollout.episodes.transcript import Transcript


class ThreeTurns:
    """Says "more" twice."""

    stop: tuple[str, ...] = ()

    def __init__(self, resources: Resources) -> None:
        self._turns = 0

    async def reset(self, task: Task) -> str:
        return str(task.prompt)

    async def step(self, turn: Turn) -> Step:
        self._turns += 1
        return Step(" more", is_done=self._turns == 3)

    def snapshot(self) -> int:
        return self._turns

    async def resume(self, snapshot: int) -> None:
        self._turns = snapshot


class Copies:
    """Keeps the conversation after each turn."""

    def __init__(self) -> None:
        self.copies: list[Interrupted] = []

    def keep(self, transcript: Transcript, snapshot: str) -> None:
        copied = msgspec.msgpack.decode(msgspec.msgpack.encode(transcript), type=Transcript)
        self.copies.append(Interrupted(copied, snapshot))

    async def until_kept(self) -> None:
        """It is kept at once."""
