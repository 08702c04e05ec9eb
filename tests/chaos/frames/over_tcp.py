"""The part of `frame_fuzz` over real encrypted sockets: a stranger in the house, while a run does its work.

A holder answers its leases with valid trajectories and keeps the last sample of each back. A fuzzing peer, whose key is
allowed, sends damaged trajectories for that sample and other damaged messages; each must be answered by a refusal. Then
the holder delivers the sample, which must be accepted, and a rank trains the group.
"""

import threading
import time
from collections import deque
from pathlib import Path
from random import Random
from typing import Any

import zmq

from learner.rank.coordinator_client import CoordinatorClient
from protocol.wire import messages as m
from protocol.wire.channel import DealerChannel
from protocol.wire.codec import Decoder, encode
from protocol.wire.trajectory import Trajectory
from tests.chaos.frames.mutations import Frames, mutate, other_frames, random_trajectory, trajectory_frames
from tests.chaos.frames.oracle import is_valid
from tests.chaos.frames.verdicts import Verdicts
from tests.fakes.running_coordinator import RUN_ID, STAMP, RunningCoordinator, running_coordinator

_BURST = 100
_ANSWER_S = 60.0
_SETTINGS: dict[str, dict[str, Any]] = {
    "run": {"max_steps": 1_000_000},
    "rollout": {"group_size": 4},
    "learner": {"groups_per_step": 2, "num_ranks": 1, "max_staleness": 1},
}


def fuzz_over_tcp(folder: Path, num_frames: int, random: Random) -> Verdicts:
    """Return how a running coordinator judged num_frames damaged messages and the valid trajectories between them.

    Raises: TimeoutError when an answer is missing, and whatever ended the coordinator's loop.
    """
    verdicts = Verdicts()
    with running_coordinator(folder, _SETTINGS) as run, zmq.Context() as context:
        rank = Rank(run)
        holder = Holder(run.place.connect(context, "s1"), rank, random, verdicts)
        fuzzer = Fuzzer(run.place.connect(context, "fuzz"), random, verdicts)
        try:
            while verdicts.num_damaged < num_frames:
                holder.await_lease()
                fuzzer.send_burst(holder.kept_back)
                holder.deliver()
            holder.await_answers()
        finally:
            holder.socket.close()
            fuzzer.socket.close()
            rank.close()
        print(
            f"{rank.version} steps were trained meanwhile; counted by the coordinator: {dict(run.coordinator.counts)}"
        )
    return verdicts


class Rank:
    """Rank 0, without a model: takes every batch, checks that it is whole, and tells of the step."""

    def __init__(self, run: RunningCoordinator) -> None:
        self.version = 0
        self._run = run
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def close(self) -> None:
        self._run.loop.submit(lambda coordinator: coordinator.stop_after_step("the fuzzing is over"))
        self._thread.join(_ANSWER_S)

    def _train(self) -> None:
        place = self._run.place
        channel = DealerChannel(place.address, "rank-0", place.peer_keys, place.coordinator_key)
        client = CoordinatorClient(channel, RUN_ID, 1)
        while not isinstance(client.next_batch(self.version + 1, 0, timeout_s=600.0), str):
            self.version += 1
            client.report_step(self.version, self.version, True, "", {})
        channel.close()


class Holder:
    """The rollout server of the run. kept_back: the sample that it has not delivered yet of its oldest lease."""

    def __init__(self, socket: "zmq.Socket[Any]", rank: Rank, random: Random, verdicts: Verdicts) -> None:
        self.socket = socket
        self._rank = rank
        self._random = random
        self._verdicts = verdicts
        self._decoder: Decoder[m.Message] = Decoder(m.ToServer)
        self._kept_back: deque[Trajectory] = deque()
        self._sent: dict[tuple[str, int], Frames] = {}
        socket.send_multipart(encode(m.Hello(**STAMP, server="s1", policy_version=0)))

    @property
    def kept_back(self) -> Trajectory:
        return self._kept_back[0]

    def await_lease(self) -> None:
        """Return when a sample is kept back."""
        deadline = time.monotonic() + _ANSWER_S
        while not self._kept_back:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the holder got no lease within {_ANSWER_S:g} s")
            demand = m.Demand(**STAMP, num_groups=2, policy_version=self._rank.version, heard_of_lease=0, leases={})
            self.socket.send_multipart(encode(demand))
            self._receive(wait_ms=20)

    def deliver(self) -> None:
        """Send the sample that was kept back, and note what earlier ones were answered."""
        self._send(self._kept_back.popleft())
        self._receive(wait_ms=0)

    def await_answers(self) -> None:
        deadline = time.monotonic() + _ANSWER_S
        while self._sent:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self._sent)} valid trajectories were not answered within {_ANSWER_S:g} s")
            self._receive(wait_ms=20)

    def _receive(self, wait_ms: int) -> None:
        while self.socket.poll(wait_ms):
            wait_ms = 0
            message, _ = self._decoder.decode(self.socket.recv_multipart())
            if isinstance(message, m.Ack):
                frames = self._sent.pop((message.group, message.sample_index))
                reason = None if message.outcome == "accepted" else f"{message.outcome}: {message.detail}"
                self._verdicts.note(frames, True, False, reason)
            elif isinstance(message, m.Lease):
                self._answer(message)

    def _answer(self, lease: m.Lease) -> None:
        version = self._rank.version
        samples = [
            random_trajectory(
                self._random, version, group=lease.group, sample_index=index, attempt=lease.attempt, server="s1"
            )
            for index in lease.sample_indices
        ]
        for sample in samples[:-1]:
            self._send(sample)
        self._kept_back.append(samples[-1])

    def _send(self, trajectory: Trajectory) -> None:
        facts = trajectory.facts
        frames = trajectory_frames(trajectory)
        self._sent[facts.group, facts.sample_index] = frames
        self.socket.send_multipart(frames)


class Fuzzer:
    """A peer with an allowed key that sends nothing valid."""

    def __init__(self, socket: "zmq.Socket[Any]", random: Random, verdicts: Verdicts) -> None:
        self.socket = socket
        self._random = random
        self._verdicts = verdicts
        self._decoder: Decoder[m.Message] = Decoder(m.ToServer)

    def send_burst(self, wanted: Trajectory) -> None:
        """Send damaged messages, most of them trajectories for the wanted sample, and note each one's answer."""
        facts = wanted.facts
        sent = []
        originals = [other_frames(self._random), other_frames(self._random)]
        for _ in range(6):
            trajectory = random_trajectory(
                self._random,
                facts.oldest_version,
                group=facts.group,
                sample_index=facts.sample_index,
                attempt=facts.attempt,
                server="fuzz",
            )
            originals.append(trajectory_frames(trajectory))
        while len(sent) < _BURST:
            original = self._random.choice(originals)
            frames, is_sealed = mutate(original, self._random)
            if not frames or frames == original or (is_sealed and is_valid(frames[0], frames[1:-1])):
                continue
            self.socket.send_multipart(frames)
            sent.append(frames)
        for frames in sent:
            self._verdicts.note(frames, False, True, _refusal(self._receive(frames)))

    def _receive(self, frames: Frames) -> m.Message:
        """Return the answer to frames; answers come in the order of what they answer."""
        while self.socket.poll(int(_ANSWER_S * 1000)):
            answer, _ = self._decoder.decode(self.socket.recv_multipart())
            if not isinstance(answer, m.Ping):
                return answer
        raise TimeoutError(f"no answer within {_ANSWER_S:g} s to {[frame[:2000].hex() for frame in frames]}")


def _refusal(answer: m.Message) -> str | None:
    if isinstance(answer, m.Refusal):
        return "refused"
    is_refused = isinstance(answer, m.Ack) and answer.outcome in ("rejected", "refused", "unknown", "returned")
    return answer.outcome if isinstance(answer, m.Ack) and is_refused else None
