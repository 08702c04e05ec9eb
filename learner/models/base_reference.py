"""The reference of a policy with LoRA adapters: the policy itself with its adapters off. There is no second model."""

from contextlib import AbstractContextManager

from torch import Tensor

from learner.models.micro_batch import MicroBatch
from learner.models.policy import PolicyEngine


class BaseReference:
    """Nothing of it is in checkpoints: the base is the model folder that the run began with."""

    def __init__(self, policy: PolicyEngine) -> None:
        self._policy = policy

    def in_use(self) -> AbstractContextManager[None]:
        """Return a context in which the policy is its base."""
        return self._policy.without_adapters()

    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """Return the model tokens' logprobs, float32 [K], at the sampling temperature. Inside `in_use`.

        Collective in ZeRO 3.
        """
        return self._policy.logprobs(micro_batch)
