"""The learner's values of each token of the recorded samples: logprob and entropy before the update that trained the
token, and its advantage. Written into the run folder for the live page; nothing reads them in a run.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from learner.data.recorded import group_every, recorded_indices
from learner.disk.run_folder import LEARNER_VALUES
from learner.models.micro_batch import MicroBatch
from learner.objectives.policy_gradient import PolicyGradient, StepOutcome
from protocol.settings.settings import Settings
from protocol.wire.messages import Batch
from protocol.wire.trajectory import Trajectory

_DIGITS = 4


class RecordedValues:
    """A policy gradient whose values of recorded samples are kept: those that this rank trained."""

    def __init__(self, objective: PolicyGradient, settings: Settings, folder: Path, rank: int) -> None:
        """folder: the run's."""
        objective.on_tokens = self._note
        self._objective = objective
        self._folder = folder / LEARNER_VALUES
        self._rank = rank
        self._num, self._every = settings.report.samples_per_step, group_every(settings)
        self._total = settings.learner.groups_per_step * settings.rollout.group_size  # trajectories of a step
        self._num_before = 0  # trajectories of the step's earlier parts
        self._wanted: set[int] = set()  # numbers of recorded samples without values
        self._found: dict[int, Tensor] = {}  # [3, K] logprobs, entropies and advantages by number
        self._rows: list[dict[str, object]] = []  # of the step so far

    def take_part(self, batch: Batch, trajectories: Mapping[int, Trajectory], policy_version: int) -> None:
        self._listen(batch)
        self._objective.take_part(batch, trajectories, policy_version)
        self._collect(batch)

    def take_step(self, batch: Batch, trajectories: Mapping[int, Trajectory], policy_version: int) -> StepOutcome:
        """Take the objective's step, or its last part, then write the values, if the disk has room."""
        self._listen(batch)
        outcome = self._objective.take_step(batch, trajectories, policy_version)
        self._collect(batch)
        rows, self._rows, self._num_before = self._rows, [], 0
        if outcome.applied and rows:
            with contextlib.suppress(OSError):
                self._folder.mkdir(exist_ok=True)
                path = self._folder / f"step_{batch.step}.rank_{self._rank}.json"
                path.write_bytes(msgspec.json.encode(rows))
        return outcome

    def _listen(self, batch: Batch) -> None:
        total = None if batch.part is msgspec.UNSET else self._total
        places = recorded_indices(batch.facts, batch.step, self._num, self._every, self._num_before, total)
        self._wanted, self._found = set(places), {}

    def _collect(self, batch: Batch) -> None:
        self._rows += [self._row(batch, number) for number in sorted(self._found)]
        self._num_before += len(batch.facts)

    def _note(self, logprobs: Tensor, entropies: Tensor, micro_batch: MicroBatch) -> None:
        start = 0
        for number, count in zip(micro_batch.numbers, micro_batch.counts, strict=True):
            if number in self._wanted:  # the first update that trains it
                self._wanted.remove(number)
                own = slice(start, start + count)
                columns = (logprobs[own], entropies[own], micro_batch.advantages[own])
                self._found[number] = torch.stack([column.float() for column in columns]).cpu()
            start += count

    def _row(self, batch: Batch, number: int) -> dict[str, object]:
        facts = batch.facts[number]
        names = ("logprobs", "entropies", "advantages")
        values = {
            name: [round(value, _DIGITS) for value in column]
            for name, column in zip(names, self._found[number].tolist(), strict=True)
        }
        return {"group": facts.group, "sample_index": facts.sample_index, "attempt": facts.attempt, **values}
