"""Text to token ids and back by the model's tokenizer, without masks and offsets, which take as long as the tokens.

A tokenizer class that overrides the library's methods is called by its own methods.
"""

from collections.abc import Sequence
from typing import Any

_BASE, _FAST = "transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"
# Modules of the library's own methods, by the method's name.
_ENCODES = {"apply_chat_template": _BASE, "encode": _BASE, "__call__": _BASE, "_encode_plus": _FAST}
_DECODES = {"decode": _BASE, "_decode": _FAST}


class TextCodec:
    """Codec of one tokenizer, for one thread. Other threads run while it encodes a long text."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: a Hugging Face tokenizer."""
        self._tokenizer = tokenizer
        core = getattr(tokenizer, "backend_tokenizer", None)
        encodes = _has(tokenizer, _ENCODES) and not hasattr(tokenizer, "_switch_to_input_mode")
        decodes = _has(tokenizer, _DECODES) and not tokenizer.clean_up_tokenization_spaces
        self._encoding = core if encodes else None
        self._decoding = core if decodes else None

    @property
    def is_plain(self) -> bool:
        """Whether a rendered chat is encoded like any other text."""
        return self._encoding is not None

    def encode(self, text: str, add_special_tokens: bool = False, **options: bool) -> list[int]:
        """Return the ids of `tokenizer.encode`. options: split_special_tokens. Raises: the tokenizer's errors."""
        core = self._encoding
        if core is None or core.truncation is not None or core.padding is not None:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, **options))
        is_split = options.get("split_special_tokens", self._tokenizer.split_special_tokens)
        if core.encode_special_tokens != is_split:
            core.encode_special_tokens = is_split
        # Only the core's methods for many texts let other threads run.
        (encoded,) = core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoded.ids)

    def decode(self, *parts: Sequence[int]) -> list[str]:
        """Return the text of each sequence of ids, names of control tokens kept."""
        if self._decoding is None:
            return [str(self._tokenizer.decode(part, skip_special_tokens=False)) for part in parts]
        return list(self._decoding.decode_batch(parts, skip_special_tokens=False))


def _has(tokenizer: Any, methods: dict[str, str]) -> bool:
    own = type(tokenizer)
    return all(getattr(getattr(own, name, None), "__module__", "") == where for name, where in methods.items())
