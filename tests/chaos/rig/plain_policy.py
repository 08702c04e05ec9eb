"""A plain transformers model with the face that a policy shows to weight pushes."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from learner.models.micro_batch import MicroBatch
from protocol.weights.wire import Bucket
from tests.fakes.planned_weights import Gathered, planned


@dataclass(frozen=True)
class PlainWeights:
    """What one push is made of, as `learner.models.export.PushedWeights` has it."""

    model: Qwen2ForCausalLM
    bucket_bytes: int

    @property
    def plan(self) -> tuple[Bucket, ...]:
        return planned(self.model.named_parameters(), self.bucket_bytes)[0]

    def buckets(self, is_sender: bool) -> Gathered:
        return planned(self.model.named_parameters(), self.bucket_bytes)[1]


class PlainPolicy:
    """`step` moves the weights; the rest is what `RankPusher` asks of a `PolicyEngine`."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        self.model = model
        self.vocab_size = int(model.config.vocab_size)

    def step(self, size: float) -> None:
        """Move every weight by about so much, as an optimizer of Adam's kind does."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(size * torch.randn_like(parameter))

    def check_finite(self) -> None:
        """They are."""

    def pushed_weights(self, bucket_bytes: int) -> PlainWeights:
        return PlainWeights(self.model, bucket_bytes)

    def logprobs(self, batch: MicroBatch, temperature: float | None = None) -> Tensor:
        with torch.no_grad():
            logits = self.model(batch.tokens).logits[0, batch.predict_at].float()
        taken: Tensor = logits.log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
        return taken

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.model.named_parameters()
