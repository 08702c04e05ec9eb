"""A rank's part in a weight push: all ranks gather, rank 0 sends, and what the servers then compute is compared."""

from collections.abc import Sequence

import numpy as np

from learner.models.policy import PolicyEngine
from learner.packing.micro_batch import LearnerSample, make_micro_batch
from learner.weights.push import PushReport, WeightPusher
from protocol.errors import NeighbourError
from protocol.settings.settings import Settings
from protocol.weights.controls import ServerControls

_PROBE_TOKENS = 24
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}


class RankPusher:
    """`servers` is empty on every rank but 0. A push blocks at most weights.deadline_s in each of its states."""

    def __init__(
        self, policy: PolicyEngine, settings: Settings, servers: Sequence[ServerControls], address: str, backend: str
    ) -> None:
        """address: of this node, where the servers meet rank 0."""
        weights = settings.weights
        self._policy = policy
        self._tolerance = weights.probe_tolerance or _TOLERANCE[settings.policy.dtype]
        self._probe = _probe_tokens(policy.vocab_size, settings.run.seed) if weights.probe else []
        self._weights = policy.pushed_weights(weights.bucket_mb << 20)
        self._plan = self._weights.plan
        self._has_synced = False
        self.digest = ""  # of what the servers were given last; on rank 0
        self._pusher = (
            WeightPusher(
                servers,
                address=address,
                backend=backend,
                deadline_s=weights.deadline_s,
                workers_per_server=settings.rollout.tensor_parallel_size,
            )
            if servers
            else None
        )

    def leave_out(self, absent: Sequence[str]) -> None:
        """Push to all servers but these from now on."""
        if self._pusher is not None:
            self._pusher.leave_out(absent)

    def push(self, version: int) -> PushReport | None:
        """Give every server the current weights under this version; returns what was done, on rank 0.

        Raises: NonFiniteWeightsError on every rank, before a server hears of it, when the weights are not finite;
        NeighbourError when no server takes the first push, or when one computes other logprobs than the learner.
        Later, servers that died are started again: the coordinator has the weights pushed again then.
        """
        self._policy.check_finite()
        expected = self._expected_logprobs()
        if self._pusher is None:
            for _ in self._weights.buckets(is_sender=False):  # ZeRO 3: every rank takes part in every gather
                pass
            return None
        report = self._pusher.push(version, self._plan, self._weights.buckets(is_sender=True))
        self.digest = report.digest
        self._has_synced |= bool(report.synced)
        if not self._has_synced:
            raise NeighbourError("weight push", f"no server took version {version}: {report.failed}")
        if expected:
            self._compare(expected, version)
        return report

    def close(self) -> None:
        if self._pusher is not None:
            self._pusher.close()

    def _expected_logprobs(self) -> list[float]:
        if not self._probe:
            return []
        is_written = np.ones(len(self._probe), np.bool_)
        is_written[0] = False
        sample = LearnerSample(np.array(self._probe, np.int32), is_written, np.zeros(len(self._probe), np.float32), 0.0)
        return [float(logprob) for logprob in self._policy.logprobs(make_micro_batch([sample]), temperature=1.0)]

    def _compare(self, expected: list[float], version: int) -> None:
        """Raise unless every server's logprobs of the probe are the learner's.

        The digest says that the bytes arrived. They may still have been loaded wrongly, as tied embeddings are when
        only one of their two copies is replaced: requests then succeed, with every logprob off.
        """
        assert self._pusher is not None
        for server, logprobs in self._pusher.probe(self._probe).items():
            difference = max(abs(a - b) for a, b in zip(expected, logprobs, strict=True))
            if not difference <= self._tolerance:  # a NaN is no match either
                raise NeighbourError(
                    server,
                    f"computes other logprobs than the learner after the push of version {version}: they differ by up "
                    f"to {difference:.2g} nats, more than {self._tolerance:g}. Set weights.probe_tolerance if the "
                    "precision explains it",
                )


def _probe_tokens(vocab_size: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab_size, _PROBE_TOKENS)]
