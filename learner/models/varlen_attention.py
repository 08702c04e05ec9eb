"""Causal attention over trajectories concatenated, registered with transformers as "sluice_varlen".

Linear layers see no padding, and a prompt that several trajectories share once. On CPUs this attention gathers segments
into rows of similar length; on GPUs it needs no padding either. The model's keyword `segments` carries the
micro-batch's lengths, and for each segment the place of the prompt that it sees before its own tokens.
Shapes: H heads, T tokens of all segments, D head size, B rows, L longest of a block's segments, P shared prompt.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad, scaled_dot_product_attention

NAME = "sluice_varlen"
# Smallest length in a block, as a share of the longest one's.
_SIMILAR = 0.9
_MAX_FLASH_SIZE, _FLASH_STEP = 256, 8  # head sizes of torch's kernel for GPUs: up to the first, multiples of the second
# Options of some models that are not supported here. Ignoring them would silently change logprobs.
_UNKNOWN = ("softcap", "s_aux", "sinks", "position_bias")


class Block:
    """Segments of similar length and one prompt that follow each other in the flat tokens.

    index: [B * L], for each place of the padded rows its token in the block. place: [tokens of the block], for each
    token its place. Both are None for segments of equal length: rows are the tokens then.
    """

    def __init__(self, lengths: list[int], prompt: tuple[int, int], device: torch.device) -> None:
        self.num_rows, self.longest, self.num_tokens = len(lengths), lengths[0], sum(lengths)
        self._prompt = slice(prompt[0], sum(prompt)) if prompt[1] else None
        self.index: Tensor | None = None
        self.place: Tensor | None = None
        if lengths[-1] < self.longest:
            sizes, columns = np.array(lengths)[:, None], np.arange(self.longest)[None]
            starts = np.cumsum(sizes, axis=0) - sizes
            # Padding repeats the segment's last token. Causality keeps it out of the real tokens.
            self.index = torch.from_numpy((starts + np.minimum(columns, sizes - 1)).reshape(-1)).to(device)
            self.place = torch.from_numpy(np.flatnonzero(columns < sizes)).to(device)

    def prompt_of(self, tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """Return the prompt's keys and values, [P, H, D] each; None: there is none."""
        return None if self._prompt is None else (tokens[0][self._prompt], tokens[1][self._prompt])


class Bounds(NamedTuple):
    """Spans that follow each other."""

    ends: Tensor  # [S + 1] int32, from 0
    longest: int


class Segments:
    """The places of a micro-batch's segments in its flat tokens. Made once for a forward pass, used by every layer."""

    def __init__(
        self, lengths: tuple[int, ...], device: torch.device, prompts: tuple[tuple[int, int], ...] = ()
    ) -> None:
        """lengths: the segments' lengths in order, decreasing for each prompt. prompts: of a micro-batch; (): none."""
        self._lengths, self._device = lengths, device
        self._prompts = prompts or ((0, 0),) * len(lengths)

    @cached_property
    def queries(self) -> Bounds:
        """The segments' own tokens."""
        return _bounds(self._lengths, self._device)

    @cached_property
    def keys(self) -> Bounds:
        """What the segments see: a prompt and the own tokens of each."""
        pairs = zip(self._prompts, self._lengths, strict=True)
        return _bounds([prompt[1] + length for prompt, length in pairs], self._device)

    @cached_property
    def key_index(self) -> Tensor | None:
        """For each token that a segment sees its place in the flat tokens; None: none is seen by two segments."""
        if not any(number for _, number in self._prompts):
            return None
        starts = np.cumsum([0, *self._lengths[:-1]])
        own = zip(starts, self._lengths, strict=True)
        spans = [span for pair in zip(self._prompts, own, strict=True) for span in pair]
        index = np.concatenate([np.arange(start, start + number) for start, number in spans])
        return torch.from_numpy(index).to(self._device)

    @cached_property
    def blocks(self) -> list[Block]:
        """The segments in blocks of similar length. The GPU's kernel needs none."""
        blocks, begin = [], 0
        for end in range(1, len(self._lengths) + 1):
            if end == len(self._lengths) or not self._is_similar(begin, end):
                blocks.append(Block(list(self._lengths[begin:end]), self._prompts[begin], self._device))
                begin = end
        return blocks

    def _is_similar(self, begin: int, end: int) -> bool:
        return (
            self._prompts[begin] == self._prompts[end]
            and _SIMILAR * self._lengths[begin] <= self._lengths[end] <= self._lengths[begin]
        )


def varlen_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    segments: Segments | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return ([1, T, H, D], None): causal attention inside each segment.

    query: [1, H, T, D]; key, value: [1, H_kv, T, D]. attention_mask is ignored: `segments` replaces it. sliding_window:
    tokens that a token sees, with itself.
    Raises: ValueError without `segments`, and for unsupported options of a model.
    """
    if segments is None:
        raise ValueError("sluice_varlen needs the micro-batch's segments")
    for name in _UNKNOWN:
        if others.get(name) is not None:
            raise ValueError(f"sluice_varlen has no {name}: this model cannot be trained with packed micro-batches")
    tokens = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [T, H, D]
    is_small = max(query.shape[3], value.shape[3]) <= _MAX_FLASH_SIZE
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and dropout == 0.0 and is_small:
        return flash(tokens, segments, scaling, sliding_window)[None], None
    sizes = [block.num_tokens for block in segments.blocks]
    parts = zip(*(torch.split(tensor, sizes) for tensor in tokens), segments.blocks, strict=True)
    outputs = [
        _attend(q, k, v, block, block.prompt_of(tokens[1:]), scaling, dropout, sliding_window)
        for q, k, v, block in parts
    ]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def register() -> None:
    """Register the attention with transformers. It may be called several times."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, varlen_attention)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: Block,
    prompt: tuple[Tensor, Tensor] | None,
    scaling: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    """Return one block's attention, [tokens of the block, H, D], D of the values. prompt: its keys and values."""
    rows_q, rows_k, rows_v = (_rows(tensor, block) for tensor in (q, k, v))
    if prompt is not None:
        rows_k, rows_v = (_after(*pair) for pair in zip(prompt, (rows_k, rows_v), strict=True))
    num_seen = rows_k.shape[2]
    is_causal = num_seen == block.longest and (window is None or window >= num_seen)
    out = scaled_dot_product_attention(
        rows_q,
        rows_k,
        rows_v,
        attn_mask=None if is_causal else _band(block.longest, num_seen, window or num_seen, q.device),
        is_causal=is_causal,
        scale=scaling,
        dropout_p=dropout,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    flat = out.transpose(1, 2).reshape(block.num_rows * block.longest, q.shape[1], v.shape[2])
    return flat if block.place is None else _from_rows(flat, block.place)


def _after(prompt: Tensor, rows: Tensor) -> Tensor:
    """Return [B, H, P + L, D]: the prompt, then each row. prompt: [P, H, D]."""
    return torch.cat([prompt.transpose(0, 1).expand(len(rows), -1, -1, -1), rows], dim=2)


def _band(length: int, num_seen: int, window: int, device: torch.device) -> Tensor:
    """Return [L, P + L], true where a token sees another: itself and the window - 1 tokens before."""
    places = torch.arange(num_seen, device=device)
    distances = places[-length:, None] - places[None]
    return (distances >= 0) & (distances < window)


def _bounds(lengths: Sequence[int], device: torch.device) -> Bounds:
    return Bounds(torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device), max(lengths))


def _rows(tokens: Tensor, block: Block) -> Tensor:
    """Return a block's tokens as [B, H, L, D]."""
    padded = tokens if block.index is None else _to_rows(tokens, block.index, block.place)
    return padded.view(block.num_rows, block.longest, *tokens.shape[1:]).transpose(1, 2)


def flash(
    tokens: list[Tensor], segments: Segments, scaling: float | None, window: int | None, kernel: Any = None
) -> Tensor:
    """Return [T, H, D] by torch's packed kernel for GPUs, which wants one head size for queries, keys and values.

    tokens: queries, keys and values; MLA's have other sizes than each other. kernel: another one with its interface.
    """
    if kernel is None:
        from torch.nn.attention.varlen import varlen_attn as kernel
    q, k, v = tokens
    size = -max(q.shape[2], v.shape[2]) // _FLASH_STEP * -_FLASH_STEP
    scaling, kept = scaling or q.shape[2] ** -0.5, v.shape[2]
    options: dict[str, Any] = {}
    if has_groups := q.shape[1] != k.shape[1]:
        if "enable_gqa" in signature(kernel).parameters:
            options["enable_gqa"] = has_groups
        else:  # torch before 2.13
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    q, k, v = (tensor if tensor.shape[2] == size else pad(tensor, (0, size - tensor.shape[2])) for tensor in (q, k, v))
    if segments.key_index is not None:
        k, v = (_gather(tensor, segments.key_index) for tensor in (k, v))
    queries, keys = segments.queries, segments.keys
    # Both ends are included: a window of w tokens is the token itself and w - 1 before. A segment's last own token is
    # the last that it sees: the kernel aligns queries and keys at their ends.
    ends = (-1 if window is None else window - 1, 0)
    out = kernel(
        q, k, v, queries.ends, keys.ends, queries.longest, keys.longest, scale=scaling, window_size=ends, **options
    )
    assert isinstance(out, Tensor)
    return out[..., :kept]


class _ToRows(Function):
    """Tokens to padded rows. Padding has no gradient, so the backward pass gathers each token's own gradient. Plain
    indexing would add gradients up, several times slower."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, index: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return tokens.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None


class _FromRows(Function):
    """Padded rows back to tokens."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.num_places = rows.shape[0]
        return rows.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        rows = grads[0].new_zeros((ctx.num_places, *grads[0].shape[1:]))
        return rows.index_copy_(0, place, grads[0]), None


class _Gather(Function):
    """Tokens by places that may repeat. Their gradients are added in float32."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_tokens = tokens.shape[0]
        return tokens.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        exact = torch.promote_types(grads[0].dtype, torch.float32)
        sums = grads[0].new_zeros((ctx.num_tokens, *grads[0].shape[1:]), dtype=exact)
        return sums.index_add_(0, index, grads[0].to(exact)).to(grads[0].dtype), None


# `apply` has no types of its own.
_to_rows: Callable[[Tensor, Tensor, Tensor | None], Tensor] = _ToRows.apply
_from_rows: Callable[[Tensor, Tensor], Tensor] = _FromRows.apply
_gather: Callable[[Tensor, Tensor], Tensor] = _Gather.apply
