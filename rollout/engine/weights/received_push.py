"""What one push has brought to a worker so far, as plain buckets: no vLLM here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from protocol.weights.digest import WeightDigest
from protocol.weights.wire import Bucket, bucket_num_bytes


class ReceivedPush:
    """What one push has brought so far: its digest, and whether that was confirmed by the learner's."""

    def __init__(self) -> None:
        self.digest: str | None = None
        self.is_confirmed = False

    def buckets(
        self, plan: Sequence[Bucket], device: str | torch.device, broadcast: Callable[[torch.Tensor], None]
    ) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Yield each bucket with its bytes as they come."""
        digest = WeightDigest(plan)
        for bucket in plan:
            flat = torch.empty(bucket_num_bytes(bucket), dtype=torch.uint8, device=device)
            broadcast(flat)
            digest.add(flat)
            yield bucket, flat
        self.digest = digest.hexdigest()

    def confirm(self, expected: str) -> None:
        """Raises: ValueError when something else was sent than received."""
        if self.digest is None or self.digest != expected:
            raise ValueError(f"weight digest differs: sent {expected or 'nothing'}, received {self.digest}")
        self.is_confirmed = True
