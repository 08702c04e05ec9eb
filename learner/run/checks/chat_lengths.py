"""How long prompts are for a model's own tokenizer and chat template. Run in a process of its own: it imports torch."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from protocol.message_texts import with_texts


class Measured(NamedTuple):
    """One prompt as the tokenizer sees it."""

    num_tokens: int  # of the prompt, with what a chat template adds; 0 where it cannot be rendered
    num_bytes: int  # of the text that was encoded
    problem: str = ""  # why it cannot be rendered; empty when it can


def measure(model: Path, trust_remote_code: bool, prompts: Sequence[str | list[dict[str, Any]]]) -> list[Measured]:
    """Return each prompt's length. Raises: what the tokenizer's loading raises."""
    tokenizer = _tokenizer(model, trust_remote_code)
    return [_measure_one(tokenizer, prompt) for prompt in prompts]


@lru_cache(maxsize=1)
def _tokenizer(model: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)


def _measure_one(tokenizer: Any, prompt: str | list[dict[str, Any]]) -> Measured:
    try:
        if isinstance(prompt, str):
            return Measured(len(tokenizer.encode(prompt)), len(prompt.encode()))
        text = tokenizer.apply_chat_template(with_texts(prompt), add_generation_prompt=True, tokenize=False)
        return Measured(len(tokenizer.encode(text, add_special_tokens=False)), len(text.encode()))
    except Exception as error:  # templates raise whatever jinja does
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        return Measured(0, 0, f"cannot be rendered by the tokenizer of policy.model: {reason}")
