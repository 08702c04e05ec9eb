"""The content of a weight push: a model's tensors as in model folders, in buckets that are gathered step by step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice, repeat
from typing import Any

import torch
from torch import Tensor

from learner.models.weights.named_weights import Weight, as_on_disk, shapes_on_disk, weights_of
from protocol.weights.wire import Bucket, TensorMeta, cut_into_runs

_Source = tuple[Weight, tuple[TensorMeta, ...]]  # a weight in memory, and its tensors on the wire
Gather = Callable[[Sequence[Tensor]], AbstractContextManager[Any]]

_GATHERED_BYTES = 4 << 20  # size of the weights that are gathered at once


class PushedWeights:
    """The plan of a model's pushes; the same on every rank."""

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
        self._sources: list[_Source] = []
        for weight in weights_of(model):
            shapes = shapes_on_disk(model, weight, shape_of)
            own = str(weight.parts[0].dtype).removeprefix("torch.")
            sent = own if dtype is None or weight.is_buffer else dtype
            self._sources.append((weight, tuple(TensorMeta(name, sent, shape) for name, shape in shapes.items())))
        metas = [meta for _, metas in self._sources for meta in metas]
        self.plan: tuple[Bucket, ...] = tuple(
            map(tuple, cut_into_runs(metas, lambda meta: meta.num_bytes, bucket_bytes))
        )
        """The buckets on the wire, a tuple of tensors each. Experts that are one tensor in memory may be in several."""

    def buckets(self, *, is_sender: bool) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Yield each bucket's tensors by name on the sender (rank 0), and an empty bucket on other ranks. Collective.

        Tensors are gathered while they are taken. Use each before the next: a bucket is never whole in memory.
        """
        every = self._tensors(is_sender)
        for bucket in self.plan:
            tensors = islice(every, len(bucket))
            if is_sender:
                yield (tensor for tensor in tensors if tensor is not None)
            for _ in tensors:  # the other ranks gather tensors that were not taken, too
                pass
            if not is_sender:
                yield iter(())
        next(every, None)  # ends the last gathering

    def _tensors(self, is_sender: bool) -> Iterator[tuple[str, Tensor] | None]:
        """Yield every tensor of the plan on the sender, None in its place on other ranks. Collective."""
        for few in cut_into_runs(self._sources, _num_bytes, _GATHERED_BYTES):
            with self._gather([part for weight, _ in few for part in weight.parts]):
                for weight, metas in few:
                    if not is_sender:
                        yield from repeat(None, len(metas))
                        continue
                    found = as_on_disk(self._model, {weight.name: weight.merge()})
                    yield from ((meta.name, found[meta.name].to(getattr(torch, meta.dtype))) for meta in metas)


def _num_bytes(source: _Source) -> int:
    """Return the size of a weight on the wire."""
    return sum(meta.num_bytes for meta in source[1])
