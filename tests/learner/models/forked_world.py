"""A world of learner ranks, each forked from this process, which has imported everything and computed nothing."""

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from learner.models.world import join_world
from tests.fakes.ports import free_port


def run_world(
    world_size: int, folder: Path, name: str, work: Callable[[Path], dict[str, Any]], limit_s: int = 0
) -> None:
    """Run so many ranks. limit_s: after which each ends, and the world with it; 0: none."""
    host, port = "127.0.0.1", free_port()
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            signal.alarm(limit_s)
            os._exit(_run_rank(rank, world_size, (host, port), folder / f"{name}.pt", lambda: work(folder)))
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        raise SystemExit(f"ranks of {name} ended with {codes}")


def _run_rank(
    rank: int, world_size: int, address: tuple[str, int], path: Path, work: Callable[[], dict[str, Any]]
) -> int:
    try:
        torch.set_num_threads(1)
        join_world(rank, world_size, *address, 120.0)
        found = work()
        if rank == 0:
            torch.save(found, path)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
