"""The engine as a rollout server needs it."""

from typing import Protocol

from protocol.weights.controls import WeightControls
from rollout.episodes.sample import Generator


class ServedEngine(Generator, WeightControls, Protocol):
    """The engine as a server needs it: generation and weight control."""

    @property
    def generates_while_receiving(self) -> bool: ...

    def forget_weights(self) -> None: ...

    def shutdown(self) -> None: ...
