"""A push is confirmed only by the digest of the received bytes."""

import weakref
from collections.abc import Callable

import pytest
import torch

from protocol.weights.digest import WeightDigest
from protocol.weights.group import ReceivedPush
from protocol.weights.wire import TensorMeta, bucket_num_bytes
from tests.fakes.planned_weights import plan_buckets

PLAN = plan_buckets([TensorMeta("a", "float32", (2,)), TensorMeta("b", "float32", (40,))], 100)


def _sending(*values: int) -> Callable[[torch.Tensor], None]:
    """Return a broadcast that fills each bucket with its value."""
    numbers = iter(values)

    def broadcast(flat: torch.Tensor) -> None:
        flat.fill_(next(numbers))

    return broadcast


def _digest(*values: int) -> str:
    digest = WeightDigest(PLAN)
    for bucket, value in zip(PLAN, values, strict=True):
        digest.add(torch.full((bucket_num_bytes(bucket),), value, dtype=torch.uint8))
    return digest.hexdigest()


def _received(*values: int) -> ReceivedPush:
    received = ReceivedPush()
    buckets = list(received.buckets(PLAN, "cpu", _sending(*values)))
    assert [(bucket, flat.unique().tolist()) for bucket, flat in buckets] == [
        (bucket, [value]) for bucket, value in zip(PLAN, values, strict=True)
    ]
    return received


def test_push_is_confirmed_by_the_digest_of_what_came() -> None:
    received = _received(1, 2)
    assert not received.is_confirmed
    received.confirm(_digest(1, 2))

    assert received.is_confirmed


def test_a_bucket_is_freed_before_the_next_one_comes() -> None:
    alive: list[int] = []
    came: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def broadcast(flat: torch.Tensor) -> None:
        came.add(flat)
        alive.append(len(came))

    for _, flat in ReceivedPush().buckets(PLAN, "cpu", broadcast):
        del flat
    assert alive == [1] * len(PLAN) == [1, 1]


def test_push_whose_last_byte_differs_is_refused() -> None:
    received = _received(1, 2)
    with pytest.raises(ValueError, match=r"^weight digest differs: sent \w{64}, received \w{64}$"):
        received.confirm(_digest(1, 3))

    assert not received.is_confirmed


def test_push_that_did_not_come_to_its_end_is_refused() -> None:
    received = ReceivedPush()
    next(received.buckets(PLAN, "cpu", _sending(1)))
    with pytest.raises(ValueError, match="received None"):
        received.confirm(_digest(1, 2))


def test_push_is_refused_when_the_learner_gives_it_up() -> None:
    with pytest.raises(ValueError, match="sent nothing, received"):
        _received(1, 2).confirm("")
