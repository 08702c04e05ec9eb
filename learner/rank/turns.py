"""Whose turn it is on a device that a learner rank shares with a rollout server.

Learning: the servers sleep and the models are on the device. Generating: the models are in the host's memory and the
servers are awake. Every rank changes turns at the same places of the step, and waits for the others there.
"""

import time
from collections.abc import Callable
from typing import Protocol

from learner.models.parked import ParkedModels
from learner.weights.push import DeviceTurn
from protocol.failpoints import failpoint


class DeviceTurns(Protocol):
    """Collective: every rank calls the same. Each blocks until the device is as it says."""

    def learn(self) -> float:
        """Have the models on the device; the servers have given it up. Returns the seconds that the change took."""
        ...

    def generate(self) -> None:
        """Have the servers on the device; the models have given it up."""
        ...


class OwnDevice:
    """A rank that shares its device with nobody."""

    def learn(self) -> float:
        """The models are there."""
        return 0.0

    def generate(self) -> None:
        """The servers never went."""


class SharedDevice:
    """It is the learner's turn at first: the run's command has had the servers sleep before the models were loaded."""

    def __init__(
        self, models: ParkedModels, have_servers: Callable[[DeviceTurn], object], meet: Callable[[], object]
    ) -> None:
        """have_servers: has all servers sleep or wake, on rank 0. meet: returns once every rank has called it."""
        self._models = models
        self._have_servers = have_servers
        self._meet = meet
        self._is_learning = True

    def learn(self) -> float:
        if self._is_learning:
            return 0.0
        started = time.monotonic()
        failpoint("device_turn.learn_begun")
        self._have_servers("sleep")
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
            self._have_servers("wake")
            failpoint("device_turn.servers_awake")
            self._is_learning = False
