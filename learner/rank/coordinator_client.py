"""A learner rank's conversation with the coordinator: one question at a time, every wait with a deadline."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from learner.checkpoint.sealed_files import Tell, quiet
from protocol.errors import FrameError, NeighbourError
from protocol.waits import until
from protocol.wire.channel import DealerChannel
from protocol.wire.codec import Decoder, Limits, encode
from protocol.wire.messages import (
    Batch,
    Done,
    Message,
    NextBatch,
    PushAgain,
    Refusal,
    RunEnd,
    SaveLedger,
    StepEnd,
    ToRank,
    Wait,
)
from protocol.wire.trajectory import Trajectory

_POLL_S = 0.2
# The coordinator is ours and its batches are large: one rank's share of a step, with facts of all its trajectories.
# Every list of ToRank has a type, so that its values need no counting.
_LIMITS = Limits(header_bytes=1 << 28, buffer_bytes=1 << 28, num_buffers=3 << 20, total_bytes=1 << 36, num_values=None)


class _Question(NamedTuple):
    """A question with its number: put again under the same number, it changes nothing."""

    name: str
    request: int
    frames: list[bytes]


@dataclass(frozen=True)
class Patience:
    """How long a rank waits for the coordinator, in seconds."""

    ask_again_s: float = 5.0  # an answer that takes longer has its question put again
    answer_s: float = 60.0  # longest time without an answer to one question; Wait is one
    copy_s: float = 1800.0  # longest time that a copy of the ledger may take


class CoordinatorClient:
    """Every method raises NeighbourError("coordinator") when no answer comes within a minute, or when it refuses.

    Its text names who asked, what, and what the coordinator last answered.
    """

    def __init__(self, channel: DealerChannel, run_id: str, incarnation: int, patience: Patience = Patience()) -> None:
        self._channel = channel
        self._patience = patience
        self._last_answer: tuple[str, float] | None = None  # what, and when in monotonic seconds
        self._stamp: dict[str, Any] = {"run_id": run_id, "incarnation": incarnation}
        self._decoder: Decoder[Message] = Decoder(ToRank, _LIMITS)
        self._num_asked = 0
        self._complaint = ""

    def next_batch(self, step: int, rank: int, timeout_s: float) -> tuple[Batch, dict[int, Trajectory]] | str | None:
        """Return this rank's share of a step with its trajectories by index, or why the run has no such step.

        None: no server holds the current weights; push them and ask again. Every rank is told so, or none.
        Blocks until the coordinator has one, at most timeout_s in which no evaluation is awaited.
        Raises: NeighbourError saying what was waited for.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            answer, buffers = self._ask(NextBatch(**self._stamp, step=step, rank=rank))
            match answer:
                case Batch():
                    return answer, _trajectories(answer, buffers)
                case RunEnd():
                    return answer.detail
                case PushAgain():
                    return None
                case Wait(is_for_evaluation=True):
                    deadline = time.monotonic() + timeout_s
                case Wait() if time.monotonic() > deadline:
                    problem = (
                        f"no batch for step {step} within learner.batch_timeout_s = {timeout_s:g} s: {answer.detail}"
                    )
                    raise NeighbourError("coordinator", problem)

    def stepped(
        self, step: int, policy_version: int, is_applied: bool, detail: str, metrics: Mapping[str, float]
    ) -> None:
        """Tell that a step ended and which policy version the servers hold now."""
        self._tell(
            StepEnd(
                **self._stamp,
                step=step,
                policy_version=policy_version,
                is_applied=is_applied,
                detail=detail[:2000],
                metrics=dict(metrics),
            )
        )

    def save_ledger(self, path: Path, step: int, tell: Tell = quiet) -> None:
        """Have a consistent copy of the ledger written to a path on the coordinator's node.

        Blocks for as long as the coordinator says that it is at it, at most half an hour. tell: takes how long it has
        been at it. Raises: NeighbourError.
        """
        question = self._question(SaveLedger(**self._stamp, path=str(path), step=step))
        started, limit_s = time.monotonic(), self._patience.copy_s
        while isinstance(answer := self._put(question)[0], Wait):
            passed_s = time.monotonic() - started
            if passed_s > limit_s:
                problem = f"had no copy of the ledger for {self._channel.name} within {limit_s:g} s: {answer.detail}"
                raise NeighbourError("coordinator", problem)
            tell(f"waiting {passed_s:.0f} s for the coordinator: {answer.detail}")
            time.sleep(_POLL_S)
        assert isinstance(answer, Done)

    def _tell(self, message: Message) -> None:
        answer, _ = self._ask(message)
        assert isinstance(answer, Done)

    def _ask(self, message: Message) -> tuple[Message, list[bytes]]:
        return self._put(self._question(message))

    def _question(self, message: Message) -> _Question:
        self._num_asked += 1
        frames = encode(msgspec.structs.replace(message, request=self._num_asked))
        return _Question(type(message).__name__, self._num_asked, frames)

    def _put(self, question: _Question) -> tuple[Message, list[bytes]]:
        """Return the answer to a question, which is put again while none comes."""
        limit_s = self._patience.answer_s
        complaint = "could not be reached by"
        for left_s in until(limit_s):
            if not self._channel.try_send(question.frames, left_s):
                continue
            complaint = "did not answer"
            answer = self._answer(question.request, min(left_s, self._patience.ask_again_s))
            if answer is None:
                continue
            self._last_answer = type(answer[0]).__name__, time.monotonic()
            if isinstance(answer[0], Refusal):
                raise NeighbourError("coordinator", f"refused {question.name}: {answer[0].detail}")
            return answer
        problem = f"{complaint} {self._channel.name} for {question.name} within {limit_s:g} s{self._complaint}"
        raise NeighbourError("coordinator", f"{problem}; {self._last_heard()}")

    def _last_heard(self) -> str:
        if self._last_answer is None:
            return "it has answered nothing yet"
        name, at = self._last_answer
        return f"its last answer was {name}, {time.monotonic() - at:.0f} s ago"

    def _answer(self, request: int, timeout_s: float) -> tuple[Message, list[bytes]] | None:
        """Return the answer to this question; None when none came in time. What answers older ones is passed over."""
        for left_s in until(timeout_s):
            frames = self._channel.receive(left_s)
            if frames is None:
                return None
            try:
                answer, buffers = self._decoder.decode(frames)
            except FrameError as error:
                self._complaint = f"; it sent what is no message ({error})"
                continue
            if answer.request == request:
                return answer, buffers
            if isinstance(answer, Refusal):
                self._complaint = f"; it refused: {answer.detail}"
        return None


def _trajectories(batch: Batch, buffers: list[bytes]) -> dict[int, Trajectory]:
    order = [index for part in batch.micro_batches for index in part]
    return {
        index: Trajectory.from_buffers(batch.facts[index], buffers[3 * place : 3 * place + 3])
        for place, index in enumerate(order)
    }
