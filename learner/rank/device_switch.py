"""Alternation of a learner rank and a rollout server on a device that both use.

While the rank learns, the servers sleep and the models are on the device. While the servers generate, the models are in
host memory. All ranks switch at the same places of the step, and wait for each other there.
"""

import time
from collections.abc import Callable

from learner.models.parked import ParkedModels
from learner.weights.push import DeviceTurn
from protocol.failpoints import failpoint


class OwnDevice:
    """A device that no server uses. Every rank calls the same method."""

    def learn(self) -> float:
        """Put the models on the device, after the servers released it; return the seconds of the switch."""
        return 0.0

    def generate(self) -> None:
        """Let the servers use the device, after the models left it. Only rank 0 waits until they are awake."""


class SharedDevice(OwnDevice):
    """A device that the rank and a server use alternately. The rank learns first: the servers sleep when it starts."""

    def __init__(
        self, models: ParkedModels, switch_servers: Callable[[DeviceTurn], object], meet: Callable[[], object]
    ) -> None:
        """switch_servers: makes all servers sleep or wake, on rank 0. meet: returns once every rank has called it."""
        self._models = models
        self._switch_servers = switch_servers
        self._meet = meet
        self._is_learning = True

    def learn(self) -> float:
        if self._is_learning:
            return 0.0
        started = time.monotonic()
        failpoint("device_turn.learn_begun")
        self._switch_servers("sleep")
        failpoint("device_turn.servers_asleep")
        self._meet()
        self._models.restore()
        failpoint("device_turn.models_restored")
        self._is_learning = True
        return time.monotonic() - started

    def generate(self) -> None:
        if self._is_learning:
            self._models.park()
            self._meet()
            failpoint("device_turn.models_parked")
            self._switch_servers("wake")
            failpoint("device_turn.servers_awake")
            self._is_learning = False
