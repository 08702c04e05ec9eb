"""An engine that writes by script in a real tokenizer's tokens, the end of its turn included."""

from collections.abc import Callable, Sequence
from typing import Any

from rollout.engine.generation import Generation, Sampling
from tests.fakes.rollout_fakes import ScriptedEngine


class TokenizingEngine(ScriptedEngine):
    """Writes what `write(context)` returns, as its tokenizer's tokens, names of control tokens as those tokens.

    Stops behind the first stop string, then at max_tokens, as an engine does.
    """

    def __init__(self, write: Callable[[str], str], tokenizer: Any) -> None:
        super().__init__(write)
        self.tokenizer = tokenizer

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        context = self.decode(prompt_tokens)
        self.requests.append((context, sampling, request_id, self.policy_version))
        text = str(self.write(context))
        ends = [(text.find(stop) + len(stop), stop) for stop in sampling.stop if stop in text]
        end, stop_string = min(ends, default=(len(text), None))
        tokens = self.tokenizer.encode(text[:end], add_special_tokens=False)
        is_cut = len(tokens) > sampling.max_tokens
        tokens = tokens[: sampling.max_tokens]
        return Generation(
            tokens=tokens,
            logprobs=[-0.5] * len(tokens),
            version_spans=((0, len(tokens), self.policy_version or 0),),
            finish_reason="length" if is_cut else "stop",
            stop_string=None if is_cut else stop_string,
            text=self.decode(tokens),
        )
