"""Two servers of real vLLM that are pushed to: their processes, the learner's weights, and a look at their tokens."""

import copy
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import Qwen2ForCausalLM

from learner.weights.push import WeightPusher
from tests.chaos.rig.control_line import ControlLine
from tests.chaos.rig.pushed_fleet import DEADLINE_S, FAR, PushedFleet, Seen
from tests.chaos.rig.server_nursery import Fault, Place
from tests.chaos.rig.token_watch import TokenWatch
from tests.chaos.rig.two_hosts import TwoHosts
from tests.chaos.rig.vllm_server import PROMPT, arguments_of
from tests.fakes.ports import free_port
from tests.fakes.tiny_models import make_tiny_model

NAMES = ("server-0", FAR)
STATES = ("join", "prepare", "receive", "commit", "committed", "serve")  # a bucket comes in the engine's own process
_START_S = 300.0
_ENDS_S = 30.0
_STEP = 0.03
_BUCKET_BYTES = 1 << 19
_TOLERANCE = 1e-3  # nats; a step moves most tokens' logprobs by a hundred times as much


class Weights:
    """The learner's weights of each version that was asked for, every one some way from the one before."""

    def __init__(self, model: Path, seed: int) -> None:
        self._model = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._form = copy.deepcopy(self._model)
        self._draw = torch.Generator().manual_seed(seed)
        self._of: dict[int, dict[str, Tensor]] = {}

    def of(self, version: int) -> list[tuple[str, Tensor]]:
        if version not in self._of:
            with torch.no_grad():
                for parameter in self._model.parameters():
                    parameter.add_(_STEP * torch.randn(parameter.shape, generator=self._draw))
            self._of[version] = {name: each.detach().clone() for name, each in self._model.named_parameters()}
        return list(self._of[version].items())

    def logprobs(self, version: int, tokens: list[int]) -> Tensor:
        """Return what a version gives tokens[1:], natural log at temperature 1."""
        with torch.no_grad():
            logits = functional_call(self._form, self._of[version], (torch.tensor([tokens]),)).logits[0, :-1]
        found: Tensor = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        return found


class VersionWatch(TokenWatch):
    """Compares each turn's logprobs with those of the version that is said to have begun it.

    A turn that a push met goes on with what older weights cached: of it the tokens before the push are compared.
    """

    def __init__(self, where: Mapping[str, tuple[str, int]], weights: Weights) -> None:
        self._weights = weights
        super().__init__(where)

    def take(self, name: str, answer: Any) -> None:
        _, end, version = answer["spans"][0]
        expected = self._weights.logprobs(version, PROMPT + answer["tokens"][:end])[len(PROMPT) - 1 :]
        difference = (torch.tensor(answer["logprobs"][:end]) - expected).abs()
        self.num_tokens += end
        self.num_wrong += int((~(difference <= _TOLERANCE)).sum())  # NaN is no match either
        self.newest[name] = answer["spans"][-1][2]


class VllmNursery:
    """Starts servers by name, in processes of their own. start_s: how long each start took, in seconds."""

    def __init__(self, places: dict[str, Place], model: Path, way: str) -> None:
        self.start_s: list[float] = []
        self._places = places
        self._model = model
        self._way = way
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, fault: Fault | None = None) -> None:
        """Start a server, in place of one that is there; returns when it listens."""
        self.begin(name, fault)
        self.await_start(name)

    def begin(self, name: str, fault: Fault | None = None) -> None:
        self._end(name)
        place = self._places[name]
        self._begun = time.monotonic()
        self._processes[name] = subprocess.Popen(
            arguments_of(name, self._model, place.host, place.port, self._way, fault),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "VLLM_HOST_IP": place.host},
            preexec_fn=place.enter,
        )

    def await_start(self, name: str) -> None:
        place, process = self._places[name], self._processes[name]
        while True:
            with suppress(OSError), socket.create_connection((place.host, place.port), timeout=5.0):
                break
            if process.poll() is not None or time.monotonic() - self._begun > _START_S:
                raise RuntimeError(f"{name} did not start")
            time.sleep(0.1)
        self.start_s.append(time.monotonic() - self._begun)

    def go_on(self, name: str) -> None:
        for each in self._family(name):
            each.send_signal(signal.SIGCONT)

    def has_ended_by_itself(self, name: str) -> bool:
        """Return whether a server whose engine died ends within half a minute."""
        with suppress(subprocess.TimeoutExpired):
            self._processes[name].wait(_ENDS_S)
        return self._processes[name].poll() is not None

    def close(self) -> None:
        for name in list(self._processes):
            self._end(name)

    def _family(self, name: str) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            server = psutil.Process(self._processes[name].pid)
            return [server, *server.children(recursive=True)]
        return []

    def _end(self, name: str) -> None:
        if name in self._processes:
            for each in self._family(name):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            self._processes.pop(name).wait()


class VllmFleet(PushedFleet):
    """Two servers, of which the one on the far host, where there is one, may be cut off. way: `vllm_server.WAYS`."""

    def __init__(self, folder: Path, seed: int, hosts: TwoHosts | None, way: str) -> None:
        self.seen, self.version = Seen(), 0
        self.names = NAMES
        self._folder, self._hosts = folder, hosts
        address = hosts.near_address if hosts is not None else "127.0.0.1"
        places = {name: Place(address, free_port()) for name in NAMES}
        if hosts is not None:
            hosts.enter(hosts.near)
            places[FAR] = Place(hosts.far_address, free_port(), lambda: hosts.enter(hosts.far))
        model = make_tiny_model(folder / "model", tied=False, seed=seed)
        self._weights = Weights(model, seed)
        self.nursery = self._nursery = VllmNursery(places, model, way)
        for name in NAMES:
            self.nursery.start(name)
        where = {name: (place.host, place.port) for name, place in places.items()}
        self._lines = {name: ControlLine(name, *where[name]) for name in NAMES}
        self._pusher = WeightPusher(list(self._lines.values()), address, "gloo", DEADLINE_S)
        self.watch = VersionWatch(where, self._weights)

    def _planned_weights(self) -> tuple[list[tuple[str, Tensor]], int]:
        return self._weights.of(self.version), _BUCKET_BYTES

    def _revive(self, victim: str, fault: Fault) -> None:
        if fault.of == "engine" and fault.kind == "killed" and not self.nursery.has_ended_by_itself(victim):
            self.seen.unexpected.append(f"{victim} goes on without its engine")
        super()._revive(victim, fault)


@contextmanager
def vllm_fleet(folder: Path, seed: int, hosts: TwoHosts | None, way: str) -> Iterator[VllmFleet]:
    """Yield a fleet, gone afterwards."""
    fleet = VllmFleet(folder, seed, hosts, way)
    try:
        yield fleet
    finally:
        fleet.close()
