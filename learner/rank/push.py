"""A rank's part in a weight push: all ranks gather, rank 0 sends, and the probe's logprobs are compared.

The probe is a natural text whose logprobs show whether a server computes with the pushed weights. A digest shows that
the bytes arrived; a server may still load them wrongly.

The first test compares the median and the 95th percentile of the differences with a tolerance: rounding moves a few
tokens far, for example through another expert, and wrong weights move most tokens. The second, for smaller faults,
projects the differences onto the push's change of the learner's logprobs. The coefficient is the missing part of the
change: 1 for the old weights, 0 for the new ones.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from learner.models.micro_batch import LearnerSample, make_micro_batch
from learner.models.policy import PolicyEngine
from learner.rank.device_switch import OwnDevice
from learner.rank.same_tokens import read_tokenizer
from learner.weights.card import OwnCard
from learner.weights.feed import default_bucket_bytes
from learner.weights.push import DeviceTurn, PushReport, WeightPusher
from protocol.errors import NeighbourError
from protocol.settings.settings import Settings
from protocol.weights.controls import ServerControls

_MAX_WRONG = 2
# More than a block of vLLM's cache (128 tokens on CPUs), to notice cached older weights.
_NUM_TOKENS = 136
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}  # nats, for the median of the differences
_TAIL_TOLERANCES = 3.0  # largest 95th percentile, in tolerances
_MAX_TOLERANCES, _MAX_NATS = 10.0, 5.0  # largest difference: the larger of the two, in tolerances and in nats
# Noise is a good server's usual difference. Change and noise are root mean squares, without outliers.
_MIN_CHANGE = 4.0  # smallest change that the second test uses, in units of noise
_MIN_NOISE = 1e-3  # lower bound of the noise, as a share of the tolerance
_NUM_READINGS = 256  # newest readings of good servers, which estimate the noise
# Largest missing part that is not a fault, as a share of the change and in standard deviations of the part's noise.
_MAX_GOOD_PART = 0.1
_MAX_GOOD_DEVIATIONS = 8.0
# Share of outlier tokens: rounding can send a token to another expert. Other weights show in all tokens.
_OUTLIER_SHARE = 0.05
# Prose, numbers, code and other scripts. Random tokens are the worst case of rounding in bfloat16.
_TEXT = """\
The Danube rises in the Black Forest and flows through ten countries before it reaches the Black Sea, 2,850 km away.
Ships carry grain, ore and cars on it, and four capitals stand on its banks: Vienna, Bratislava, Budapest and Belgrade.

def mean(values):
    return sum(values) / len(values)  # fails for an empty list

Question: A train leaves at 9:40 and arrives at 12:05. How long does the journey take?
Answer: From 9:40 to 12:00 are 2 hours and 20 minutes, and 5 minutes more make 2 hours and 25 minutes.
Le chat dort sur la chaise. Die Straße ist naß. 今天天气很好。 Сегодня холодно.
Each spring the ice breaks, the river rises, and the farmers of the delta wait until the fields are dry again.
"""


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
        card: OwnCard | None = None,
    ) -> None:
        """servers: empty on every rank but 0. address: this node's, where the servers meet rank 0. text: the probe's.
        learner: as in `WeightPusher`. card: this rank's, where every rank sends to the servers on its card.
        """
        self.device = OwnDevice()
        weights = settings.weights
        self._policy, self._card = policy, card
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
                card=card,
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
            gathered = self._weights.buckets(is_sender=self._card is not None)
            if self._card is not None:
                self._card.pass_on(self._plan, gathered)
            for _ in gathered:  # ZeRO 3: every rank takes part in every gather
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
        if self._card is not None:
            self._card.close()


def natural_text(model: Path, *, trust_remote_code: bool = False) -> list[int]:
    """Return the tokens of a fixed text of about 200 words, by the tokenizer of the folder `model`."""
    tokenizer = read_tokenizer("policy.model", model, trust_remote_code)
    tokens: list[int] = tokenizer(_TEXT)["input_ids"]
    return tokens


class Probe:
    """The text, the learner's logprobs of it, and the tolerance in nats."""

    def __init__(self, policy: PolicyEngine, settings: Settings, text: Sequence[int]) -> None:
        """text: as `natural_text` returns it."""
        weights = settings.weights
        self._policy = policy
        self._tolerance = weights.probe_tolerance or _TOLERANCE[settings.policy.dtype]
        num_tokens = min(_NUM_TOKENS, settings.rollout.max_context_tokens - 1) if weights.probe else 0
        self.tokens = list(text[:num_tokens])
        self._expected = np.zeros(0)
        self._change = np.zeros(0)  # change of the learner's logprobs at the last push that changed them
        self._readings: deque[float] = deque(maxlen=_NUM_READINGS)  # RMS differences of good servers

    def compute_expected(self) -> None:
        """Compute the learner's logprobs of tokens[1:]. Collective in ZeRO 3."""
        if not self.tokens:
            return
        is_written = np.ones(len(self.tokens), np.bool_)
        is_written[0] = False
        nothing = np.zeros(len(self.tokens), np.float32)
        sample = LearnerSample(np.array(self.tokens, np.int32), is_written, nothing, 0.0)
        logprobs = self._policy.logprobs(make_micro_batch([sample]), temperature=1.0)
        before, self._expected = self._expected, np.array([float(logprob) for logprob in logprobs])
        # Repeated weights keep the change: a server may have missed the first push.
        if before.size and np.any(change := self._expected - before):
            self._change = change

    def find_fault(self, server: str, logprobs: Sequence[float]) -> str | None:
        """Return how a server's logprobs of tokens[1:] differ from the learner's, or None."""
        if len(logprobs) != self._expected.size:
            return f"{server} answered {len(logprobs)} logprobs, expected {self._expected.size}"
        differences = np.array(logprobs) - self._expected
        usual, tail, largest = np.quantile(np.abs(differences), (0.5, 1 - _OUTLIER_SHARE, 1.0))
        text = (
            f"{server} computes other logprobs than the learner after the push: they differ by {usual:.2g} nats in the "
            f"median, {tail:.2g} in the 95th percentile and up to {largest:.2g}"
        )
        limits = self._tolerance, _TAIL_TOLERANCES * self._tolerance, max(_MAX_TOLERANCES * self._tolerance, _MAX_NATS)
        if not (usual <= limits[0] and tail <= limits[1] and largest <= limits[2]):  # a NaN is not a match either
            allowed = ", ".join(f"{limit:g}" for limit in limits)
            return f"{text}, allowed are {allowed}. Set weights.probe_tolerance if the precision explains it"
        if (part := self._missing_part(differences)) is not None:
            return f"{text}, as if {part:.0%} of the push's change were missing: some weights are of another version"
        self._readings.append(_rms(differences[_inliers(differences)]))
        return None

    def _missing_part(self, differences: NDArray[np.float64]) -> float | None:
        """Return the part of the push's change that the server lacks; None within the noise.

        Negative: it made that part twice.
        """
        noise = max(_MIN_NOISE * self._tolerance, *self._readings, 0.0)
        if not self._change.size or _rms(self._change[_inliers(self._change)]) < _MIN_CHANGE * noise:
            return None
        max_good = max(_MAX_GOOD_PART, _MAX_GOOD_DEVIATIONS * noise / float(np.linalg.norm(self._change)))
        part = _projection(differences, self._change)
        # The part must also show without the tokens that contribute most to it.
        inliers = _inliers(differences * self._change)
        inlier_part = _projection(differences[inliers], self._change[inliers])
        return part if abs(part) > max_good and abs(inlier_part) > max_good / 2 else None


def _projection(differences: NDArray[np.float64], change: NDArray[np.float64]) -> float:
    """Return c of the least-squares fit differences = -c * change; 0 for a change of zeros."""
    return -float(differences @ change) / (float(change @ change) or 1.0)


def _inliers(values: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the indexes of all but the largest 5 % by absolute value."""
    return np.argsort(np.abs(values))[: values.size - math.ceil(_OUTLIER_SHARE * values.size)]


def _rms(values: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(values**2)))
