"""What a client sends: bodies of Tinker's API, and a service's parts without HTTP."""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deploy.tinker.adapters import BaseModel, base_settings
from deploy.tinker.journal import Journal, Request
from deploy.tinker.learning import Learning, Limits
from deploy.tinker.naming import request_id
from deploy.tinker.wire import MESSAGES, Datum

MODEL = "session:train:0"


def base_model(folder: Path, micro_batch_tokens: int = 64) -> BaseModel:
    """Return a tiny model's folder as a base model for texts of up to 32 tokens."""
    return BaseModel(base_settings(folder, 32, micro_batch_tokens))


def datum(tokens: Sequence[int], **inputs: Sequence[float]) -> Datum:
    """Return a text whose targets are its next tokens."""
    arrays = {name: np.asarray(values, np.float32) for name, values in inputs.items()}
    targets = np.asarray(tokens[1:], np.int64)
    return Datum(np.asarray(tokens[:-1], np.int64), {"target_tokens": targets, **arrays})


def pass_body(
    data: Sequence[Datum],
    loss_fn: str = "cross_entropy",
    *,
    seq: int = 1,
    config: Mapping[str, float] | None = None,
    forward_only: bool = False,
) -> bytes:
    """Return the body of a forward_backward."""
    message = MESSAGES["Request"](model_id=MODEL, seq_id=seq, loss_fn=loss_fn, forward_only=forward_only)
    for name, value in (config or {}).items():
        message.config_v2[name].number = value
    for each in data:
        made = message.data.add()
        made.chunks.add().text.tokens = each.tokens.astype(np.int32).tobytes()
        for name, array in each.inputs.items():
            tensor = made.inputs[name]
            tensor.dense, tensor.dtype = array.tobytes(), 2 if array.dtype == np.int64 else 1
            tensor.shape.extend(array.shape)
    body: bytes = message.SerializeToString()
    return body


def read_logprobs(content: bytes) -> list[float]:
    """Return the logprobs of a pass's result, one datum after the other."""
    message = MESSAGES["Output"]()
    message.ParseFromString(content)
    return list(np.frombuffer(message.records[0].fields["logprobs"].data, np.float32).tolist())


@dataclass
class Client:
    """A client of a service's journal and thread, in place of HTTP."""

    folder: Path
    base: BaseModel
    adapter_bytes: int = 1 << 30
    clock: Callable[[], float] = time.monotonic
    order: list[str] = field(default_factory=list)  # requests in the order of their results

    def __post_init__(self) -> None:
        (self.folder / "weights").mkdir(parents=True, exist_ok=True)
        self.journal = Journal(self.folder / "journal.sqlite")
        self._done = threading.Condition()
        limits = Limits(self.adapter_bytes, 16, ("base",))
        self.learning = Learning(self.journal, self.base, self.folder, limits, self._on_result, self.clock)

    def start(self) -> None:
        threading.Thread(target=self.learning.run, daemon=True).start()

    def begin(self) -> "Client":
        """Start the service's thread and create the model; returns the client."""
        self.start()
        self.create()
        return self

    def send(self, verb: str, seq: int, body: bytes | Mapping[str, Any], owner: str = MODEL) -> str:
        """Send a request; returns its name."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        made = Request(request_id(owner, seq), owner, seq, verb, content)
        if self.journal.add(made):
            self.learning.add(made)
        return made.id

    def create(self, owner: str = MODEL, rank: int = 4, **more: Any) -> str:
        session, _, number = owner.partition(":train:")
        lora = {"rank": rank, "seed": 1, **more}
        body = {"session_id": session, "model_seq_id": int(number), "base_model": "base", "lora_config": lora}
        return self.send("create_model", 0, body, owner)

    def step(self, seq: int, owner: str = MODEL, **adam: float) -> str:
        return self.send("optim_step", seq, {"model_id": owner, "seq_id": seq, "adam_params": adam}, owner)

    def wait(self, name: str) -> bytes:
        """Return a request's result. Raises: AssertionError when it failed."""
        kind, content = self.outcome(name)
        assert kind != "error", content
        return content

    def error(self, name: str) -> dict[str, str]:
        """Return a request's failure."""
        kind, content = self.outcome(name)
        assert kind == "error"
        read: dict[str, str] = json.loads(content)
        return read

    def outcome(self, name: str) -> tuple[str, bytes]:
        with self._done:
            assert self._done.wait_for(lambda: name in self.order, 60), name
        result = self.journal.result(name)
        assert result is not None
        return result.kind, result.content

    def _on_result(self, name: str) -> None:
        with self._done:
            self.order.append(name)
            self._done.notify_all()
