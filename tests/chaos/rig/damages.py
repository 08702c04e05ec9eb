"""What can happen to weights before they are loaded: each must be refused by its name."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from protocol.weights.group import BroadcastGroup
from tests.chaos.rig.lying_pair import LyingPair
from tests.chaos.rig.plain_policy import PlainPolicy

_NAME = "model.layers.1.mlp.down_proj.weight"

DAMAGES = {
    "flipped_bit": "weight digest differs",
    "missing_parameter": _NAME,
    "renamed_parameter": "down_projection",
    "misshapen_parameter": f"{_NAME} in shape (7, 11)",
    "stale_version": "cannot commit version",
}
"""Damage -> what the refusal must say."""


@contextmanager
def damaged(pair: LyingPair, name: str) -> Iterator[None]:
    """Have pushes inside meet this damage."""
    assert pair.pusher._pusher is not None
    links = pair.pusher._pusher._links
    if name == "flipped_bit":
        for link in links:
            if link._group is not None:
                link._group = FlippingGroup(link._group)
    weights, plan = pair.pusher._weights, pair.pusher._plan
    if name in _CHANGES:
        pair.pusher._weights = _Changed(pair.policy, _CHANGES[name])  # type: ignore[assignment]
        pair.pusher._plan = pair.pusher._weights.plan
    yield
    pair.pusher._weights, pair.pusher._plan = weights, plan


class FlippingGroup:
    """A broadcast group whose first bucket arrives with another byte than was sent."""

    def __init__(self, group: BroadcastGroup) -> None:
        self.device = group.device
        self._group = group
        self._is_first = True

    def broadcast(self, flat: Tensor) -> None:
        sent = flat.clone()
        if self._is_first:
            sent[len(sent) // 2] ^= 1
            self._is_first = False
        self._group.broadcast(sent)

    def close(self) -> None:
        self._group.close()


class _Changed(PlainPolicy):
    """A learner that sends one parameter otherwise than the model has it."""

    def __init__(self, policy: PlainPolicy, change: Callable[[dict[str, Tensor]], None]) -> None:
        super().__init__(policy.model)
        self._change = change

    @property
    def plan(self) -> Any:
        return self._planned()[0]

    def buckets(self, is_sender: bool) -> Any:
        return self._planned()[1]

    def _planned(self) -> Any:
        from tests.fakes.planned_weights import planned

        named = dict(self.model.named_parameters())
        self._change(named)
        return planned(named.items(), 1 << 20)


def _rename(named: dict[str, Tensor]) -> None:
    named[_NAME.replace("down_proj", "down_projection")] = named.pop(_NAME)


def _reshape(named: dict[str, Tensor]) -> None:
    named[_NAME] = torch.zeros(7, 11)


_CHANGES: dict[str, Callable[[dict[str, Tensor]], None]] = {
    "missing_parameter": lambda named: named.__delitem__(_NAME),
    "renamed_parameter": _rename,
    "misshapen_parameter": _reshape,
}
