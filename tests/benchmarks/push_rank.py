"""One of the two learner ranks of `tests.benchmarks.push`: a real policy in a ZeRO stage, pushed again and again."""

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from learner.models.micro_batch import LearnerSample, make_micro_batch
from learner.models.policy import PolicyEngine
from learner.models.settings import PolicySettings
from learner.models.weights.pushed import PushedWeights
from learner.models.world import join_world
from learner.weights.push import WeightPusher
from learner.weights.rendezvous import GlooRendezvous
from protocol.weights.group import BroadcastGroup, open_store
from protocol.weights.wire import bucket_num_bytes
from tests.benchmarks.push_server import MeasuredLine, peak_bytes, reset_peak
from tests.fakes.policy_settings import small_policy_settings

NUM_RANKS = 2
_HOST = "127.0.0.1"
_DEADLINE_S = 120.0
_NUM_UNMEASURED = 2  # pushes: the first take memory that a machine may not have had in use before
_PROBE = [20, 21, 14, 22, 23, 32, 40, 41, 90, 17, 250, 100] * 2


@dataclass(frozen=True)
class RankTask:
    """What the two ranks are to do. servers: name and port of each."""

    model: Path
    zero_stage: Literal[0, 2, 3]
    servers: tuple[tuple[str, int], ...]
    bucket_bytes: int
    num_pushes: int  # in each group shape, after those that are not measured
    port: int  # where the ranks meet
    backend: Literal["gloo", "ipc"]  # of the pushes; the plain transfer is over gloo


@dataclass(frozen=True)
class Pushed:
    """What pushes in one group shape took; medians over the pushes, largest values for everything else."""

    shares_group: bool
    num_bytes: int
    largest_bucket: int  # bytes
    push_s: float
    plain_s: float  # to move the same bytes once in groups of the same shape
    pause_s: float
    longest_pause_s: float
    rank_extra: int  # bytes that a rank had more while it pushed
    server_extra: int  # bytes that an engine's process had more
    num_unsynced: int  # servers that did not take a push, over all pushes
    has_equal_digests: bool  # what was sent, and what the policy is
    probe_difference: float  # nats


def run_rank(rank: int, task: RankTask, pipe: Connection) -> None:
    """Push in both group shapes; rank 0 sends a `Pushed` for each."""
    torch.set_num_threads(1)
    join_world(rank, NUM_RANKS, _HOST, task.port, 300.0)
    policy = PolicyEngine(_settings(task))
    for shares_group in (False, True):
        found = _Pushes(rank, policy, task, shares_group).run()
        if found is not None:
            pipe.send(found)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # DeepSpeed's threads may be slow to end, and nothing is left to be done


class _Pushes:
    def __init__(self, rank: int, policy: PolicyEngine, task: RankTask, shares_group: bool) -> None:
        self._rank, self._policy, self._task, self._shares_group = rank, policy, task, shares_group
        self._weights: PushedWeights = policy.pushed_weights(task.bucket_bytes)
        self._sizes = [bucket_num_bytes(bucket) for bucket in self._weights.plan]
        self._lines = [MeasuredLine(name, _HOST, port) for name, port in task.servers]
        self._store, self._port = open_store(_HOST, _DEADLINE_S) if rank == 0 else (None, 0)  # for the plain transfers

    def run(self) -> Pushed | None:
        pusher = None
        if self._rank == 0:
            pusher = WeightPusher(self._lines, _HOST, self._task.backend, _DEADLINE_S, shares_group=self._shares_group)
        each: list[dict[str, Any]] = []
        for number in range(_NUM_UNMEASURED + self._task.num_pushes):
            plain_s = self._plainly(pusher)
            pushed = {**self._push(pusher, number + 1), "plain_s": plain_s}
            each += [pushed] * (number >= _NUM_UNMEASURED)
        if pusher is None:
            return None
        pusher.close()
        return Pushed(
            shares_group=self._shares_group,
            num_bytes=sum(self._sizes),
            largest_bucket=max(self._sizes),
            push_s=statistics.median(one["push_s"] for one in each),
            plain_s=statistics.median(one["plain_s"] for one in each),
            pause_s=statistics.median(one["pause_s"] for one in each),
            longest_pause_s=max(one["pause_s"] for one in each),
            rank_extra=max(one["rank_extra"] for one in each),
            server_extra=max(one["server_extra"] for one in each),
            num_unsynced=sum(one["num_unsynced"] for one in each),
            has_equal_digests=all(one["has_equal_digests"] for one in each),
            probe_difference=max(one["probe_difference"] for one in each),
        )

    def _push(self, pusher: WeightPusher | None, version: int) -> dict[str, Any]:
        self._change_weights()
        expected, digest = self._expected_logprobs(), self._policy.pushed_digest()
        before = reset_peak("self")
        if pusher is not None:
            pusher._run(_each(line.reset_peak() for line in self._lines))
        dist.barrier()
        if pusher is None:
            for _ in self._weights.buckets(is_sender=False):
                pass
        else:
            report = pusher.push(version, self._weights.plan, self._weights.buckets(is_sender=True))
        extra = torch.tensor([peak_bytes("self") - before])
        dist.all_reduce(extra, op=dist.ReduceOp.MAX)
        if pusher is None:
            return {}
        answers: list[list[float]] = []
        pusher.verify(version, _PROBE, lambda name, logprobs: answers.append(list(logprobs)))
        server_extra = pusher._run(_each(line.extra_bytes() for line in self._lines))
        differences = [abs(a - b) for answer in answers for a, b in zip(expected, answer, strict=True)]
        if report.failed:
            print(f"push {version}: {report.failed}", flush=True)
        return {
            "push_s": report.push_s,
            "pause_s": report.pause_s,
            "rank_extra": int(extra),
            "server_extra": max(server_extra),
            "num_unsynced": len(self._lines) - len(answers),
            "has_equal_digests": report.digest == digest,
            "probe_difference": max(differences, default=float("inf")),
        }

    def _plainly(self, pusher: WeightPusher | None) -> float:
        """Return how long the bytes of a push take through new groups of the same shape and nothing else."""
        dist.barrier()
        seconds = 0.0
        if pusher is not None:
            groups = [self._lines] if self._shares_group else [[line] for line in self._lines]
            seconds = pusher._run(_pass_on(groups, _HOST, self._port, self._sizes, _DEADLINE_S))
        dist.barrier()
        return seconds

    def _change_weights(self) -> None:
        with torch.no_grad():
            for parameter in self._policy._model.parameters():
                getattr(parameter, "ds_tensor", parameter).mul_(1.001)

    def _expected_logprobs(self) -> list[float]:
        is_written = np.ones(len(_PROBE), np.bool_)
        is_written[0] = False
        sample = LearnerSample(np.array(_PROBE, np.int32), is_written, np.zeros(len(_PROBE), np.float32), 0.0)
        return [float(logprob) for logprob in self._policy.logprobs(make_micro_batch([sample]), temperature=1.0)]


async def _pass_on(
    groups: Sequence[Sequence[MeasuredLine]], host: str, port: int, sizes: Sequence[int], deadline_s: float
) -> float:
    """Broadcast so many bytes each time to each group, all groups at once; returns how long that took, in seconds.

    Groups are formed anew over the store at `port`, which is not in the time.
    """
    flat = torch.ones(max(sizes), dtype=torch.uint8)
    met, takings = [], []
    for group in groups:
        meeting = GlooRendezvous(host, port, len(group), 1, deadline_s)
        for place, line in enumerate(group):
            takings.append(asyncio.create_task(line.take_plainly(meeting.init(place), sizes)))
        met.append(await asyncio.to_thread(meeting.join))

    def send(group: BroadcastGroup) -> None:
        for size in sizes:
            group.broadcast(flat[:size])

    begun = time.perf_counter()
    await asyncio.gather(*(asyncio.to_thread(send, group) for group in met), *takings)
    return time.perf_counter() - begun


async def _each(calls: Any) -> Sequence[Any]:
    return await asyncio.gather(*calls)


def _settings(task: RankTask) -> PolicySettings:
    return small_policy_settings(task.model, zero_stage=task.zero_stage, lr=1e-6)
