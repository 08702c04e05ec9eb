"""A model's weights as a push takes them: the plan of its buckets, and each bucket's tensors in turn."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from protocol.weights.wire import Bucket, TensorMeta, plan_buckets

Gathered = Iterator[list[tuple[str, Tensor]]]


def planned(named: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> tuple[tuple[Bucket, ...], Gathered]:
    """Return plan and buckets of float32 weights."""
    tensors = dict(named)
    plan = plan_buckets([TensorMeta(name, "float32", tuple(t.shape)) for name, t in tensors.items()], bucket_bytes)
    return plan, ([(meta.name, tensors[meta.name]) for meta in bucket] for bucket in plan)
