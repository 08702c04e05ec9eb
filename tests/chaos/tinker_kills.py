"""SIGKILL to `sluice tinker` and restarts of its client: the trained weights have the bits of an undisturbed run.

    python -m tests.chaos.tinker_kills [--seed N] [--kills 20] [--steps 120] [--short]

A scripted client creates a model, and sends two passes and an optimizer step for each step, and a save_state for each
fifth, over HTTP. A killer ends the service at places spread over the script, and starts it again. The client asks again
after a lost connection. At every third kill the client dies too: the next one knows nothing, and sends all requests
from the first one.

holds: every request has a result, weights and moments equal those of a run without kills bit for bit, and so does each
saved state (differing=0). --short: 3 kills, 12 steps.
"""

import contextlib
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from safetensors.torch import load_file

from deploy.tinker.command import main as serve
from deploy.tinker.wire import MESSAGES
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.ports import free_port
from tests.fakes.tiny_models import make_tiny_model
from tests.fakes.warm_process import WarmCommand

MODEL = "script:train:0"
_PAUSE_S = 0.1
_SERVE = "serve"  # first argument of a copy of this module that is the service
Body = bytes | dict[str, object]


class ClientDeath(Exception):
    """The killer ended the client too."""


def script(num_steps: int) -> list[tuple[str, Body]]:
    """Return the client's requests in order: (verb, body)."""
    lora = {"rank": 8, "seed": 5}
    create = {"session_id": "script", "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
    requests: list[tuple[str, Body]] = [("create_model", create)]
    rows = random.Random(7)  # the same in every run
    for step in range(num_steps):
        for _ in range(2):
            tokens = [rows.randrange(6, 260) for _ in range(24)]
            requests.append(("forward_backward", pass_of(tokens, len(requests))))
        adam = {"learning_rate": 0.003, "weight_decay": 0.01, "grad_clip_norm": 5.0}
        requests.append(("optim_step", {"model_id": MODEL, "seq_id": len(requests), "adam_params": adam}))
        if step % 5 == 4:
            requests.append(("save_weights", {"model_id": MODEL, "seq_id": len(requests), "path": f"step-{step}"}))
    return requests


def pass_of(tokens: Sequence[int], seq: int) -> bytes:
    """Return the body of a pass that teaches these tokens."""
    message = MESSAGES["Request"](model_id=MODEL, seq_id=seq, loss_fn="cross_entropy")
    made = message.data.add()
    made.chunks.add().text.tokens = np.asarray(tokens[:-1], np.int32).tobytes()
    targets = made.inputs["target_tokens"]
    targets.dense, targets.dtype = np.asarray(tokens[1:], np.int64).tobytes(), 2
    targets.shape.append(len(tokens) - 1)
    body: bytes = message.SerializeToString()
    return body


class Service:
    """The service's process on one port. Its killer is a thread."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.port, self.num_kills = free_port(), 0
        self._arguments = (_SERVE, str(model), "--name", "tiny", "--folder", str(folder), "--port", str(self.port))
        self.start()

    def start(self) -> None:
        self.process = WarmCommand("tests.chaos.tinker_kills", *self._arguments)
        while not self._is_up():
            assert self.process.returncode is None, self.process.communicate()[1]
            time.sleep(_PAUSE_S)

    def _is_up(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{self.port}/health").is_success
        return False

    def kill_often(self, number: int, rng: random.Random, progress: "Progress", on_kill: "threading.Event") -> None:
        """Kill and start the process, `number` times, evenly over the script; on_kill is set at every third kill."""
        for kill in range(number):
            place = (kill + rng.random()) / number
            while progress.share < place:
                time.sleep(rng.uniform(0.0, 0.02))
            self.process.kill()
            if kill % 3 == 2:
                on_kill.set()
            self.num_kills += 1
            self.start()


class Progress:
    """How far the script is."""

    share = 0.0  # 1: all requests but the last one have a result


class Client:
    """Sends a script, in order, until every request has a result."""

    def __init__(self, port: int, progress: Progress, death: threading.Event) -> None:
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1/", timeout=60)
        self._progress, self._death = progress, death

    def play(self, requests: Sequence[tuple[str, Body]], until: threading.Event) -> None:
        """Send the requests. until: the last step waits for it, so that every kill meets a client at work."""
        for place, (verb, body) in enumerate(requests):
            self._progress.share = max(self._progress.share, place / (len(requests) - 1))
            if place == len(requests) - 1:
                self._wait_for(until)
            name = str(self._post(verb, body)["request_id"])
            if verb != "forward_backward":
                self._result(name)

    def _wait_for(self, until: threading.Event) -> None:
        while not until.wait(_PAUSE_S):
            self._check()

    def _result(self, name: str) -> None:
        while True:
            answer = self._post("retrieve_future", {"request_id": name})
            assert "error" not in answer, answer
            if answer.get("type") != "try_again":
                return

    def _post(self, path: str, body: Body) -> dict[str, object]:
        while True:
            self._check()
            try:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                answer = self._http.post(path, content=content)
            except httpx.TransportError:
                time.sleep(_PAUSE_S)
                continue
            answer.raise_for_status()
            read: dict[str, object] = answer.json()
            return read

    def _check(self) -> None:
        if self._death.is_set():
            self._death.clear()
            raise ClientDeath


def train(model: Path, folder: Path, num_steps: int, num_kills: int, seed: int) -> tuple[int, int]:
    """Return (kills of the service, deaths of the client) of one run of the script."""
    requests, deaths, progress = script(num_steps), 0, Progress()
    death, done = threading.Event(), threading.Event()
    with running(model, folder) as service:

        def kill() -> None:
            try:
                service.kill_often(num_kills, random.Random(seed), progress, death)
            finally:
                done.set()

        killer = threading.Thread(target=kill)
        killer.start()
        while True:
            try:
                Client(service.port, progress, death).play(requests, done)
                break
            except ClientDeath:
                deaths += 1
        killer.join()
        return service.num_kills, deaths


@contextmanager
def running(model: Path, folder: Path) -> Iterator[Service]:
    service = Service(model, folder)
    try:
        yield service
    finally:
        service.process.kill()


def num_differing(one: Path, other: Path) -> int:
    """Return how many tensors differ, or exist in one folder only."""
    tables = []
    for folder in (one, other):
        files = [*(folder / "weights").glob("*.safetensors"), *(folder / "states").rglob("*.safetensors")]
        tables.append({f"{path.name}/{key}": value for path in files for key, value in load_file(path).items()})
    both = tables[0].keys() & tables[1].keys()
    return len(tables[0].keys() ^ tables[1].keys()) + sum(not tables[0][name].equal(tables[1][name]) for name in both)


def main() -> int:
    if sys.argv[1:2] == [_SERVE]:
        return serve(sys.argv[2:])
    given = options(__doc__ or "", kills=20, steps=120)
    kills, steps = (3, 12) if given.short else (given.kills, given.steps)
    with tempfile.TemporaryDirectory(prefix="sluice-tinker") as name:
        root = Path(name)
        model = make_tiny_model(root / "model", tied=True, hidden_size=64)
        train(model, root / "plain", steps, 0, given.seed)
        killed, deaths = train(model, root / "killed", steps, kills, given.seed)
        differing = num_differing(root / "plain", root / "killed")
    figures = {"steps": steps, "killed_service": killed, "killed_client": deaths, "differing": differing}
    return conclude("tinker_kills", differing == 0 and killed == kills, **figures)


if __name__ == "__main__":
    sys.exit(main())
