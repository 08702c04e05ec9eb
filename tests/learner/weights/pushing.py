"""Pushes of three small tensors to fake servers."""

from collections.abc import Callable, Sequence

import torch

from learner.weights.push import PushReport, WeightPusher
from protocol.weights.wire import TensorMeta
from tests.fakes.planned_weights import plan_buckets
from tests.fakes.waiting import wait_until
from tests.learner.weights.fake_server import FakeServer

DEADLINE_S = 20.0
SHORT_DEADLINE_S = 3.0  # where a test waits for it to pass; still long enough for a healthy server on a busy machine
SILENCE_S = 1.0
METAS = [TensorMeta("a", "float32", (64, 8)), TensorMeta("b", "bfloat16", (100,)), TensorMeta("c", "float32", (300,))]
PLAN = plan_buckets(METAS, 2100)  # a; b and c


def make_pusher(
    pushers: list[WeightPusher], servers: Sequence[FakeServer], deadline_s: float = DEADLINE_S
) -> WeightPusher:
    pusher = WeightPusher(servers, "127.0.0.1", "gloo", deadline_s, silence_s=SILENCE_S)
    pushers.append(pusher)
    return pusher


def weights(value: float) -> dict[str, torch.Tensor]:
    return {meta.name: torch.full(meta.shape, value) for meta in METAS}


def push(pusher: WeightPusher, version: int) -> PushReport:
    named = list(weights(float(version)).items())
    return pusher.push(version, PLAN, iter([named[:1], named[1:]]))


def push_until_synced(push: Callable[[int], PushReport], version: int, *names: str) -> int:
    """Push versions after this one until all these servers take one; returns it."""

    def is_synced() -> bool:
        nonlocal version
        version += 1
        return push(version).synced == names

    wait_until(is_synced)
    return version


def holds(server: FakeServer, version: int) -> bool:
    return server.version == version and all(bool((tensor == version).all()) for tensor in server.weights.values())
