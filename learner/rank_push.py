"""A rank's part in a weight push: all ranks gather, rank 0 sends, and what the servers then hold is probed.

Called by `learner.rank` at the start and after every step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from learner.microbatch import Sample, make_micro_batch
from learner.weight_push import WeightPusher
from protocol.errors import NeighbourError

if TYPE_CHECKING:
    from learner.policy import PolicyEngine
    from learner.rank import RunPlace
    from protocol.settings import Settings

_PROBE_TOKENS = 24
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}


class RankPusher:
    """Blocks in `push` at most weights.deadline_s for each state of it."""

    def __init__(self, policy: PolicyEngine, rank: int, run: RunPlace, settings: Settings) -> None:
        self._policy = policy
        self._weights = settings.weights
        self._bucket_bytes = settings.weights.bucket_mb << 20
        self._tolerance = settings.weights.probe_tolerance or _TOLERANCE[settings.policy.dtype]
        self._probe = _probe_tokens(policy.vocab_size, settings.run.seed) if settings.weights.probe else []
        self._pusher: WeightPusher | None = None
        if rank == 0:
            from learner.cluster import RayServer

            self._pusher = WeightPusher(
                [RayServer(name) for name in run.servers],
                address=run.host,
                backend=run.weights_backend,
                deadline_s=settings.weights.deadline_s,
                bucket_bytes=self._bucket_bytes,
            )

    def push(self, version: int) -> dict[str, float]:
        """Give every server the current weights under this version; returns push_s and pause_s on rank 0.

        Raises: NeighbourError when no server could be synced, or when one computes other logprobs than the learner.
        """
        buckets = self._policy.gather_buckets(self._bucket_bytes)
        expected = self._expected_logprobs()
        if self._pusher is None:
            for _ in buckets:  # ZeRO-3: every rank takes part in every gather
                pass
            return {}
        report = self._pusher.push(version, buckets, self._policy.weight_names_shapes())
        if not report.synced:
            raise NeighbourError("weight push", f"no server took version {version}: {report.failed}")
        if expected is not None:
            self._compare(expected, version)
        return {"push_s": report.push_s, "pause_s": report.pause_s}

    def close(self) -> None:
        if self._pusher is not None:
            self._pusher.close()

    def _expected_logprobs(self) -> list[float] | None:
        if not self._probe:
            return None
        mask = np.ones(len(self._probe), np.bool_)
        mask[0] = False
        sample = Sample(np.array(self._probe, np.int32), mask, np.zeros(len(self._probe), np.float32), 0.0)
        return [float(logprob) for logprob in self._policy.logprobs(make_micro_batch([sample]))]

    def _compare(self, expected: list[float], version: int) -> None:
        """Raise unless every server's logprobs of the probe are the learner's: the bytes that arrived may still have been
        loaded wrongly, as tied embeddings are when only one of their two copies is replaced."""
        assert self._pusher is not None
        for server, logprobs in self._pusher.probe(self._probe).items():
            difference = max(abs(a - b) for a, b in zip(expected, logprobs, strict=True))
            if not difference <= self._tolerance or math.isnan(difference):
                raise NeighbourError(
                    server,
                    f"holds other weights than the learner after the push of version {version}: logprobs of the probe "
                    f"differ by up to {difference:.2g} nats, more than {self._tolerance:g}. Set weights.probe_tolerance "
                    "if the precision explains it",
                )


def _probe_tokens(vocab_size: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab_size, _PROBE_TOKENS)]
