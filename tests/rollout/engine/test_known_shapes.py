"""Shapes that a push may not change."""

import pytest

from protocol.weights.wire import TensorMeta
from rollout.engine.weights.known_shapes import KnownShapes
from tests.fakes.planned_weights import plan_buckets


def test_parameter_that_comes_in_another_shape_than_before_is_refused_by_its_name() -> None:
    norm, head = TensorMeta("norm", "float32", (8,)), TensorMeta("head", "float32", (8, 4))
    known = KnownShapes()
    known.check(plan_buckets([norm, head], 64))
    known.keep(plan_buckets([norm, head], 64))
    known.check(plan_buckets([head, TensorMeta("more", "float32", (2,))], 64))
    with pytest.raises(ValueError, match=r"^the push has head in shape \(4, 8\); the model has it in \(8, 4\)$"):
        known.check(plan_buckets([norm, TensorMeta("head", "bfloat16", (4, 8))], 64))
