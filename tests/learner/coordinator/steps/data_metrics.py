"""The metrics of a whole step's data."""

from learner.coordinator.steps.step_batch import DataMetrics, StepBatch
from protocol.settings.rewards import RewardsSettings


def data_metrics(batch: StepBatch, rewards: RewardsSettings | None = None) -> dict[str, float]:
    """Return what the coordinator records of this batch. rewards: those of the run; None: the bundled ones."""
    data = DataMetrics()
    data.add(batch.trajectories, batch.groups)
    return data.of_step(batch.policy_version, rewards or RewardsSettings())
