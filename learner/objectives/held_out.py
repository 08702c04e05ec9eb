"""Held-out rows of a run that learns from rows: scored by the ranks, with the objective's own loss."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from learner.algorithms.whiten import Reduce
from learner.data.packing import plan_step
from learner.data.prompt_set import load_prompts
from learner.data.sft_rows import RowEncoder, SftRow
from learner.models.gradient import LossFunction, Sums, add_sums
from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from learner.models.roles import Roles
from learner.models.world import share_object
from learner.objectives.policy_gradient import add_fixed_columns
from protocol.settings.evaluation import MAIN_SET
from protocol.settings.learner import LearnerSettings
from protocol.settings.settings import Settings

MeanOf = Callable[[Sums], Mapping[str, Tensor | float]]
"""(sums over all ranks, "loss" among them) -> means."""

LossOf = Callable[[Sequence[MicroBatch]], LossFunction]
"""(all micro-batches of this rank) -> their loss now. Collective."""


class HeldOut:
    """Scores data.eval before the first step, in its line, after every eval.every_steps, and after the last step.

    eval/step among the scores names the evaluated step: 0 before the first one.
    """

    def __init__(
        self, roles: Roles, settings: Settings, model: Path, loss_of: LossOf, mean_of: MeanOf, reduce: Reduce
    ) -> None:
        """Read the rows on rank 0, which gives them to the others. Collective.

        model: folder of the tokenizer. reduce: sums over all ranks, float64 on the CPU.
        """
        self._roles, self._loss_of, self._mean_of, self._reduce = roles, loss_of, mean_of, reduce
        self._evals, self._last_step = settings.eval, settings.run.max_steps
        self._micro_batches: list[MicroBatch] = []
        if self._evals.every_steps and settings.data.eval:
            are_pairs = settings.objective in ("dpo", "reward_model")
            self._micro_batches = _pack(_rows_of_rank_0(settings, model), settings.learner, are_whole=are_pairs)

    def before(self, step: int) -> dict[str, float]:
        """Return the scores before the first step, empty when they are not due. Collective."""
        return self._scores(0) if step == 1 and self._evals.before and self._last_step > 1 else {}

    def after(self, step: int) -> dict[str, float]:
        """Return the scores after this step, empty when they are not due. Collective."""
        if not self._micro_batches:
            return {}
        is_due = step % self._evals.every_steps == 0 and (step > 1 or not self._evals.before)
        return self._scores(step) if is_due or step == self._last_step else {}

    def _scores(self, step: int) -> dict[str, float]:
        if not self._micro_batches:
            return {}
        totals: Sums = {}
        with torch.no_grad():
            micro_batches = add_fixed_columns(self._micro_batches, self._roles, with_old=False)
            loss_of_each = self._loss_of(micro_batches)
            for each in micro_batches:
                logprobs = self._roles.policy.logprobs(each).cpu()
                loss, sums = loss_of_each(logprobs, torch.zeros_like(logprobs), each)
                add_sums(totals, {"loss": loss, "num_tokens": torch.tensor(each.num_model_tokens), **sums})
        names = sorted(totals)
        over_ranks = self._reduce(torch.stack([totals[name].double() for name in names]))
        means = self._mean_of(dict(zip(names, over_ranks, strict=True)))
        return {"eval/step": step, **{f"eval/{MAIN_SET}/{name}": float(each) for name, each in means.items()}}


def _rows_of_rank_0(settings: Settings, model: Path) -> list[list[SftRow]]:
    """Return the rows of each group, on every rank."""
    rows: list[list[SftRow]] = []
    if dist.get_rank() == 0:
        assert settings.data.eval
        prompts = load_prompts(settings.data.eval, settings.data.of_held_out())[: settings.eval.num_prompts]
        encoder = RowEncoder(model, settings.data.form, trust_remote_code=settings.policy.trust_remote_code)
        others = [partial(prompts.__getitem__, i - 1) for i in range(len(prompts))]
        rows = [encoder.encode(prompt.columns, other) for prompt, other in zip(prompts, others, strict=True)]
    return share_object(rows)


def _pack(groups: Sequence[Sequence[SftRow]], learner: LearnerSettings, *, are_whole: bool) -> list[MicroBatch]:
    """Return this rank's micro-batches; a group's rows are numbered one after the other.

    are_whole: a group is whole in one micro-batch; False: a micro-batch has one row of a group, as in KTO's steps. Some
    models mix the rows of a micro-batch, and need one for each row.
    """
    size = len(groups[0])
    lengths = [sum(len(row.tokens) for row in group) for group in groups]
    plan = plan_step(lengths, dist.get_world_size(), learner.micro_batch_tokens)[dist.get_rank()]
    together = [range(size)] if are_whole else [[i] for i in range(size)]
    parts = [
        [_sample(groups[place][i], size * place + i) for place in part for i in indices]
        for part in plan
        for indices in together
    ]
    return [make_micro_batch(part, share_prompts=learner.share_prompts) for part in parts]


def _sample(row: SftRow, number: int) -> LearnerSample:
    mask = row.weights > 0.0
    return LearnerSample(row.tokens, mask, np.zeros(len(row.tokens), np.float32), row.reward, number=number)
