"""The bytes of one push and the shapes that a push may have. This file does not import vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from protocol.weights.digest import WeightDigest
from protocol.weights.wire import Bucket, bucket_num_bytes


class ReceivedPush:
    """The digest of the buckets that one push sent to a worker.

    is_confirmed: whether the digest equals the learner's.
    """

    def __init__(self) -> None:
        self.digest: str | None = None
        self.is_confirmed = False

    def buckets(
        self, plan: Sequence[Bucket], device: str | torch.device, broadcast: Callable[[torch.Tensor], None]
    ) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Yield each bucket with its bytes, uint8, as they arrive."""
        digest = WeightDigest(plan)
        for bucket in plan:
            flat = torch.empty(bucket_num_bytes(bucket), dtype=torch.uint8, device=device)
            broadcast(flat)
            digest.add(flat)
            yield bucket, flat
        self.digest = digest.hexdigest()

    def confirm(self, expected: str) -> None:
        """Accept the push. Raises: ValueError when the received bytes differ from the sent ones."""
        if self.digest is None or self.digest != expected:
            raise ValueError(f"weight digest differs: sent {expected or 'nothing'}, received {self.digest}")
        self.is_confirmed = True


class KnownShapes:
    """The shapes in which earlier pushes sent each parameter.

    vLLM merges several parameters of the model into one. Its own shapes therefore cannot be compared with a push's.
    """

    def __init__(self) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}

    def check(self, plan: Sequence[Bucket]) -> None:
        """Compare a plan with the known shapes. Raises: ValueError naming a parameter whose shape changed."""
        for meta in (meta for bucket in plan for meta in bucket):
            known = self._shapes.get(meta.name, meta.shape)
            if known != meta.shape:
                raise ValueError(f"the push has {meta.name} in shape {meta.shape}; the model has it in {known}")

    def keep(self, plan: Sequence[Bucket]) -> None:
        """Record the shapes of a plan that was loaded."""
        self._shapes |= {meta.name: meta.shape for bucket in plan for meta in bucket}
