"""How far two learners' weights are apart, in figures and in words.

Everything is float32. Two sums in another order round differently, and Adam makes a step of the rounding of a gradient
that is nothing else: differences are held against how far training moved the weights.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.textbook.loop import Textbook

Weights = Mapping[str, Tensor]  # "ROLE/NAME" -> in the CPU's memory

# Of how far the weights moved. Another formula anywhere is apart by about all of it.
_LARGEST_ROUNDING = 0.05


@dataclass(frozen=True)
class Comparison:
    """Two learners that began with the same weights and took the same steps."""

    num_tensors: int  # of all roles
    num_same: int  # tensors with the same bits in both
    largest: float  # largest difference of a weight
    # 2-norm of a role's differences over the 2-norm of how far its weights moved; of the role where it is largest: a
    # critic moves so much further than the policy that all of the policy would be rounding beside it
    apart: float
    moved: float  # 2-norm of how far all weights of the plain loop moved
    first_step: int | None  # step after which a bit first differed; None: there is none

    @property
    def holds(self) -> bool:
        """Whether the weights moved, and are the same but for rounding."""
        return self.moved > 0.0 and self.apart <= _LARGEST_ROUNDING

    def sentence(self, num_steps: int) -> str:
        """Return the outcome for people."""
        if self.moved == 0.0:
            return "The steps moved no weight, so there is nothing to compare. Raise learner.lr or run.max_steps."
        if self.first_step is None:
            return f"The weights are the same, bit for bit, after each of {num_steps} steps."
        figures = (
            f"the largest difference is {self.largest:.2g}, and all differences are {self.apart:.2g} of how far the "
            f"weights moved; the first bit differed after step {self.first_step}"
        )
        if self.holds:
            return f"The weights are the same but for rounding: {figures}."
        return f"The weights are not the same: {figures}, more than the {_LARGEST_ROUNDING:g} that rounding explains."


def compare(before: Weights, plain: Weights, sluice: Weights, first_step: int | None) -> Comparison:
    """Return how far the plain loop's weights and Sluice's are apart. before: of both, before the first step.

    Raises: ValueError when they are not weights of the same models.
    """
    if plain.keys() != sluice.keys() or plain.keys() != before.keys():
        raise ValueError(f"weights of other models: {sorted(plain.keys() ^ sluice.keys())[:3]}")
    moved = _norm(plain[name] - before[name] for name in plain)
    differences = {name: plain[name] - sluice[name] for name in plain}
    num_same = sum(torch.equal(plain[name], sluice[name]) for name in plain)
    largest = max(float(difference.abs().max()) for difference in differences.values())
    of_roles = [
        (_norm(differences[name] for name in names), _norm(plain[name] - before[name] for name in names))
        for names in _by_role(plain)
    ]
    shares = [apart / moved if moved else apart for apart, moved in of_roles]
    apart = math.nan if any(map(math.isnan, shares)) else max(shares)
    return Comparison(len(plain), num_same, largest, apart, moved, first_step)


def weights_of(loop: Textbook) -> dict[str, Tensor]:
    """Return every trained weight of a plain loop, "ROLE/NAME" -> a copy of it in the CPU's memory."""
    models = {"policy": loop.policy, "critic": loop.critic}
    named = ((f"{role}/{n}", w) for role, m in models.items() if m is not None for n, w in m.named_parameters())
    return {name: weight.detach().to("cpu", copy=True) for name, weight in named if weight.requires_grad}


def bits_of(weights: Weights) -> str:
    """Return a hash of the weights' names and bits."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].numpy().tobytes())
    return digest.hexdigest()


def _by_role(weights: Weights) -> list[list[str]]:
    """Return the names of each role's weights."""
    roles = sorted({name.partition("/")[0] for name in weights})
    return [[name for name in weights if name.startswith(f"{role}/")] for role in roles]


def _norm(parts: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(part.double().square().sum()) for part in parts))
