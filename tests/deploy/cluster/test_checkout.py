"""A node that differs from its head is told in what."""

import pytest

from deploy.cluster.checkout import check_same, this_checkout
from protocol.errors import OperatorError


def test_same_checkout_and_versions_may_join() -> None:
    check_same(this_checkout(), "Ray")


def test_every_difference_is_named() -> None:
    here = this_checkout()
    there = here.model_copy(update={"versions": {**here.versions, "ray": "1.0", "jax": "2"}, "code": "0" * 16})
    with pytest.raises(
        OperatorError,
        match=rf"This node differs from what the join file says of the head: ray {here.versions['ray']} here and 1\.0 "
        r"there; jax is not installed here and 2 there; the checkouts' Python files\. .* it again, and copy it\.$",
    ):
        check_same(there, "the join file", ", and copy it")
