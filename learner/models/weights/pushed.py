"""A model's weights by the names in its model folder, and the plan by which a push copies them.

In memory experts may be one tensor, and an adapted layer has a weight and two factors. Model folders, and engines that
read them, have separate experts and merged weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby, islice, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from learner.models.weights.lora import adapted_layers, factors
from protocol.weights.wire import Bucket, TensorMeta, cut_into_runs

Gather = Callable[[Sequence[Tensor]], AbstractContextManager[Any]]

_BASE_LAYER = ".base_layer."
_GATHERED_BYTES = 4 << 20  # size of the weights that are gathered at once


@dataclass(frozen=True)
class Weight:
    """One weight of a model in memory, under its name without adapters."""

    name: str
    parts: tuple[Tensor, ...]  # the tensor, and A and B of its adapter if it has one; gathered together
    scale: float = 0.0  # factor of B @ A
    is_buffer: bool = False  # it has no gradient and keeps its type

    def merge(self) -> Tensor:
        """Return the weight with its adapter merged in, in its own type. Its parts are gathered."""
        base = self.parts[0].detach()
        if len(self.parts) == 1:
            return base
        _, a, b = (part.detach().float() for part in self.parts)
        exact = base.float() + self.scale * (b @ a)
        return _dither(exact) if base.dtype == torch.bfloat16 else exact.to(base.dtype)


def _dither(exact: Tensor) -> Tensor:
    """Return float32 numbers in bfloat16, each rounded up with the probability of its distance from the lower one.

    The base is in bfloat16. To the nearest, a change below half a step is lost in every weight: servers would sample
    from the base until the adapters outgrow it. Each place always has the same threshold, so equal weights give equal
    digests.
    """
    draw = torch.Generator(exact.device).manual_seed(0)
    below = torch.randint(1 << 16, exact.shape, generator=draw, device=exact.device, dtype=torch.int32)
    # bfloat16 is the upper half of a float32. A carry out of the lower half is the next number away from 0.
    bits = (exact.view(torch.int32) + below) & ~0xFFFF
    return bits.view(torch.float32).to(torch.bfloat16)


def weights_of(model: Any) -> list[Weight]:
    """Return the weights of a model in its order, a tied head once, then its saved buffers."""
    layers = adapted_layers(model)
    found = []
    for name, tensor in model.named_parameters():
        if ".lora_" in name:
            continue
        layer = layers.get(name.removesuffix(".weight").removesuffix(".base_layer"))
        if layer is not None and name.endswith(f"{_BASE_LAYER}weight"):
            a, b, scale = factors(layer)
            found.append(Weight(name.replace(_BASE_LAYER, "."), (tensor, a, b), scale))
        else:
            found.append(Weight(name.replace(_BASE_LAYER, "."), (tensor,)))
    kept = [Weight(name.replace(_BASE_LAYER, "."), (tensor,), is_buffer=True) for name, tensor in _saved_buffers(model)]
    return found + kept


def as_on_disk(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names and in the shapes of model folders, which have separate experts."""
    from transformers.core_model_loading import revert_weight_conversion

    parts: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return parts


class _Place(NamedTuple):
    """Where a tensor of the wire lies in its weight. offset: None if only the conversion to model folders makes it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | None


class _Piece(NamedTuple):
    """Neighbours in a bucket, evenly spaced in one weight: a single tensor, or a part of several experts."""

    metas: tuple[TensorMeta, ...]
    place: _Place  # the first one's; with several of them of all, [N, ...]

    def cut_from(self, whole: Tensor, on_disk: Mapping[str, Tensor]) -> Tensor:
        shape, stride, offset = self.place
        if offset is None:
            return on_disk[self.metas[0].name]
        return whole.as_strided(shape, stride, whole.storage_offset() + offset)


class PushedWeights:
    """The plan of a model's pushes, made once; the same on every rank. A push copies by it."""

    def __init__(
        self,
        model: Any,
        gather: Gather,
        shape_of: Callable[[Tensor], tuple[int, ...]],
        *,
        dtype: str | None,
        bucket_bytes: int,
    ) -> None:
        """gather: makes tensors whole while its context lasts; collective.

        dtype: type of the sent parameters; None: their own. Buffers keep their own type: a rounded bias of a router
        would send tokens to other experts.
        """
        self._model, self._gather = model, gather
        tensors: list[tuple[Weight, TensorMeta, _Place]] = []
        for weight in weights_of(model):
            own = str(weight.parts[0].dtype).removeprefix("torch.")
            sent = own if dtype is None or weight.is_buffer else dtype
            places = _places(model, weight, shape_of)
            tensors += [(weight, TensorMeta(name, sent, place.shape), place) for name, place in places.items()]
        buckets = cut_into_runs(tensors, lambda tensor: tensor[1].num_bytes, bucket_bytes)
        self.plan: tuple[Bucket, ...] = tuple(tuple(meta for _, meta, _ in bucket) for bucket in buckets)
        """The buckets on the wire, a tuple of tensors each. Experts that are one tensor in memory may be in several."""
        pieces = [_pieces(bucket) for bucket in buckets]
        self._num_pieces = [len(each) for each in pieces]
        self._gathers = _gathers([pair for each in pieces for pair in each])

    def buckets(self, *, is_sender: bool) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Yield each bucket's tensors by name on the sender (rank 0), and an empty bucket on other ranks. Collective.

        A part of N experts is one tensor [N, ...] by the first one's name, as `feed.pack` takes it. Tensors are
        gathered while they are taken. Use each before the next: a bucket is never whole in memory.
        """
        every = self._tensors(is_sender)
        for num_pieces in self._num_pieces:
            tensors = islice(every, num_pieces)
            if is_sender:
                yield ((piece.metas[0].name, tensor) for piece, tensor in tensors if tensor is not None)
            for _ in tensors:  # the other ranks gather tensors that were not taken, too
                pass
            if not is_sender:
                yield iter(())
        next(every, None)  # ends the last gathering

    def tensors(self, *, is_sender: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor on the sender, by its name in model folders and in the type that is sent. Collective."""
        for piece, tensor in self._tensors(is_sender):
            if tensor is not None:
                sent = tensor.to(getattr(torch, piece.metas[0].dtype))
                names = [meta.name for meta in piece.metas]
                yield from zip(names, sent if len(names) > 1 else (sent,), strict=True)

    def _tensors(self, is_sender: bool) -> Iterator[tuple[_Piece, Tensor | None]]:
        """Yield every piece and, on the sender, its tensor. Collective."""
        for few in self._gathers:
            with self._gather([part for weight, _ in few for part in weight.parts]):
                for weight, pieces in few:
                    if not is_sender:
                        yield from zip(pieces, repeat(None))
                        continue
                    whole = weight.merge().contiguous()
                    is_cut = all(piece.place.offset is not None for piece in pieces)
                    on_disk = {} if is_cut else as_on_disk(self._model, {weight.name: whole})
                    yield from ((piece, piece.cut_from(whole, on_disk)) for piece in pieces)


_Source = tuple[Weight, list[_Piece]]


def _gathers(pieces: Sequence[tuple[Weight, _Piece]]) -> list[list[_Source]]:
    """Return each weight with its pieces, in runs that are gathered at once."""
    groups = [list(group) for _, group in groupby(pieces, key=lambda pair: id(pair[0]))]
    sources = [(group[0][0], [piece for _, piece in group]) for group in groups]
    return cut_into_runs(
        sources, lambda source: sum(meta.num_bytes for piece in source[1] for meta in piece.metas), _GATHERED_BYTES
    )


def _pieces(bucket: Sequence[tuple[Weight, TensorMeta, _Place]]) -> list[tuple[Weight, _Piece]]:
    """Return the tensors of a bucket with their weights; evenly spaced neighbours of one weight are one piece."""
    found: list[tuple[Weight, _Piece]] = []
    for weight, meta, place in bucket:
        if found and found[-1][0] is weight and (longer := _extend(found[-1][1], meta, place)) is not None:
            found[-1] = (weight, longer)
        else:
            found.append((weight, _Piece((meta,), place)))
    return found


def _extend(piece: _Piece, meta: TensorMeta, place: _Place) -> _Piece | None:
    """Return the piece with one tensor more, or None when the tensor does not continue it."""
    num, (shape, stride, offset) = len(piece.metas), piece.place
    if offset is None or place.offset is None:
        return None
    own, step = slice(int(num > 1), None), (place.offset - offset) // num
    is_alike = (place.shape, place.stride) == (shape[own], stride[own])
    if not is_alike or step <= 0 or place.offset != offset + num * (stride[0] if num > 1 else step):
        return None
    return _Piece((*piece.metas, meta), _Place((num + 1, *place.shape), (step, *place.stride), offset))


class _NoCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns a view where a copy is asked for: its offset and strides show its place in the source."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))


def _places(model: Any, weight: Weight, shape_of: Callable[[Tensor], tuple[int, ...]]) -> dict[str, _Place]:
    """Return the places of a weight's tensors by their names on disk; nothing is gathered.

    shape_of: returns a tensor's whole shape.
    """
    whole = torch.empty(shape_of(weight.parts[0]), dtype=weight.parts[0].dtype, device="meta")
    with _NoCopies():  # type: ignore[no-untyped-call]
        found = as_on_disk(model, {weight.name: whole})
    own = whole.untyped_storage()._cdata
    return {
        name: _Place(
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()) if tensor.untyped_storage()._cdata == own else None,
        )
        for name, tensor in found.items()
    }


def _saved_buffers(model: Any) -> list[tuple[str, Tensor]]:
    """Return the buffers that a model saves, such as the bias of a router."""
    kept = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
