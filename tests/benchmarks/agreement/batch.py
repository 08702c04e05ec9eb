"""A batch of random answers, padded as verl takes it and packed as we do.

Shapes: P prompts, G samples of each, B = P G answers, T tokens of the longest with its replies, K model tokens of all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_PROMPTS, GROUP, WIDTH = 4, 4, 24


@dataclass(frozen=True)
class RandomBatch:
    """Columns are [B, T] float64; what stands where the mask is 0 is random, and nobody may look at it."""

    mask: Tensor  # [B, T] float64, 1 where the model wrote the token
    scores: Tensor  # [B] float64
    columns: dict[str, Tensor]  # logprobs, old, reference, values, old_values, returns, kl: [B, T] each

    @property
    def counts(self) -> list[int]:
        """Model tokens of each answer, in order."""
        return [int(count) for count in self.mask.sum(dim=1)]

    @property
    def last(self) -> Tensor:
        """The place of each answer's last model token, [B]."""
        places = torch.arange(self.mask.shape[1]) * self.mask
        return places.argmax(dim=1)

    def packed(self, padded: Tensor) -> Tensor:
        """Return the model's tokens of a column, end to end, [K]."""
        return padded[self.mask.bool()]

    def rewards(self) -> Tensor:
        """Return each token's reward: the score at the last model token, less what `kl` says, [B, T]."""
        found = -0.01 * self.columns["kl"] * self.mask
        found[torch.arange(len(self.scores)), self.last] += self.scores
        return found


def make_batch(seed: int) -> RandomBatch:
    """Return answers of 1 to 24 tokens, with replies inside them and padding behind; one group has equal scores."""
    generator = torch.Generator().manual_seed(seed)
    num = NUM_PROMPTS * GROUP
    lengths = torch.randint(3, WIDTH + 1, (num,), generator=generator)
    mask = (torch.arange(WIDTH) < lengths[:, None]) & (torch.rand(num, WIDTH, generator=generator) > 0.3)
    mask[:, 0] = True
    mask[0, 1:] = False
    mask[1] = True
    scores = torch.randn(num, generator=generator, dtype=torch.float64)
    scores[-GROUP:] = 0.3
    names = ("logprobs", "old", "reference", "values", "old_values", "returns", "kl")
    drawn = torch.randn(len(names), num, WIDTH, generator=generator, dtype=torch.float64)
    columns = dict(zip(names, drawn, strict=True))
    columns["old"] = -columns["old"].abs()
    columns["logprobs"] = columns["old"] + 0.3 * columns["logprobs"]
    columns["reference"] = columns["old"] + 0.3 * columns["reference"]
    return RandomBatch(mask.double(), scores, columns)
