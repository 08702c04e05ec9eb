"""The plain transfer that pushes are held against: the same bytes once, out of memory and into memory."""

import asyncio
import time
from collections.abc import Sequence

import torch

from learner.weights.rendezvous import GlooRendezvous
from protocol.weights.group import BroadcastGroup
from tests.benchmarks.push_server import MeasuredLine


async def pass_on(
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
