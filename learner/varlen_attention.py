"""Causal attention over trajectories laid end to end, registered with transformers as "sluice_varlen".

Linear layers see no padding at all; only here are segments gathered into rows of similar length. Selected by
`learner.policy`; the micro-batch's lengths reach it as the model's keyword `segments`.
Shapes: H heads, T tokens of all segments, D head size, B rows, L longest of a row's segments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAME = "sluice_varlen"
# Segments share a gathered block while the shortest has at least this share of the longest one's length.
_SIMILAR = 0.75


class Segments:
    """Where each block of similar segments lies in the flat tokens. Made once per micro-batch, used by every layer."""

    def __init__(self, lengths: tuple[int, ...], device: torch.device) -> None:
        """lengths: of the segments in their order, decreasing."""
        self.blocks: list[tuple[Tensor, Tensor]] = []
        num_tokens = sum(lengths)
        begin, offset = 0, 0
        while begin < len(lengths):
            longest = lengths[begin]
            end = begin
            while end < len(lengths) and lengths[end] >= _SIMILAR * longest:
                end += 1
            block = torch.tensor(lengths[begin:end])
            starts = offset + torch.cat([torch.zeros(1, dtype=torch.long), block.cumsum(0)[:-1]])
            columns = torch.arange(longest)
            is_real = columns[None] < block[:, None]
            # Padding reads the segment's last token and is written nowhere: causality keeps it out of the real rows.
            index = (starts[:, None] + torch.minimum(columns[None], block[:, None] - 1)).to(device)
            self.blocks.append((index, is_real.to(device)))
            offset += int(block.sum())
            begin = end
        assert offset == num_tokens

    @property
    def is_one_block_without_padding(self) -> bool:
        return len(self.blocks) == 1 and bool(self.blocks[0][1].all())


def varlen_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    segments: Segments | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return attention in which every segment sees itself alone, as ([1, T, H, D], None).

    query: [1, H, T, D]; key, value: [1, H_kv, T, D]. Raises: ValueError without `segments`.
    """
    if segments is None:
        raise ValueError("sluice_varlen needs the micro-batch's segments")
    has_groups = key.shape[1] != query.shape[1]
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, H, D]
    parts = []
    for index, is_real in segments.blocks:
        rows_q, rows_k, rows_v = (tensor[index].transpose(1, 2) for tensor in (q, k, v))  # [B, H, L, D]
        out = scaled_dot_product_attention(
            rows_q, rows_k, rows_v, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=has_groups
        )
        parts.append(out.transpose(1, 2)[is_real])  # [tokens of the block, H, D]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def register() -> None:
    """Make the attention known to transformers; twice does no harm."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, varlen_attention)
