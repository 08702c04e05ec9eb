"""A model's weights as a push takes them: the plan of its buckets, and each bucket's tensors in turn."""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from protocol.weights.wire import Bucket, TensorMeta, cut_into_runs, stacked_view

Gathered = Iterator[list[tuple[str, Tensor]]]


def plan_buckets(metas: Sequence[TensorMeta], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return plain tensors in their order, in buckets of at most so many bytes; a larger one has its own."""
    return tuple(tuple(run) for run in cut_into_runs(metas, lambda meta: meta.num_bytes, bucket_bytes))


def planned(named: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> tuple[tuple[Bucket, ...], Gathered]:
    """Return plan and buckets of float32 weights."""
    tensors = dict(named)
    plan = plan_buckets([TensorMeta(name, "float32", tuple(t.shape)) for name, t in tensors.items()], bucket_bytes)
    return plan, ([(meta.name, tensors[meta.name]) for meta in bucket] for bucket in plan)


def bucket_views(flat: Tensor, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, view) for each tensor of the bucket; the views share memory with `flat`, a uint8 tensor."""
    row = 0
    for meta in bucket:
        yield meta.name, stacked_view(flat, row, meta, 1)[0]
        row += meta.num_rows
