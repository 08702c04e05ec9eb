"""What a weight push costs against moving its bytes once: models of 3M, 30M and 300M parameters to two servers.

    python -m tests.benchmarks.push [--sizes 3,30,300] [--ways second_copy,in_place] [--stages 0,2,3]
        [--bucket-mb 16] [--pushes 5]

Real parts throughout: two DeepSpeed ranks that hold the model in ZeRO 0, 2 and 3, gloo, two vLLM engines, on the CPU;
models of random weights in float32, tied and untied; a group for each server, and one that all share. Before each push
the same bytes go once through new groups of the same shape, out of memory and into memory that are there already: the
plain transfer. second_copy, in_place, ipc: how a server receives (`weights.second_copy`, `weights.backend`).

holds, case by case: the digest of what was sent is the policy's own and every server's; the probe differs by at most
1e-4 nats; a push takes at most 1.5 times the plain transfer and 60 ms; generation stands still for at most the plain
transfer and 60 ms (medians over the pushes); a process grows by at most two buckets and 16 MiB meanwhile, and with
second_copy an engine by the model besides. About 20 GB of memory and a quarter of an hour on two quiet cores.
--short: 3M, tied, and no time is asked for.
"""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Literal

from tests.benchmarks.push_rank import NUM_RANKS, Pushed, RankTask, run_rank
from tests.benchmarks.push_server import served_models
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.ports import free_port
from tests.fakes.tiny_models import make_tiny_model

_STAGES: dict[str, Literal[0, 2, 3]] = {"0": 0, "2": 2, "3": 3}
_FORMS = {
    3: {"hidden_size": 256, "num_layers": 3, "vocab_size": 2048},
    30: {"hidden_size": 512, "num_layers": 8, "vocab_size": 4096},
    300: {"hidden_size": 1536, "num_layers": 9, "vocab_size": 16384},
}
_WIDTH = 0.02  # of the weights: deep models of wider ones lose digits of float32 by themselves
_NUM_SERVERS = 2
_MAX_TIMES, _MAX_MORE_S = 1.5, 0.06
_MAX_DIFFERENCE = 1e-4
_MORE_BYTES = 16 << 20
_RANK_LIMIT_S = 600.0


def main() -> int:
    asked = options(
        __doc__ or "", sizes="3,30,300", ways="second_copy,in_place", stages="0,2,3", bucket_mb=16, pushes=5
    )
    sizes = [3] if asked.short else [int(size) for size in asked.sizes.split(",")]
    num_pushes = 1 if asked.short else asked.pushes
    stages = [_STAGES[stage] for stage in (("3",) if asked.short else asked.stages.split(","))]
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the fleet's processes have it
    num_held = num_cases = 0
    for size, is_tied, way in product(sizes, (True,) if asked.short else (True, False), asked.ways.split(",")):
        with tempfile.TemporaryDirectory() as name:
            model = make_tiny_model(Path(name), tied=is_tied, width=_WIDTH, seed=asked.seed, **_FORMS[size])
            with served_models(model, _NUM_SERVERS, way) as servers:
                for stage in stages:
                    backend: Literal["gloo", "ipc"] = "ipc" if way == "ipc" else "gloo"
                    task = RankTask(
                        model, stage, tuple(servers), asked.bucket_mb << 20, num_pushes, free_port(), backend
                    )
                    for found in _pushed(task):
                        form = f"{size}M {'tied' if is_tied else 'untied'} {way} zero_stage={stage}"
                        missed = _missed(found, way, with_times=not asked.short)
                        _tell(form, found, missed)
                        num_held, num_cases = num_held + (not missed), num_cases + 1
    return conclude("push", num_held == num_cases > 0, cases=num_cases, held=num_held)


def _pushed(task: RankTask) -> Iterator[Pushed]:
    """Yield what pushes of these ranks took, in each group shape."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    ranks = [spawn.Process(target=run_rank, args=(rank, task, theirs), daemon=True) for rank in range(NUM_RANKS)]
    for rank in ranks:
        rank.start()
    theirs.close()
    try:
        for _ in range(2):
            if not ours.poll(_RANK_LIMIT_S):
                raise RuntimeError(f"the ranks pushed nothing within {_RANK_LIMIT_S:g} s")
            yield ours.recv()
        for rank in ranks:
            rank.join(30.0)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
        ours.close()


def _missed(found: Pushed, way: str, with_times: bool) -> list[str]:
    """Return the names of the limits that a case missed."""
    two_buckets = 2 * found.largest_bucket + _MORE_BYTES
    kept = {
        "servers": found.num_unsynced == 0,
        "digest": found.has_equal_digests,
        "probe": found.probe_difference <= _MAX_DIFFERENCE,
        "time": not with_times or found.push_s <= _MAX_TIMES * found.plain_s + _MAX_MORE_S,
        "pause": not with_times or found.pause_s <= found.plain_s + _MAX_MORE_S,
        "rank_memory": found.rank_extra <= two_buckets,
        "server_memory": found.server_extra <= two_buckets + (found.num_bytes if way == "second_copy" else 0),
    }
    return [name for name, is_kept in kept.items() if not is_kept]


def _tell(form: str, found: Pushed, missed: list[str]) -> None:
    print(
        f"{form} {'shared_group' if found.shares_group else 'group_each'}: push_ms={1e3 * found.push_s:.0f} "
        f"plain_ms={1e3 * found.plain_s:.0f} pause_ms={1e3 * found.pause_s:.0f} "
        f"longest_pause_ms={1e3 * found.longest_pause_s:.0f} model_mib={found.num_bytes >> 20} "
        f"bucket_mib={found.largest_bucket >> 20} rank_extra_mib={found.rank_extra >> 20} "
        f"server_extra_mib={found.server_extra >> 20} probe={found.probe_difference:.1e} missed={missed or 'nothing'}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
