"""A learner, and rollout servers of real vLLM in processes of their own that load weights wrongly when told to."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from transformers import Qwen2ForCausalLM

from learner.models.policy import PolicyEngine
from learner.rank.push import RankPusher, natural_text
from learner.weights.push import PushReport
from tests.chaos.rig.control_line import HOST, ControlLine, served
from tests.chaos.rig.lying_server import settings_of
from tests.chaos.rig.plain_policy import PlainPolicy
from tests.fakes.ports import free_port
from tests.fakes.waiting import wait_until

_SERVER = "tests.chaos.rig.lying_server"
_JOINED_LIMIT_S = 60.0
_TURN_LIMIT_S = 60.0
Tokens = Counter[tuple[str, int]]  # by (server, policy version)


@dataclass
class LyingPair:
    """The learner and its servers."""

    policy: PlainPolicy
    servers: list[ControlLine]
    pusher: RankPusher
    version: int = 0
    push_s: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})  # looked after, or not

    def push(self, step: float, by: int = 1, *, is_looked_after: bool = True) -> PushReport:
        """Move the weights and push them as the version that is `by` further, to servers that have all joined.

        is_looked_after: False has servers serve what they say that they have, as `weights.probe: false` does.
        """
        self.await_joined()
        self.policy.step(step)
        self.version += by
        tokens, self.pusher._probe.tokens = self.pusher._probe.tokens, []
        if is_looked_after:
            self.pusher._probe.tokens = tokens
        begun = time.perf_counter()
        report = self.pusher.push(self.version)
        self.push_s[is_looked_after].append(time.perf_counter() - begun)
        self.pusher._probe.tokens = tokens
        assert report is not None
        return report

    def lie(self, server: ControlLine, name: str | None) -> None:
        """Have the server load by this lie from now on; None: honestly."""
        self._run(server, "lie", name)

    def counted(self) -> tuple[Tokens, Tokens]:
        """Return the tokens of turns that have ended in an engine, and of those that conversations were given."""
        written: Tokens = Counter()
        finished: Tokens = Counter()
        for server in self.servers:
            counted = self._run(server, "counted")
            for tokens, found in ((written, counted["written"]), (finished, counted["finished"])):
                tokens.update({(server.name, version): number for version, number in found})
        return written, finished

    def await_turns(self) -> None:
        """Return once every server has ended a turn of the newest version. Raises: AssertionError after a minute."""

        def has_each() -> bool:
            finished = self.counted()[1]
            return all(finished[server.name, self.version] for server in self.servers)

        wait_until(has_each, _TURN_LIMIT_S)

    def await_joined(self) -> None:
        """Wait until servers that failed have joined again, as training does without noticing."""
        pusher = self.pusher._pusher
        assert pusher is not None
        end = time.monotonic() + _JOINED_LIMIT_S
        while not all(link.is_joined or link.is_new for link in pusher._links) and time.monotonic() < end:
            pusher._run(pusher._rejoin_failed())
            time.sleep(0.05)

    def _run(self, server: ControlLine, verb: str, *arguments: object) -> dict[str, list[tuple[int, int]]]:
        assert self.pusher._pusher is not None
        return cast(dict[str, list[tuple[int, int]]], self.pusher._pusher._run(server.call(verb, *arguments)))


@contextmanager
def lying_pair(model: Path, num_servers: int, num_workers: int) -> Iterator[LyingPair]:
    """Yield servers of so many tensor-parallel workers each, and their learner; nothing is pushed yet."""
    ports = {f"server-{number}": free_port() for number in range(num_servers)}
    servers = [ControlLine(name, HOST, port) for name, port in ports.items()]
    with served({port: [_SERVER, name, str(model), str(port), str(num_workers)] for name, port in ports.items()}):
        policy = PlainPolicy(Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32))
        settings = settings_of(model, num_workers)
        pusher = RankPusher(cast(PolicyEngine, policy), settings, servers, HOST, "gloo", natural_text(model))
        try:
            yield LyingPair(policy, servers, pusher)
        finally:
            pusher.close()
