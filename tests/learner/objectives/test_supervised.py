"""Fine-tuning: which rows a step takes, what it weighs them with, and when it gives up."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from learner.data.sft_rows import RowEncoder, SftRow
from learner.models.gradient import StepResult
from learner.models.micro_batch import MicroBatch, make_micro_batch
from learner.models.policy import PolicyEngine
from learner.models.roles import Roles
from learner.objectives.held_out import HeldOut
from learner.objectives.supervised import Supervised, run_sft, weighted_nll
from protocol.errors import OperatorError
from protocol.settings.settings import Settings
from tests.fakes.tiny_models import make_tiny_model
from tests.learner.objectives.slow_policy_gradient import batch_of, table, trajectories
from tests.learner.objectives.table_model import TableModel

pytestmark = pytest.mark.usefixtures("one_rank")


class RecordingEngine:
    """A policy that notes what it is stepped with."""

    def __init__(self, applied: Sequence[bool] = ()) -> None:
        self.steps: list[tuple[list[int], float]] = []
        self.applied = iter(applied)
        self.loss: Any = None

    def step(self, micro_batches: Sequence[MicroBatch], loss: Any, weight: float, *, with_entropy: bool) -> StepResult:
        assert not with_entropy
        self.loss = loss
        firsts = [int(first) for part in micro_batches for first in part.tokens[0][part.position_ids[0] == 0]]
        self.steps.append((sorted(firsts), weight))
        return StepResult(next(self.applied, True), float(len(self.steps)), 1.0, {})


def row(first: int, *weights: float) -> SftRow:
    tokens = np.array([first] + [0] * len(weights), np.int32)
    return SftRow(tokens, np.array([0.0, *weights], np.float32))


def fine_tune(engine: RecordingEngine, rows: Sequence[SftRow], **changes: Any) -> None:
    given = {"rows_per_step": 2, "max_steps": 3, "micro_batch_tokens": 4} | changes
    run_sft(cast(PolicyEngine, engine), rows, **given)


def test_rows_are_taken_in_order_and_over_again_with_the_sum_of_their_weights() -> None:
    engine, heard = RecordingEngine(), []
    rows = [row(1, 1.0), row(2, 0.5, 0.5), row(3, 0.25)]
    fine_tune(engine, rows, on_step=lambda step, loss: heard.append((step, loss)))
    assert engine.steps == [([1, 2], 2.0), ([1, 3], 1.25), ([2, 3], 1.25)]
    assert engine.loss is weighted_nll
    assert heard == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_loss_is_the_weighted_sum_of_negative_logprobs() -> None:
    batch = make_micro_batch([])
    logprobs = torch.tensor([-1.0, -2.0, -4.0])
    loss, sums = weighted_nll(logprobs, torch.zeros(3), _with_weights(batch, [1.0, 0.5, 0.25]))
    assert loss.item() == 3.0
    assert sums == {}


def test_token_of_no_weight_is_not_learnt() -> None:
    seen: list[int] = []

    class Counting(RecordingEngine):
        def step(self, micro_batches: Sequence[MicroBatch], loss: Any, weight: float, **others: Any) -> StepResult:
            seen.extend(part.num_model_tokens for part in micro_batches)
            return StepResult(True, 0.0, 0.0, {})

    fine_tune(Counting(), [row(1, 0.0, 1.0, 0.0)], rows_per_step=1, max_steps=1)
    assert seen == [1]


def test_three_refused_steps_in_a_row_end_it_and_two_do_not() -> None:
    with pytest.raises(OperatorError, match=r"no finite gradient since step 2 of 9\. Lower policy\.warm"):
        fine_tune(RecordingEngine([True, False, False, False]), [row(1, 1.0)], max_steps=9)
    engine = RecordingEngine([False, False, True, False, False])
    fine_tune(engine, [row(1, 1.0)], max_steps=6)
    assert len(engine.steps) == 6


@pytest.mark.parametrize(("applied", "is_applied"), [((True, False), True), ((False, False), False)])
def test_step_is_applied_when_one_of_its_updates_is(applied: tuple[bool, ...], is_applied: bool) -> None:
    engine = RecordingEngine(applied)
    settings = Settings.model_validate({"learner": {"num_epochs": 2}})
    objective = Supervised(Roles(cast(PolicyEngine, engine)), settings, Path(), lambda sums: sums)
    made = trajectories()
    outcome = objective.take_step(batch_of(made, [[0, 1]], [0, 1]), dict(enumerate(made)), 4)
    assert (outcome.applied, outcome.metrics["policy/num_updates"]) == (is_applied, sum(applied))


def _with_weights(batch: MicroBatch, weights: list[float]) -> MicroBatch:
    return replace(batch, weights=torch.tensor(weights))


@pytest.mark.parametrize("packed", [[[8, 0, 3], [1, 2], [4, 5, 6, 7]], [[index] for index in range(9)]])
def test_step_of_a_run_has_the_loss_and_gradient_of_a_slow_loop_however_it_is_packed(packed: list[list[int]]) -> None:
    made, found, expected = trajectories(), table(), table()
    objective = Supervised(Roles(cast(PolicyEngine, TableModel(found))), Settings(), Path(), lambda sums: sums)
    outcome = objective.take_step(batch_of(made, packed, list(range(9))), dict(enumerate(made)), 4)

    losses = [
        -expected[before].log_softmax(-1)[token]
        for one in made
        for before, token, is_learnt in zip(one.tokens[:-1], one.tokens[1:], one.loss_mask[1:], strict=True)
        if is_learnt
    ]
    slow = torch.stack(losses).mean()
    slow.backward()
    assert outcome.metrics["policy/loss"] == pytest.approx(slow.item(), abs=1e-9)
    assert outcome.metrics["data/num_trained_tokens"] == len(losses)
    torch.testing.assert_close(found.grad, expected.grad, rtol=0.0, atol=1e-9)


def test_held_out_rows_are_scored_as_by_a_slow_loop_when_they_are_due(tmp_path: Path) -> None:
    model, path = make_tiny_model(tmp_path / "model", tied=True), tmp_path / "rows.jsonl"
    rows = [{"prompt": "ab", "completion": "cde"}, {"prompt": "a", "completion": "b"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"data": {"train": str(path), "eval": str(path)}, "eval": {"every_steps": 2}, "run": {"max_steps": 5}}
    logits = torch.randn(300, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    held_out = HeldOut(
        Roles(cast(PolicyEngine, TableModel(logits))),
        Settings.model_validate({"objective": "sft", **given}),
        model,
        lambda micro_batches: weighted_nll,
        lambda sums: {"loss": sums["loss"] / sums["num_tokens"]},
        lambda sums: sums,
    )
    encoded = [row for columns in rows for row in RowEncoder(model).encode(columns)]
    slow = [
        -float(logits[before].log_softmax(-1)[token])
        for row in encoded
        for before, token, weight in zip(row.tokens[:-1], row.tokens[1:], row.weights[1:], strict=True)
        if weight > 0.0
    ]
    loss = {"eval/held_out/loss": pytest.approx(sum(slow) / len(slow), abs=1e-9)}
    assert held_out.before(1) == {"eval/step": 0, **loss}
    assert [held_out.after(step).get("eval/step") for step in range(1, 6)] == [None, 2, None, 4, 5]
