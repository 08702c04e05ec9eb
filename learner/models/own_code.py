"""A model's own eager attention in blocks of queries, so that a long text does not need all its scores at once.

Registered with transformers as "sluice_eager". The formula, masks, windows, caps and sinks are the model's own code:
each block calls `eager_attention_forward` of the model's module with those rows of the model's mask.
Shapes: H heads, T tokens.
"""

import sys
from typing import Any

import torch
from torch import Tensor

NAME = "sluice_eager"
# Scores of one block: 256 MiB in float32.
_MAX_SCORES = 1 << 26


class LazyMask:
    """A model's attention mask whose rows are made when they are used."""

    def __init__(self, **form: Any) -> None:
        """form: arguments of transformers' `eager_mask`."""
        self._form = form

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows start to stop as transformers' additive mask, [1, 1, stop - start, T]."""
        from transformers.masking_utils import eager_mask

        first = self._form.get("q_offset", 0) + start
        mask: Tensor = eager_mask(**{**self._form, "q_length": stop - start, "q_offset": first})
        return mask


def register() -> None:
    """Register the attention and its mask with transformers. It may be called several times."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, LazyMask)


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    """Return ([1, T, H, D], None). query: [1, H, T, D]."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    num_rows = max(1, _MAX_SCORES // (query.shape[1] * key.shape[2]))
    outputs = []
    for start in range(0, query.shape[2], num_rows):
        stop = min(start + num_rows, query.shape[2])
        mask: Any
        if isinstance(attention_mask, LazyMask):
            mask = attention_mask.rows(start, stop)
        else:
            mask = None if attention_mask is None else attention_mask[..., start:stop, :]
        outputs.append(eager(module, query[:, :, start:stop], key, value, mask, *args, **options)[0])
    return torch.cat(outputs, 1), None
