"""One of two learner ranks that share the devices of a real server of two workers, and push to it. Run by test_drift.

python pushing_ranks.py RANK PORT MODEL    rank 0 has the server, and prints which servers took each push
"""

import asyncio
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from learner.models.policy import PolicyEngine
from learner.models.world import join_world, share_object
from learner.rank.push import RankPusher, natural_text
from learner.weights.card import OwnCard
from protocol.settings.settings import Settings
from protocol.weights.controls import ServerControls
from rollout.engine.engine import Engine
from tests.fakes.in_process_server import InProcessServer
from tests.fakes.policy_settings import small_policy_settings
from tests.fakes.tiny_models import engine_of

_NUM_RANKS = 2


async def serve(rank: int, port: int, model: Path) -> None:
    engine, servers = None, list[ServerControls]()
    if rank == 0:
        of_two = {"tensor_parallel_size": _NUM_RANKS, "weights_backend": "ipc"}
        engine = await Engine.start(engine_of(model, second_copy=False).model_copy(update=of_two))
        servers = [InProcessServer("sluice-rollout-0", engine)]
    # Afterwards: an engine's workers would take the ranks' variables of the environment for theirs.
    join_world(rank, _NUM_RANKS, "127.0.0.1", port, 600.0)
    policy = PolicyEngine(small_policy_settings(model, zero_stage=3))
    card = OwnCard(f"pushing-ranks-{share_object(model)}", rank, 60.0, share_object)
    rollout = {"tensor_parallel_size": _NUM_RANKS, "num_servers": 1}
    settings = Settings.model_validate({"policy": {"model": str(model)}, "rollout": rollout})
    pusher = RankPusher(policy, settings, servers, "127.0.0.1", "ipc", natural_text(model), card=card)
    for version in (1, 2):
        # A server without the learner's logprobs is an error: it began with other weights.
        report = await asyncio.to_thread(pusher.push, version)
        if report is not None:
            print(f"version {version}: {report.synced} {report.failed}", flush=True)
    await asyncio.to_thread(pusher.close)
    if engine is not None:
        engine.shutdown()
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
