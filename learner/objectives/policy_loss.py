"""The policy's loss of one micro-batch, as the settings name it.

Shape: K model tokens of a micro-batch.
"""

from torch import Tensor

from learner.algorithms.by_name import algorithm_of
from learner.algorithms.corrections.token_weights import token_weights
from learner.algorithms.ratio import log_ratio
from learner.models.step_result import LossFunction, Sums
from learner.objectives.reference_kl import ReferenceKl
from learner.objectives.step_metrics import token_sums
from learner.packing.micro_batch import MicroBatch
from protocol.settings.settings import Settings


def make_loss(settings: Settings, kl: ReferenceKl | None = None) -> LossFunction:
    """Return the loss that the settings name: (logprobs [K], entropies [K], micro-batch) -> (sum over tokens, sums).

    policy.old_logprobs = behaviour knows two policies: the ratio is learner / behaviour, and so is what the correction
    looks at. recompute knows three: the ratio is learner / old, the correction looks at old / behaviour, and old is the
    learner before the step. A micro-batch without old logprobs is of a step of one update: they are `logprobs` then.
    kl: of a reference, whose part in the loss is added to each token's, uncorrected.
    """
    algorithm = algorithm_of(settings.learner)
    policy_loss = algorithm.loss
    has_old_policy = settings.policy.old_logprobs == "recompute"

    def loss(logprobs: Tensor, entropies: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
        behaviour, counts = micro_batch.behaviour_logprobs, micro_batch.counts
        now = logprobs.detach()
        before = now if micro_batch.old_logprobs is None else micro_batch.old_logprobs
        old = before if has_old_policy else behaviour
        of_tokens, is_clipped = policy_loss.of_tokens(logprobs, old, micro_batch.advantages, counts, algorithm.clip)
        ratio = log_ratio(before if has_old_policy else now, behaviour).exp()
        is_in_loss = policy_loss.has_ratio and not has_old_policy
        weights = token_weights(algorithm.correction, ratio, counts, algorithm.band, is_in_loss=is_in_loss)
        corrected = of_tokens * weights
        reference_kl = None if kl is None else kl.of_tokens(before, micro_batch)
        if kl is not None and (in_loss := kl.in_loss(logprobs, micro_batch)) is not None:
            corrected = corrected + in_loss
        sums = token_sums(before, entropies, is_clipped, micro_batch, reference_kl)
        return (corrected * micro_batch.weights).sum(), sums

    return loss
