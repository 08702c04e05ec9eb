"""A learner rank's calls to the coordinator: one at a time, each with a deadline."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from learner.checkpoint.sealed_files import Report, no_report
from protocol.errors import FrameError, NeighbourError
from protocol.waits import until
from protocol.wire.channel import DealerChannel
from protocol.wire.codec import Decoder, Limits, encode
from protocol.wire.conversation import split_buffers
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
from protocol.wire.trajectory import Trajectory, decode_facts

_POLL_S = 0.2
# Batches are large: one rank's share of a step, with facts of all its trajectories. Every list of ToRank has a type, so
# its values need no limit.
BATCH_LIMITS = Limits(header_bytes=1 << 28, buffer_bytes=1 << 28, num_buffers=3 << 20, total_bytes=1 << 36)


class _Request(NamedTuple):
    """A request with its number. Sending it again under the same number changes nothing."""

    name: str
    number: int
    frames: list[bytes]


@dataclass(frozen=True)
class Patience:
    """How long a rank waits for the coordinator, in seconds."""

    retry_s: float = 5.0  # time after which a request is sent again
    answer_s: float = 60.0  # longest time without an answer to one request; Wait is an answer
    copy_s: float = 1800.0  # longest time of a copy of the ledger


class CoordinatorClient:
    """Every method raises NeighbourError("coordinator") when no answer comes within a minute, or an unfit one.

    The error names the rank, the request and the coordinator's last answer.
    """

    def __init__(self, channel: DealerChannel, run_id: str, incarnation: int, patience: Patience = Patience()) -> None:
        self._channel = channel
        self._patience = patience
        self._last_answer: tuple[str, float] | None = None  # its type, and its time in monotonic seconds
        self._stamp: dict[str, Any] = {"run_id": run_id, "incarnation": incarnation}
        self._decoder: Decoder[Message] = Decoder(ToRank, BATCH_LIMITS)
        self._num_requests = 0
        self._complaint = ""  # problem with an answer since the current request was sent

    def next_batch(
        self, step: int, rank: int, timeout_s: float, waited_s: float = 0.0, part: int | UnsetType = UNSET
    ) -> tuple[Batch, dict[int, Trajectory]] | str | None:
        """Return this rank's share of a step with its trajectories by index, or the reason why the run ends.

        part: number of the part, from 0, if the step may come in parts.

        None: no server holds the current weights; push them and call again. All ranks get None, or none does.
        Blocks at most timeout_s, not counting evaluations. waited_s: part of it that earlier calls took.
        Raises: NeighbourError naming the reason of the wait.
        """
        deadline = time.monotonic() + timeout_s - waited_s
        while True:
            answer, buffers = self._call(NextBatch(**self._stamp, step=step, rank=rank, part=part))
            match answer:
                case Batch():
                    return open_batch(answer, buffers)
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
                case Wait():
                    continue
                case _:
                    raise _unexpected("NextBatch", answer)

    def report_step(
        self, step: int, policy_version: int, is_applied: bool, detail: str, metrics: Mapping[str, float]
    ) -> None:
        """Report the end of a step, and the policy version that the servers hold now."""
        self._send(
            StepEnd(
                **self._stamp,
                step=step,
                policy_version=policy_version,
                is_applied=is_applied,
                detail=detail[:2000],
                metrics=dict(metrics),
            )
        )

    def save_ledger(self, path: Path, step: int, report: Report = no_report) -> None:
        """Write a consistent copy of the ledger to a path on the coordinator's node.

        Blocks while the coordinator reports that it copies, at most half an hour. report: takes the progress.
        Raises: NeighbourError.
        """
        request = self._request(SaveLedger(**self._stamp, path=str(path), step=step))
        started, limit_s = time.monotonic(), self._patience.copy_s
        while isinstance(answer := self._wait_for(request)[0], Wait):
            passed_s = time.monotonic() - started
            if passed_s > limit_s:
                problem = f"made no copy of the ledger for {self._channel.name} within {limit_s:g} s: {answer.detail}"
                raise NeighbourError("coordinator", problem)
            report(f"waiting {passed_s:.0f} s for the coordinator: {answer.detail}")
            time.sleep(_POLL_S)
        if not isinstance(answer, Done):
            raise _unexpected(request.name, answer)

    def _send(self, message: Message) -> None:
        answer, _ = self._call(message)
        if not isinstance(answer, Done):
            raise _unexpected(type(message).__name__, answer)

    def _call(self, message: Message) -> tuple[Message, list[bytes]]:
        return self._wait_for(self._request(message))

    def _request(self, message: Message) -> _Request:
        self._num_requests += 1
        frames = encode(msgspec.structs.replace(message, request=self._num_requests))
        return _Request(type(message).__name__, self._num_requests, frames)

    def _wait_for(self, request: _Request) -> tuple[Message, list[bytes]]:
        """Return the answer to a request, which is sent again while no answer comes."""
        limit_s = self._patience.answer_s
        complaint, self._complaint = "could not be reached by", ""
        for left_s in until(limit_s):
            if not self._channel.try_send(request.frames, left_s):
                continue
            complaint = "did not answer"
            answer = self._receive(request.number, min(left_s, self._patience.retry_s))
            if answer is None:
                continue
            self._last_answer = type(answer[0]).__name__, time.monotonic()
            if isinstance(answer[0], Refusal):
                raise NeighbourError("coordinator", f"refused {request.name}: {answer[0].detail}")
            return answer
        problem = f"{complaint} {self._channel.name} for {request.name} within {limit_s:g} s{self._complaint}"
        raise NeighbourError("coordinator", f"{problem}; {self._describe_last_answer()}")

    def _describe_last_answer(self) -> str:
        if self._last_answer is None:
            return "it has not answered yet"
        name, at = self._last_answer
        return f"its last answer was {name}, {time.monotonic() - at:.0f} s ago"

    def _receive(self, number: int, timeout_s: float) -> tuple[Message, list[bytes]] | None:
        """Return the answer to the request of this number; None after timeout_s. Other answers are dropped."""
        for left_s in until(timeout_s):
            frames = self._channel.receive(left_s)
            if frames is None:
                return None
            try:
                answer, buffers = self._decoder.decode(frames)
            except FrameError as error:
                self._complaint = f"; it sent an invalid message ({error})"
                continue
            if answer.request == number:
                return answer, buffers
            if isinstance(answer, Refusal):
                self._complaint = f"; it refused: {answer.detail}"
        return None


def _unexpected(request: str, answer: Message) -> NeighbourError:
    return NeighbourError("coordinator", f"answered {request} with {type(answer).__name__}")


def open_batch(batch: Batch, buffers: list[bytes]) -> tuple[Batch, dict[int, Trajectory]]:
    """Return a batch with its facts, and a rank's trajectories by index into them. buffers: of the batch's message.

    Raises: FrameError for facts or arrays that are not those of the batch.
    """
    if batch.is_joined is True:
        facts, *buffers = buffers
        batch = msgspec.structs.replace(batch, facts=decode_facts(facts))
    trajectories = {}
    for place, piece in enumerate(batch.pieces):
        arrays = split_buffers([batch.facts[index] for index in piece], buffers[3 * place : 3 * place + 3], "$.facts")
        for index, of_one in zip(piece, arrays, strict=True):
            trajectories[index] = Trajectory.from_buffers(batch.facts[index], of_one)
    return batch, trajectories
