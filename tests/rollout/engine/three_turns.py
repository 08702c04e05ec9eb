"""A conversation of three turns that another server can resume, and a listener that copies it."""

import msgspec

from rollout.environments.base import Resources, Step, Task, Turn
from rollout.environments.guard import GuardedEnvironment
from rollout.environments.snapshots import resume_from, snapshot_of
from rollout.episodes.transcript import Transcript
from rollout.session.turns_to_keep import InterruptedSample


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
    """Listener that copies the conversation after each turn, or resumes one such copy."""

    def __init__(self, resumes: InterruptedSample | None = None) -> None:
        self.copies: list[InterruptedSample] = []
        self._resumes = resumes

    async def take_up(self, environment: GuardedEnvironment) -> Transcript | None:
        if self._resumes is None:
            return None
        await resume_from(environment, self._resumes.snapshot)
        return self._resumes.transcript

    async def before_step(self) -> None:
        """Nothing to wait for."""

    def on_turn_finished(self, transcript: Transcript, environment: GuardedEnvironment) -> None:
        copied = msgspec.msgpack.decode(msgspec.msgpack.encode(transcript), type=Transcript)
        self.copies.append(InterruptedSample(copied, snapshot_of(environment) or ""))
