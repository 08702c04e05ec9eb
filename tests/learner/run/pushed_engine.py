"""An engine in vLLM's place: it writes by a script, and the logprobs are those of the weights that it was pushed."""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from protocol.errors import NeighbourError
from rollout.engine.generation import EngineStats, Generation, Sampling
from tests.learner.weights.fake_server import FakeServer

_ATTEMPT = ("", 0)  # its receiver does not ask whose call it is


class PushedEngine:
    """Generation over a Hugging Face model, and the receiving half of the wire from `FakeServer`.

    write: (which turn of its conversation, from 0, a number to draw by) -> its text. Turns end at a stop string or at
    their budget. `pushed` holds a checksum of each version's weights.
    """

    def __init__(self, model: Path, dtype: torch.dtype, write: Callable[[int, int], str]) -> None:
        self._receiver = FakeServer("engine")
        self.is_alive = True
        self.generates_while_receiving = False
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.pushed: dict[int, int] = {}
        self.num_sleeps = 0
        self._is_asleep = False
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self._write = write
        self._num_output_tokens = 0

    @property
    def policy_version(self) -> int | None:
        return self._receiver.version

    @property
    def stats(self) -> EngineStats:
        return EngineStats(0, self._num_output_tokens, False)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        if self._receiver.version is None:
            raise NeighbourError("engine", "serves nothing")
        assert not self._is_asleep
        key = request_id.rpartition("-")[0]  # GROUP/SAMPLE/ATTEMPT/TURN, the same whenever the sample is made again
        text = self._write(int(key.rpartition("/")[2]), zlib.crc32(key.encode()))
        ends = [(text.find(stop) + len(stop), stop) for stop in sampling.stop if stop in text]
        end, stop_string = min(ends, default=(len(text), None))
        tokens = self.encode(text[:end])
        if len(tokens) > sampling.max_tokens:
            tokens, stop_string = tokens[: sampling.max_tokens], None
        self._num_output_tokens += len(tokens)
        return Generation(
            tokens=tokens,
            logprobs=self._logprobs([*prompt_tokens, *tokens], sampling.temperature)[-len(tokens) :],
            version_spans=((0, len(tokens), self._receiver.version),),
            finish_reason="length" if len(tokens) == sampling.max_tokens else "stop",
            stop_string=stop_string,
            text=self.decode(tokens),
        )

    async def join_weights(self, init: dict[str, Any], timeout_s: float) -> None:
        await self._receiver.join_weights(_ATTEMPT, init, timeout_s)

    async def sleep(self) -> None:
        self.num_sleeps += not self._is_asleep
        self._is_asleep = True

    async def wake(self) -> None:
        self._is_asleep = False

    async def prepare(self, update: dict[str, Any]) -> None:
        await self._receiver.prepare(_ATTEMPT, update)

    async def receive(self) -> None:
        await self._receiver.receive(_ATTEMPT)

    async def leave(self) -> None:
        await self._receiver.leave(_ATTEMPT)

    async def commit(self, version: int, digest: str) -> float:
        pause_s = await self._receiver.commit(_ATTEMPT, version, digest)
        missing, unexpected = self._model.load_state_dict(self._receiver.weights, strict=False)
        assert unexpected == []
        assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embeddings
        self.pushed[version] = zlib.crc32(b"".join(weight.numpy().tobytes() for weight in self._state()))
        return pause_s

    async def probe(self, tokens: list[int]) -> list[float]:
        return self._logprobs(tokens, 1.0)

    def forget_weights(self) -> None:
        self._receiver.version = None

    def shutdown(self) -> None:
        self.is_alive = False
        self._receiver.release()

    def _state(self) -> list[torch.Tensor]:
        return [weight.detach().contiguous().flatten().view(torch.uint8) for weight in self._model.parameters()]

    @torch.no_grad()
    def _logprobs(self, tokens: list[int], temperature: float) -> list[float]:
        """Return the logprobs of tokens[1:]."""
        logits = self._model(torch.tensor([tokens])).logits[0, :-1].float() / temperature
        of_tokens = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])
        found: list[float] = of_tokens[:, 0].tolist()
        return found
