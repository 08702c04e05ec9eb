"""An engine in vLLM's place: it writes by a script, and the logprobs are those of the weights that it was pushed."""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from protocol.errors import NeighbourError
from rollout.engine.generation import Generation, Sampling
from tests.fakes.engines import PushedEngine, first_stop
from tests.learner.weights.fake_server import FakeServer


class ModelEngine(PushedEngine):
    """Generation over a Hugging Face model, and the receiving half of the wire from `FakeServer`.

    write: (which turn of its conversation, from 0, a number to draw by) -> its text. Turns end at a stop string or at
    their budget. `pushed` holds a checksum of each version's weights.
    """

    def __init__(self, model: Path, dtype: torch.dtype, write: Callable[[int, int], str]) -> None:
        super().__init__(FakeServer("engine"))
        self.generates_while_receiving = False
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.pushed: dict[int, int] = {}
        self.num_sleeps = 0
        self._is_asleep = False
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self._script = write

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        if self.policy_version is None:
            raise NeighbourError("engine", "serves nothing")
        assert not self._is_asleep
        key = request_id.rpartition("-")[0]  # GROUP/SAMPLE/ATTEMPT/TURN, the same whenever the sample is made again
        text = self._script(int(key.rpartition("/")[2]), zlib.crc32(key.encode()))
        text, stop_string = first_stop(text, sampling)
        tokens = self.encode(text)
        if len(tokens) > sampling.max_tokens:
            tokens, stop_string = tokens[: sampling.max_tokens], None
        self._num_output_tokens += len(tokens)
        self.on_tokens(request_id, len(tokens))
        return Generation(
            tokens=tokens,
            logprobs=self._logprobs([*prompt_tokens, *tokens], sampling.temperature)[-len(tokens) :],
            version_spans=((0, len(tokens), self.policy_version),),
            finish_reason="length" if len(tokens) == sampling.max_tokens else "stop",
            stop_string=stop_string,
            text=self.decode(tokens),
        )

    async def sleep(self) -> None:
        self.num_sleeps += not self._is_asleep
        self._is_asleep = True

    async def wake(self) -> None:
        self._is_asleep = False

    async def commit(self, version: int, digest: str) -> float:
        pause_s = await super().commit(version, digest)
        missing, unexpected = self._model.load_state_dict(self._receiver.weights, strict=False)
        assert unexpected == []
        assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embeddings
        self.pushed[version] = zlib.crc32(b"".join(weight.numpy().tobytes() for weight in self._state()))
        return pause_s

    async def probe(self, tokens: list[int]) -> list[float]:
        return self._logprobs(tokens, 1.0)

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
