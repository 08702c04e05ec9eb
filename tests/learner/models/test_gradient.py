"""From micro-batches to a gradient, with a table for a model: logits of a token = table[token before]."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.models.gradient import COMPUTED_TOKENS, Sums, add_gradient, score_tokens
from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from learner.models.scoring.scored_model import scores_of

V = 5


class Table:
    """What a step needs of DeepSpeed's engine around a model that answers with logprobs."""

    device = "cpu"

    def __init__(self) -> None:
        self.logits = torch.randn(V, V, generator=torch.Generator().manual_seed(0)).requires_grad_()
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **inputs: Any) -> Any:
        self.calls.append(inputs)
        scoring = inputs["scoring"]
        logits = self.logits[inputs["input_ids"][0, inputs["logits_to_keep"]]]
        return SimpleNamespace(logits=scores_of(logits, scoring)[None])

    def backward(self, loss: Tensor) -> None:
        loss.backward()


def micro_batch(*lengths: int, behaviour: float = -1.0, advantage: float = 2.0) -> MicroBatch:
    rng = np.random.default_rng(sum(lengths))
    samples = [
        LearnerSample(
            rng.integers(0, V, length).astype(np.int32),
            np.arange(length) > 0,
            np.full(length, behaviour, np.float32),
            advantage,
        )
        for length in lengths
    ]
    return make_micro_batch(samples)


def loss(logprobs: Tensor, entropies: Tensor, batch: MicroBatch) -> tuple[Tensor, Sums]:
    sums = {"tokens": torch.ones_like(logprobs).sum(), "entropy": entropies.sum(), "max_logprob": logprobs.max()}
    return -(batch.advantages * logprobs).sum(), sums


def add(table: Table, *parts: MicroBatch, temperature: float = 1.0, with_entropy: bool = True, of: Any = loss) -> Sums:
    return add_gradient(table, parts, of, 0.25, temperature=temperature, with_entropy=with_entropy)


def test_gradient_is_that_of_all_losses_together_times_the_scale() -> None:
    table, expected = Table(), Table()
    parts = [micro_batch(6, 4), micro_batch(3)]
    sums = add(table, *parts, temperature=0.5)
    total = torch.zeros(())
    for part in parts:
        logprobs = (expected.logits / 0.5).log_softmax(-1)[part.tokens[0][part.predict_at], part.targets]
        total = total - 2.0 * logprobs.sum()
    (total * 0.25).backward()
    torch.testing.assert_close(table.logits.grad, expected.logits.grad)
    assert float(sums["loss"]) == pytest.approx(float(total.detach()), rel=1e-6)


def test_sums_add_up_over_micro_batches_and_largest_ones_stay() -> None:
    table = Table()
    one, other = add(Table(), micro_batch(6, 4)), add(Table(), micro_batch(3))
    both = add(table, micro_batch(6, 4), micro_batch(3))
    assert float(both["tokens"]) == 8.0 + 2.0
    assert float(both[COMPUTED_TOKENS]) == 13.0
    assert float(both["entropy"]) == pytest.approx(float(one["entropy"] + other["entropy"]))
    assert float(both["max_logprob"]) == max(float(one["max_logprob"]), float(other["max_logprob"]))
    assert {value.dtype for value in both.values()} == {torch.float64}
    assert not any(value.requires_grad for value in both.values())


def test_model_receives_positions_and_lengths_and_keeps_no_cache() -> None:
    table = Table()
    score_tokens(table, micro_batch(6, 4), 1.0, with_entropy=False)
    (call,) = table.calls
    assert call["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]]
    assert call["segments"].queries.ends.tolist() == [0, 6, 10]
    assert call["use_cache"] is False
    assert call["logits_to_keep"].tolist() == [0, 1, 2, 3, 4, 6, 7, 8]


def test_entropy_is_computed_only_where_it_is_wanted() -> None:
    assert float(add(Table(), micro_batch(6), with_entropy=False)["entropy"]) == 0.0
    assert float(add(Table(), micro_batch(6))["entropy"]) > 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["behaviour", "advantage"])
def test_input_that_is_not_finite_makes_every_gradient_nan_though_the_loss_ignores_it(where: str, bad: float) -> None:
    table = Table()
    add(table, micro_batch(6, **{where: bad}), of=lambda logprobs, entropies, batch: (logprobs.sum(), {}))
    assert table.logits.grad is not None
    assert table.logits.grad.isnan().any()


def test_loss_that_masks_its_own_infinity_makes_the_gradient_nan() -> None:
    """As of a user's loss with `torch.where`: NaN times the gradient of a masked token would be 0."""
    table = Table()

    def masked(logprobs: Tensor, entropies: Tensor, batch: MicroBatch) -> tuple[Tensor, Sums]:
        return torch.where(logprobs < 1.0, float("inf"), logprobs).sum(), {}

    sums = add(table, micro_batch(4), of=masked)
    assert not sums["loss"].isfinite()
    assert table.logits.grad is not None
    assert table.logits.grad.isnan().any()


def test_loss_that_is_not_finite_makes_the_gradient_nan_though_it_has_a_finite_one() -> None:
    table = Table()
    add(table, micro_batch(6), of=lambda logprobs, entropies, batch: (logprobs.sum() + float("inf"), {}))
    assert table.logits.grad is not None
    assert table.logits.grad.isnan().any()
