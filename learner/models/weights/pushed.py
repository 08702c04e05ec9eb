"""What goes into a weight push: a model's tensors as model folders have them, in buckets gathered one by one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from learner.models.weights.named_weights import Weight, as_on_disk, shapes_on_disk, weights_of
from protocol.weights.runs import cut_into_runs
from protocol.weights.wire import Bucket, TensorMeta

Gather = Callable[[Sequence[Tensor]], AbstractContextManager[Any]]


class PushedWeights:
    """The plan of a model's pushes; the same on every rank."""

    def __init__(
        self,
        model: Any,
        gather: Gather,
        shape_of: Callable[[Tensor], tuple[int, ...]],
        *,
        dtype: str,
        bucket_bytes: int,
    ) -> None:
        """gather: makes tensors whole while its context lasts; all ranks enter it together. dtype: of what is sent."""
        self._model, self._gather = model, gather
        sources = []
        for weight in weights_of(model):
            shapes = shapes_on_disk(model, weight, shape_of)
            sources.append((weight, tuple(TensorMeta(name, dtype, shape) for name, shape in shapes.items())))
        self._runs: list[list[tuple[Weight, tuple[TensorMeta, ...]]]] = cut_into_runs(
            sources, lambda source: sum(meta.num_bytes for meta in source[1]), bucket_bytes
        )

    @property
    def plan(self) -> tuple[Bucket, ...]:
        """The buckets of the wire. What is one tensor in memory is in one bucket."""
        return tuple(tuple(meta for _, metas in run for meta in metas) for run in self._runs)

    def buckets(self, *, is_sender: bool) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield each bucket's tensors by name while they are whole; collective. is_sender: False gives none of them."""
        for run in self._runs:
            with self._gather([part for weight, _ in run for part in weight.parts]):
                yield [pair for weight, metas in run for pair in self._whole(weight, metas)] if is_sender else []

    def _whole(self, weight: Weight, metas: Sequence[TensorMeta]) -> list[tuple[str, Tensor]]:
        found = as_on_disk(self._model, {weight.name: weight.merged()})
        return [(meta.name, found[meta.name]) for meta in metas]
