"""REINFORCE++'s advantage. Its baseline is the whitening of the whole step."""

from torch import Tensor

from learner.algorithms.advantages.discounted import discounted_sums


def reinforce_pp_advantages(rewards: Tensor, values: Tensor | None, gamma: float, lam: float) -> Tensor:
    """Return each token's discounted return R_t + gamma * R_(t+1) + gamma^2 * R_(t+2) + ...

    rewards: [K] float64, of one trajectory's model tokens in order, less the KL penalty if `kl.place` is reward.
    values and lam play no part. Returns [K] float64. Source: REINFORCE++, arXiv:2501.03262, eq. 5.
    """
    return discounted_sums(rewards, gamma)
