"""SIGKILL to `sluice tinker` and restarts of its client: the trained weights have the bits of an undisturbed run.

    python -m tests.chaos.tinker_kills [--seed N] [--kills 20] [--steps 120] [--samples-every 10] [--short]

A scripted client creates a model, and sends two passes and an optimizer step for each step, and a save_state for each
fifth, over HTTP. At each tenth step it saves weights for a sampler, samples an answer from vLLM with them, and trains
on that answer. A killer ends processes at places spread over the script, in turn:

- the service and all that it started; the killer starts it again, and the client asks again after the lost connection,
- the service and the client: the next client knows nothing, and sends all requests from the first one,
- vLLM's engine alone, which the service starts again.

holds: every request has a result, weights and moments equal those of a run without kills bit for bit, and so does each
saved state (differing=0); no answer differs. --samples-every 0: no samples, and no kills of the engine. --short: 3
kills, 12 steps, no samples.
"""

import contextlib
import itertools
import json
import operator
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import psutil
from safetensors.torch import load_file

from deploy.tinker.command import main as serve
from deploy.tinker.wire import MESSAGES
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.ports import free_port
from tests.fakes.process_facts import title_of
from tests.fakes.tiny_models import make_tiny_model
from tests.fakes.warm_process import WarmCommand

SESSION = "script"
MODEL = f"{SESSION}:train:0"
_PAUSE_S = 0.1
_SERVE = "serve"  # first argument of a copy of this module that is the service
Sent = bytes | dict[str, object]
Body = Sent | Callable[[list[int]], bytes]  # one that is made from the tokens of the newest sample
Request = tuple[str, Body]  # verb and body


class ClientDeath(Exception):
    """The killer ended the client too."""


def script(num_steps: int, samples_every: int) -> list[Request]:
    """Return the client's requests in order. samples_every: steps between two samples; 0: none."""
    lora = {"rank": 8, "seed": 5}
    create = {"session_id": SESSION, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
    requests: list[Request] = [("create_model", create)]
    rows = random.Random(7)  # the same in every run
    seqs, samplers = itertools.count(1), itertools.count()
    for step in range(num_steps):
        for _ in range(2):
            requests.append(("forward_backward", pass_of([rows.randrange(6, 260) for _ in range(24)], next(seqs))))
        if samples_every and step % samples_every == samples_every - 1:
            question = [rows.randrange(6, 260) for _ in range(12)]
            requests += sample_and_train(question, next(samplers), next(seqs), next(seqs))
        adam = {"learning_rate": 0.003, "weight_decay": 0.01, "grad_clip_norm": 5.0}
        requests.append(("optim_step", {"model_id": MODEL, "seq_id": next(seqs), "adam_params": adam}))
        if step % 5 == 4:
            requests.append(("save_weights", {"model_id": MODEL, "seq_id": next(seqs), "path": f"step-{step}"}))
    return requests


def sample_and_train(question: list[int], sampler: int, saves: int, trains: int) -> list[Request]:
    """Return the requests that save weights, sample one answer with them, and train on it.

    sampler: number of the sampling session. saves, trains: places of two requests in the model's order.
    """
    greedy = {"temperature": 0.0, "max_tokens": 12, "stop": []}
    sample = {
        "sampling_session_id": f"{SESSION}:sample:{sampler}",
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": question}]},
        "sampling_params": greedy,
    }
    return [
        ("save_weights_for_sampler", {"model_id": MODEL, "seq_id": saves, "sampling_session_seq_id": sampler}),
        ("asample", sample),
        ("forward_backward", lambda answer: pass_of([*question, *answer], trains)),
    ]


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
        self.port, self.kills = free_port(), Counter[str]()
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

    def kill_often(self, victims: Sequence[str], rng: random.Random, progress: "Progress") -> None:
        """Kill these victims in turn, evenly over the script."""
        for number, victim in enumerate(victims):
            place = (number + rng.random()) / len(victims)
            while progress.share < place:
                time.sleep(rng.uniform(0.0, 0.02))
            if victim == "engine" and self._kill_engine(progress):
                self.kills["engine"] += 1
                continue
            self.process.kill()
            if victim == "client":
                progress.client_death.set()
            self.kills["client" if victim == "client" else "service"] += 1
            self.start()

    def _kill_engine(self, progress: "Progress") -> bool:
        """Kill vLLM's engine, once there is one; False when the script ends before."""
        while progress.share < 1.0:
            children = psutil.Process(self.process.pid).children(recursive=True)
            engines = [child for child in children if title_of(child).startswith("VLLM::EngineCore")]
            if engines:
                engines[0].kill()
                return True
            time.sleep(_PAUSE_S)
        return False


class Progress:
    """How far the script is, and who must end."""

    def __init__(self) -> None:
        self.share = 0.0  # 1: all requests but the last one have a result
        self.client_death = threading.Event()


class Client:
    """Sends a script, in order, until every request has a result."""

    def __init__(self, port: int, progress: Progress) -> None:
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1/", timeout=60)
        self._progress = progress
        self.answers: list[list[int]] = []  # tokens of each sample

    def play(self, requests: Sequence[Request], until: threading.Event) -> None:
        """Send the requests. until: the last step waits for it, so that every kill meets a client at work."""
        for place, (verb, body) in enumerate(requests):
            self._progress.share = max(self._progress.share, place / (len(requests) - 1))
            if place == len(requests) - 1:
                self._wait_for(until)
            answer = self._post(verb, body(self.answers[-1]) if callable(body) else body)
            if verb == "forward_backward":
                continue
            result = self._result(str(answer.json()["request_id"]))
            if verb == "asample":
                (sequence,) = MESSAGES["Samples"].FromString(result.content).sequences
                self.answers.append(np.frombuffer(sequence.tokens, np.int32).tolist())

    def _wait_for(self, until: threading.Event) -> None:
        while not until.wait(_PAUSE_S):
            self._check()

    def _result(self, name: str) -> httpx.Response:
        while True:
            answer = self._post("retrieve_future", {"request_id": name})
            if answer.headers["content-type"] != "application/json":
                return answer
            assert "error" not in answer.json(), answer.text
            if answer.json().get("type") != "try_again":
                return answer

    def _post(self, path: str, body: Sent) -> httpx.Response:
        while True:
            self._check()
            try:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                return self._http.post(path, content=content).raise_for_status()
            except httpx.TransportError:
                time.sleep(_PAUSE_S)

    def _check(self) -> None:
        if self._progress.client_death.is_set():
            self._progress.client_death.clear()
            raise ClientDeath


def train(
    model: Path, folder: Path, requests: Sequence[Request], victims: Sequence[str], seed: int
) -> tuple[Counter[str], list[list[int]]]:
    """Return the kills of one run of the script, and the sampled answers that the last client saw."""
    progress, done = Progress(), threading.Event()
    with running(model, folder) as service:

        def kill() -> None:
            try:
                service.kill_often(victims, random.Random(seed), progress)
            finally:
                done.set()

        killer = threading.Thread(target=kill)
        killer.start()
        while True:
            client = Client(service.port, progress)
            try:
                client.play(requests, done)
                break
            except ClientDeath:
                continue
        killer.join()
        return service.kills, client.answers


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
    given = options(__doc__ or "", kills=20, steps=120, samples_every=10)
    kills, steps, every = (3, 12, 0) if given.short else (given.kills, given.steps, given.samples_every)
    kinds = ("service", "client", "engine") if every else ("service", "service", "client")
    victims = [kinds[number % 3] for number in range(kills)]
    requests = script(steps, every)
    with tempfile.TemporaryDirectory(prefix="sluice-tinker") as name:
        root = Path(name)
        model = make_tiny_model(root / "model", tied=True, hidden_size=64)
        _, expected = train(model, root / "plain", requests, [], given.seed)
        killed, answers = train(model, root / "killed", requests, victims, given.seed)
        differing = num_differing(root / "plain", root / "killed")
    by_victim = {f"killed_{kind}": killed[kind] for kind in dict.fromkeys(kinds)}
    samples = {"samples": len(answers), "differing_samples": sum(map(operator.ne, answers, expected))} if every else {}
    holds = differing == 0 and killed.total() == kills and answers == expected
    return conclude("tinker_kills", holds, steps=steps, **by_victim, **samples, differing=differing)


if __name__ == "__main__":
    sys.exit(main())
