"""The wire of a weight push: buckets, typed views, the metadata message and the digest."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.weights.wire import (
    TensorMeta,
    bucket_num_bytes,
    cut_into_runs,
    read_update_message,
    update_message,
)
from tests.fakes.planned_weights import bucket_views, plan_buckets

METAS = [
    TensorMeta("embed", "float32", (3, 4)),
    TensorMeta("norm", "bfloat16", (5,)),
    TensorMeta("head", "float32", (4, 13)),
]


def test_every_tensor_of_a_bucket_begins_a_row() -> None:
    (bucket,) = plan_buckets([*METAS, TensorMeta("wide", "uint8", (4097,))], 1 << 20)

    assert bucket_num_bytes(bucket) == 3 * 4096 + 8192


def test_views_share_the_buckets_bytes_and_have_their_dtype_and_shape() -> None:
    (bucket,) = plan_buckets(METAS, 1 << 20)
    flat = torch.zeros(bucket_num_bytes(bucket), dtype=torch.uint8)
    for _, view in bucket_views(flat, bucket):
        view.fill_(1.0)

    views = dict(bucket_views(flat, bucket))
    assert [(name, view.dtype, tuple(view.shape)) for name, view in views.items()] == [
        ("embed", torch.float32, (3, 4)),
        ("norm", torch.bfloat16, (5,)),
        ("head", torch.float32, (4, 13)),
    ]
    assert all(bool((view == 1.0).all()) for view in views.values())
    assert not flat[4096 + 10 : 8192].any()  # the gap after norm's ten bytes


def test_message_survives_msgpack_and_gives_the_same_plan() -> None:
    plan = plan_buckets(METAS, 64)
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(update_message(plan)))

    assert read_update_message(message) == plan


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"schema": 2}, "weight update: schema 2, this process speaks 3"),
        ({"dtype_names": ["float32"]}, "weight update: dtype_names has 1 entries, names has 3"),
        ({"shapes": [[1]]}, "weight update: shapes has 1 entries, names has 3"),
        ({"names": ["a", "a", "b"]}, "weight update: 3 names, expected at most 1000000, each once"),
        ({"bucket_lengths": [1, 1]}, r"weight update: bucket_lengths \[1, 1\] do not cover 3 tensors"),
        ({"bucket_lengths": [4, -1]}, r"weight update: bucket_lengths \[4, -1\] do not cover 3 tensors"),
        ({"dtype_names": ["float32", "float32", "complex64"]}, r"weight update: dtype_names \['complex64'\]"),
        ({"shapes": [[1], [2], [-3]]}, "weight update: shapes hold a negative size"),
        ({"names": "embed"}, r"Expected `array`, got `str` - at `\$.names`"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_message_is_refused_with_the_field(change: dict[str, Any], text: str) -> None:
    message = update_message(plan_buckets(METAS, 1 << 20)) | change

    with pytest.raises(ValueError, match=text):
        read_update_message(message)


@settings(deadline=None)
@given(st.lists(st.integers(0, 50)), st.integers(1, 60))
def test_runs_hold_everything_in_order_within_the_limit_and_are_as_few_as_that_allows(
    sizes: list[int], limit: int
) -> None:
    runs = cut_into_runs(sizes, lambda size: size, limit)
    assert [size for run in runs for size in run] == sizes
    assert all(run and (len(run) == 1 or sum(run) <= limit) for run in runs)
    assert all(sum(run) + following[0] > limit for run, following in pairwise(runs))
