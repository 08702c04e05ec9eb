"""A run folder whose accounts hold, written by the ledger, the record and the checkpoints themselves: for the audit.

`make_run(folder)`: 10 prompts, groups of 2, 2 groups a step, staleness at most 1. Its first start takes steps 1 to 3
and dies; the second goes on from the checkpoint of step 2, gives one prompt up, cannot apply step 3, trains step 4,
saves it, and stops with two prompts out.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from learner.checkpoint.folder import begin
from learner.checkpoint.manifest import Checkpoint
from learner.coordinator.steps.record import RunRecord
from learner.coordinator.steps.step_batch import StepBatch
from learner.data.prompt_order import PromptOrder
from learner.data.prompt_set import load_prompts
from learner.disk.run_folder import CHECKPOINTS, LEDGER
from learner.ledger.ledger import Ledger
from learner.run.start import plan_start, prepare_folder
from protocol.settings.settings import Settings
from protocol.wire.trajectory import Trajectory
from tests.fakes.checkpoints import commit
from tests.learner.coordinator.steps.data_metrics import data_metrics
from tests.protocol.wire.examples import make_trajectory

NUM_PROMPTS = 10


def make_run(folder: Path) -> list[str]:
    """Write the run; returns its groups by position."""
    settings = run_settings(folder, NUM_PROMPTS, max_steps=6)
    first = RunWriter(settings)
    for step in (1, 2, 3):
        first.train(step, first.lease(2), staleness=min(1, step - 1))
        if step == 2:
            first.save(step)
    first.close()  # steps after 2 are of a lost lineage from here on
    second = RunWriter(settings)
    out = second.lease(2)
    second.give_up(out[0])
    second.refuse_step(3, [out[1], *second.lease(1)])
    second.train(4, second.lease(2), staleness=0)
    second.save(4)
    second.ledger.add_waste(second.lease(1)[0], 1, 1, "stale", 17)
    second.deliver(second.lease(1)[0], 1, second.version)
    second.close()
    return second.groups[: second.position]


def run_settings(folder: Path, num_prompts: int, max_steps: int) -> Settings:
    """Write a run's prompts beside its folder; returns its settings."""
    data = folder.parent / "prompts.jsonl"
    rows = ({"prompt": f"question {i}", "label": f"answer {i}"} for i in range(num_prompts))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return Settings.model_validate(
        {
            "run": {"name": folder.name, "dir": str(folder.parent), "max_steps": max_steps},
            "data": {"train": str(data)},
            "rollout": {"group_size": 2},
            "learner": {"groups_per_step": 2, "max_staleness": 1},
        }
    )


class RunWriter:
    """One start of a run."""

    def __init__(self, settings: Settings) -> None:
        start = plan_start(settings.run, "digest")
        prepare_folder(start, settings)
        self.folder = start.folder
        self.ledger = Ledger(self.folder / LEDGER)
        self.record = RunRecord(self.folder, samples_per_step=0)
        self.position = int(self.ledger.meta("position") or 0)
        self.version = int(self.ledger.meta("policy_version") or 0)
        uids = [prompt.uid for prompt in load_prompts(settings.data.train, settings.data)]
        order = PromptOrder(len(uids), settings.run.seed)
        places = [order.at(position) for position in range(2 * len(uids))]
        self.groups = [f"e{epoch}-{uids[index]}" for epoch, index in places]
        self.incarnation = self.ledger.begin_incarnation(self.version)
        self.ledger.begin_terms(start.step + 1, {"group_size": 2, "groups_per_step": 2, "max_staleness": 1})
        self.ledger.recall_unfinished()

    def lease(self, num_groups: int) -> list[str]:
        """Give the next prompts out; returns their groups."""
        taken = self.groups[self.position : self.position + num_groups]
        for group in taken:
            epoch, uid = group[1:].split("-")
            self.ledger.lease(group, int(epoch), uid, self.position, "s1", 1)
            self.position += 1
        self.ledger.set_meta("position", str(self.position))
        return taken

    def deliver(self, group: str, index: int, version: int) -> Trajectory:
        trajectory = make_trajectory(group, index, "s1", version, reward=float(index), incarnation=self.incarnation)
        self.ledger.add_trajectory(trajectory.facts)
        return trajectory

    def train(self, step: int, groups: Sequence[str], staleness: int) -> None:
        trajectories = [self.deliver(group, index, self.version - staleness) for group in groups for index in (0, 1)]
        batch = StepBatch(step, self.version, (), tuple(trajectories), [], [])
        self.ledger.mark_trained(groups, step, self.version)
        self.version += 1
        self._end(step, batch)

    def refuse_step(self, step: int, groups: Sequence[str]) -> None:
        """End a step that was not applied."""
        trajectories = [self.deliver(group, index, self.version) for group in groups for index in (0, 1)]
        self.ledger.set_state(groups, "skipped", step, "step not applied: loss is nan")
        self._end(step, StepBatch(step, self.version, (), tuple(trajectories), [], []))

    def give_up(self, group: str) -> None:
        for attempt in (1, 2, 3):
            self.ledger.add_failure(group, 1, attempt, "s1", "reward:em", f"HTTP 50{attempt}")
        self.ledger.add_waste(group, 0, 1, "failed", 9)
        self.ledger.set_state([group], "skipped", reason="reward:em: HTTP 501; HTTP 502; HTTP 503")

    def save(self, step: int) -> None:
        aside = begin(self.folder / CHECKPOINTS, step)
        self.ledger.begin_copy(aside / LEDGER).make()
        commit(aside, Checkpoint(aside, step, self.version, self.folder.name, "digest"))

    def close(self) -> None:
        self.ledger.close()

    def _end(self, step: int, batch: StepBatch) -> None:
        self.ledger.set_meta("policy_version", str(self.version))
        self.record.write_line(self.record.stamp(step, self.version, {**data_metrics(batch)}))
        self.ledger.commit()
