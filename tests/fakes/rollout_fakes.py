"""Fakes of the rollout room with the real interfaces: rewards, a coordinator, keys and a run."""

import asyncio
import shutil
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import zmq

from protocol.errors import NeighbourError
from protocol.node.home import Keys
from protocol.settings.rewards import RetrieverSettings, RewardsSettings
from protocol.settings.rollout import RolloutSettings
from protocol.settings.run_spec import RunSpec
from protocol.wire import messages as m
from protocol.wire.channel import KeyPair, RouterChannel
from protocol.wire.codec import Decoder, encode
from rollout.neighbours.reward_client import Score, ScoreRequest
from rollout.session.tokens_to_book import tokens_folder

M = TypeVar("M")


class ScriptedScorer:
    """Gives `reward` to everything under the part "fake", or raises it when it is an error; after `delay_s`."""

    def __init__(self, reward: float | NeighbourError = 1.0) -> None:
        self.reward = reward
        self.delay_s = 0.0
        self.is_accepting = True
        self.requests: list[ScoreRequest] = []

    async def score(self, request: ScoreRequest) -> Score:
        self.requests.append(request)
        await asyncio.sleep(self.delay_s)
        if isinstance(self.reward, NeighbourError):
            raise self.reward
        return Score(self.reward, {"fake": self.reward})


class ScriptedCoordinator:
    """A real ROUTER socket with real keys; the test says what it answers. One peer.

    keeps_turns: whether it answers turns, as a coordinator that keeps them all does.
    """

    def __init__(self, keys: Keys, incarnation: int = 1, keeps_turns: bool = True) -> None:
        self._channel = RouterChannel("127.0.0.1", keys.coordinator, allowed=[keys.peer.public])
        self.address = self._channel.address
        self.stamp = {"run_id": "run", "incarnation": incarnation}
        self.received: list[m.Message] = []
        self.buffers: list[list[bytes]] = []
        self._keeps_turns = keeps_turns
        self._decoder: Decoder[m.Message] = Decoder(m.ToCoordinator)
        self._peer = b""

    async def next(self, kind: type[M], timeout_s: float = 20.0) -> M:
        """Return the next message of this kind and of the start that `stamp` names.

        What comes before it is noted in `received`: other kinds, and what an earlier start's session had still to say.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            arrived = self._channel.receive(0.0)
            if arrived is None:
                await asyncio.sleep(0.002)
                continue
            self._peer, frames = arrived
            message, buffers = self._decoder.decode(frames)
            self.received.append(message)
            self.buffers.append(buffers)
            if self._keeps_turns and isinstance(message, m.TurnsDone):
                self.tell_kept(message)
            if isinstance(message, kind) and (message.run_id, message.incarnation) == tuple(self.stamp.values()):
                return message
        raise TimeoutError(f"no {kind.__name__} within {timeout_s} s, got {self.received}")

    async def welcome(self, kind: type[m.Hello] = m.Hello) -> m.Hello:
        """Take the Hello and answer it."""
        hello = await self.next(kind)
        self.send(m.Done(**self.stamp))
        return hello

    def send(self, message: m.Message, buffers: Sequence[bytes] = ()) -> None:
        assert self._channel.send(self._peer, encode(message, buffers))

    def tell_kept(self, message: m.TurnsDone, is_yours: bool = True, num_tokens: int | None = None) -> None:
        """Answer turns. num_tokens: of each sample that are kept; None: all."""
        samples = [
            m.KeptSample(p.group, p.sample_index, p.attempt, p.end if num_tokens is None else num_tokens, is_yours)
            for p in message.parts
        ]
        self.send(m.TurnsKept(**self.stamp, samples=samples))

    def lease(self, group: str, num_samples: int = 1, buffers: Sequence[bytes] = (), **changes: Any) -> m.Lease:
        """Send and return a lease. buffers: of the samples that it goes on with."""
        values = {
            "group": group,
            "attempt": 1,
            "kind": "train",
            "prompt": "2+2=",
            "label": "4",
            "columns": {},
            "sample_indices": list(range(num_samples)),
            "greedy_indices": [],
            "number": 1,
            "seed": 7,
        }
        lease = m.Lease(**self.stamp, **{**values, **changes})
        self.send(lease, buffers)
        return lease

    def acknowledge(self, group: str, sample_index: int, outcome: str) -> None:
        self.send(m.Ack(**self.stamp, group=group, sample_index=sample_index, outcome=outcome))  # type: ignore[arg-type]

    def close(self) -> None:
        self._channel.close(linger_s=0.0)


def drop_counts() -> None:
    """Remove the counts of sessions that ended without closing: a later test's session would send them."""
    shutil.rmtree(tokens_folder("run"), ignore_errors=True)


def make_keys() -> Keys:
    """Return new CURVE keys."""
    return Keys(KeyPair(*zmq.curve_keypair()), KeyPair(*zmq.curve_keypair()))


def make_spec(address: str = "tcp://127.0.0.1:1", incarnation: int = 1, **rollout: Any) -> RunSpec:
    """Return a run with short limits; changes go into its rollout settings."""
    settings = {"max_response_tokens": 32, "max_context_tokens": 256, "max_observation_tokens": 96, **rollout}
    return RunSpec(
        run_id="run",
        incarnation=incarnation,
        coordinator_address=address,
        seed=7,
        rollout=RolloutSettings(**settings),
        retriever=RetrieverSettings(),
        rewards=RewardsSettings(),
    )
