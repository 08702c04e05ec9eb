"""The shapes of a model's parameters as pushes have brought them: no vLLM here."""

from collections.abc import Sequence

from protocol.weights.wire import Bucket


class KnownShapes:
    """vLLM joins several of a model's parameters into one, so that its own shapes say nothing of theirs."""

    def __init__(self) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}  # by name, as they were loaded

    def check(self, plan: Sequence[Bucket]) -> None:
        """Raises: ValueError naming a parameter that comes in another shape than it was loaded in before."""
        for meta in (meta for bucket in plan for meta in bucket):
            known = self._shapes.get(meta.name, meta.shape)
            if known != meta.shape:
                raise ValueError(f"the push has {meta.name} in shape {meta.shape}; the model has it in {known}")

    def keep(self, plan: Sequence[Bucket]) -> None:
        """Note a plan whose parameters were all loaded."""
        self._shapes |= {meta.name: meta.shape for bucket in plan for meta in bucket}
