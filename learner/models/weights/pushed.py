"""What goes into a weight push: a model's tensors as model folders have them, in buckets gathered little by little."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from learner.models.weights.named_weights import Weight, as_on_disk, shapes_on_disk, weights_of
from protocol.weights.runs import cut_into_runs
from protocol.weights.wire import Bucket, TensorMeta

_Run = list[tuple[Weight, tuple[TensorMeta, ...]]]
WholeOnFirst = Callable[[Sequence[Tensor]], Sequence[Tensor]]

_GATHERED_BYTES = 4 << 20  # of weights that are whole at a time beside the bucket that they go into


class PushedWeights:
    """The plan of a model's pushes; the same on every rank."""

    def __init__(
        self,
        model: Any,
        whole_on_first: WholeOnFirst,
        shape_of: Callable[[Tensor], tuple[int, ...]],
        *,
        dtype: str | None,
        bucket_bytes: int,
    ) -> None:
        """whole_on_first: returns tensors whole on rank 0; all ranks call it together.

        dtype: of the parameters that are sent; None: their own. Buffers have their own: a router's bias is float32 in
        learner and engine, and rounded it would send tokens to other experts.
        """
        self._model, self._whole_on_first = model, whole_on_first
        sources = []
        for weight in weights_of(model):
            shapes = shapes_on_disk(model, weight, shape_of)
            own = str(weight.parts[0].dtype).removeprefix("torch.")
            sent = own if dtype is None or weight.is_buffer else dtype
            sources.append((weight, tuple(TensorMeta(name, sent, shape) for name, shape in shapes.items())))
        self._runs: list[_Run] = cut_into_runs(
            sources, lambda source: sum(meta.num_bytes for meta in source[1]), bucket_bytes
        )

    @property
    def plan(self) -> tuple[Bucket, ...]:
        """The buckets of the wire. What is one tensor in memory is in one bucket."""
        return tuple(tuple(meta for _, metas in run for meta in metas) for run in self._runs)

    def buckets(self, *, is_sender: bool) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Yield each bucket's tensors by name; collective. is_sender: true on rank 0; False gives none of them.

        A bucket's tensors are gathered while they are taken, each to be used before the next: all of them together
        never are in memory.
        """
        for run in self._runs:
            tensors = self._tensors(run, is_sender)
            if is_sender:
                yield tensors
            for _ in tensors:  # what was not taken: the other ranks gather it too
                pass
            if not is_sender:
                yield iter(())

    def _tensors(self, run: _Run, is_sender: bool) -> Iterator[tuple[str, Tensor]]:
        for few in cut_into_runs(run, lambda source: sum(meta.num_bytes for meta in source[1]), _GATHERED_BYTES):
            whole = iter(self._whole_on_first([part for weight, _ in few for part in weight.parts]))
            if is_sender:
                for weight, metas in few:
                    merged = weight.merged([next(whole) for _ in weight.parts])
                    found = as_on_disk(self._model, {weight.name: merged})
                    yield from ((meta.name, found[meta.name].to(getattr(torch, meta.dtype))) for meta in metas)
