"""A rank's part in a weight push: all ranks gather, rank 0 sends, and the servers' logprobs are compared."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from learner.models.policy import PolicyEngine
from learner.rank.device_switch import DeviceSwitch, OwnDevice
from learner.rank.probe import Probe
from learner.weights.buckets import default_bucket_bytes
from learner.weights.push import DeviceTurn, PushReport, WeightPusher
from protocol.errors import NeighbourError
from protocol.settings.settings import Settings
from protocol.weights.controls import ServerControls

_MAX_WRONG = 2


class RankPusher:
    """Pushes the policy to rollout servers. A push blocks at most weights.deadline_s in each of its states."""

    def __init__(
        self,
        policy: PolicyEngine,
        settings: Settings,
        servers: Sequence[ServerControls],
        address: str,
        backend: str,
        text: Sequence[int],
        learner: str = "",
    ) -> None:
        """servers: empty on every rank but 0. address: this node's, where the servers meet rank 0. text: the probe's.
        learner: as in `WeightPusher`.
        """
        self.device: DeviceSwitch = OwnDevice()
        weights = settings.weights
        self._policy = policy
        self._probe = Probe(policy, settings, text)
        bucket_bytes = weights.bucket_mb << 20 if weights.bucket_mb else default_bucket_bytes(backend)
        self._weights = policy.pushed_weights(bucket_bytes)
        self._plan = self._weights.plan
        self._has_synced = False
        self._num_wrong = 0  # pushes in a row after which all servers computed other logprobs
        self._names_now: Callable[[], tuple[str, ...]] | None = None  # None: the servers never change
        self._reach: Callable[[str], ServerControls] | None = None
        self._names: tuple[str, ...] = ()  # names of the servers at the last push
        self._controls = {server.name: server for server in servers}
        self.digest = ""  # digest of the last pushed weights; on rank 0
        self._pusher = (
            WeightPusher(
                servers,
                address=address,
                backend=backend,
                deadline_s=weights.deadline_s,
                workers_per_server=settings.rollout.tensor_parallel_size,
                learner=learner,
            )
            if servers
            else None
        )

    def follow(self, names_now: Callable[[], tuple[str, ...]], reach: Callable[[str], ServerControls]) -> None:
        """Push to the servers that `names_now` returns when a push begins. reach: returns a server's controls."""
        self._names_now, self._reach, self._names = names_now, reach, names_now()

    def _use_named(self) -> None:
        """Add new servers and remove absent ones. An unreachable server is retried at the next push."""
        if self._pusher is None or self._names_now is None or (wanted := self._names_now()) == self._names:
            return
        assert self._reach is not None
        for name in set(self._controls) - set(wanted):
            del self._controls[name]
        for name in wanted:
            if name not in self._controls:
                with contextlib.suppress(NeighbourError):
                    self._controls[name] = self._reach(name)
        self._pusher.set_servers(list(self._controls.values()))
        if self._controls.keys() == set(wanted):
            self._names = wanted

    def set_absent(self, absent: Sequence[str]) -> None:
        """Skip exactly these servers from now on."""
        if self._pusher is not None:
            self._pusher.set_absent(absent)

    def push(self, version: int) -> PushReport | None:
        """Push the current weights to every server under this version; returns the report on rank 0.

        A server that computes other logprobs than the learner counts as failed: it serves nothing of the version, and
        receives the next push.
        Raises: NonFiniteWeightsError on every rank before a server is called; NeighbourError when no server accepts the
        first push, or when all of them compute other logprobs twice in a row. Later, crashed servers are started again,
        and the coordinator requests another push.
        """
        self.device.learn()
        self._policy.check_finite()
        self._probe.compute_expected()
        if self._pusher is None:
            for _ in self._weights.buckets(is_sender=False):  # ZeRO 3: every rank takes part in every gather
                pass
            self.device.generate()
            return None
        self._use_named()
        report = self._pusher.push(version, self._plan, self._weights.buckets(is_sender=True))
        self.device.generate()
        wrong = self._pusher.verify(version, self._probe.tokens, self._probe.find_fault)
        served = tuple(name for name in report.synced if name not in self._pusher.faults)
        # A server that does not wake crashed asleep. It is started again, and is no reason to end the run.
        self._num_wrong = 0 if served else self._num_wrong + bool(wrong)
        self._has_synced |= bool(served)
        failed = {name: fault.reason for name, fault in self._pusher.faults.items()}
        report = replace(report, synced=served, failed=failed)
        self.digest = report.digest
        if not self._has_synced or self._num_wrong >= _MAX_WRONG:
            why = "; ".join(report.failed.values())
            raise NeighbourError("weight push", f"no server took version {version}: {why}")
        return report

    def switch_servers(self, turn: DeviceTurn) -> None:
        """Make all servers sleep or wake, on rank 0. A server that does not gets a fault, as in a push."""
        if self._pusher is not None:
            self._pusher.switch(turn)

    def close(self) -> None:
        if self._pusher is not None:
            self._pusher.close()
