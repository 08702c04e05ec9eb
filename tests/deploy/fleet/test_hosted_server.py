"""What a rollout server's process does beside the server's own methods."""

import asyncio
import gc
from typing import Any

from deploy.fleet.servers import host_class


class Served:
    """A server's class; `num_starts` as any state of its own."""

    num_starts = 0

    async def start(self, files: object) -> dict[str, Any]:
        """Return what it is told of its start."""
        self.num_starts += 1
        return {"is_started": True}


def test_start_keeps_what_is_in_memory_out_of_searches_for_garbage_once() -> None:
    assert not gc.get_freeze_count()
    server: Any = host_class(f"{__name__}:Served")()
    try:
        assert asyncio.run(server.start()) == {"is_started": True}
        num_frozen = gc.get_freeze_count()
        assert num_frozen > 10_000
        asyncio.run(server.start())
        assert (gc.get_freeze_count(), server.num_starts) == (num_frozen, 2)
    finally:
        gc.unfreeze()
