"""One learner rank: batch -> loss -> step -> push -> report, until the coordinator ends the run.

One process per rank. `Trainer.train` is the table of contents of the learner.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec import UNSET

from learner.algorithms.whiten import Reduce
from learner.checkpoint.sealed_files import Report
from learner.models.parked import ParkedModels
from learner.models.roles import Roles
from learner.models.world import own_device, reduce_max, reduce_tensor, share_object
from learner.objectives.distill import Distillation
from learner.objectives.kto import Kto
from learner.objectives.policy_gradient import PolicyGradient, StepOutcome
from learner.objectives.preference import Preference
from learner.objectives.reward_model import RewardModelling
from learner.objectives.supervised import RowObjective, Supervised
from learner.plan.needs import is_trained, takes_parts
from learner.rank.checkpoint import CheckpointWriter
from learner.rank.coordinator_client import CoordinatorClient
from learner.rank.device_switch import SharedDevice
from learner.rank.learner_values import RecordedValues
from learner.rank.mfu import Meter, make_meter, no_mfu
from learner.rank.process import WAITING_FOR_BATCH, RunPlace
from learner.rank.push import RankPusher, natural_text
from learner.rank.replay.kept_steps import KeptSteps, Objective
from learner.rank.start import Models, World
from learner.weights.card import OwnCard
from protocol.node.home import load_keys
from protocol.settings.settings import Settings
from protocol.weights.controls import ServerControls, learner_name
from protocol.wire.channel import DealerChannel
from protocol.wire.messages import Batch
from protocol.wire.trajectory import Trajectory

_OF_ROWS: dict[str, Callable[[Roles, Settings, Path, Reduce], RowObjective]] = {
    "sft": Supervised,
    "dpo": Preference,
    "kto": Kto,
    "distill": Distillation,
    "reward_model": RewardModelling,
}


@dataclass(frozen=True)
class Share:
    """A rank's part of a step."""

    batch: Batch  # plan of the step, and facts of all its trajectories
    trajectories: dict[int, Trajectory]  # trajectories of this rank, by index into batch.facts
    wait_s: float  # seconds of waiting for the batch


@dataclass
class StepWork:
    """What the parts of a step took on this rank so far."""

    num_parts: int = 0
    wait_s: float = 0.0
    train_s: float = 0.0

    def add(self, share: Share, train_s: float) -> None:
        self.num_parts += 1
        self.wait_s += share.wait_s
        self.train_s += train_s


class Trainer:
    """Trains one run on this rank, from the state of its models."""

    def __init__(
        self,
        world: World,
        models: Models,
        objective: Objective,
        settings: Settings,
        coordinator: CoordinatorClient,
        pusher: RankPusher,
        checkpoints: CheckpointWriter,
        report: Report,
        meter: Meter = no_mfu,
        parts: PolicyGradient | RecordedValues | None = None,
    ) -> None:
        """report: takes the rank's phase. meter: measures steps. parts: takes parts of a step; None: it waits."""
        self._rank = world.place.rank
        self._objective = objective
        self._step, self._version = models.step, models.version
        self._saved_step = models.step if models.are_saved or not is_trained(settings) else -1
        self._settings = settings
        self._coordinator = coordinator
        self._pusher = pusher
        self._device = pusher.device
        self._checkpoints = checkpoints
        self._set_phase = report
        self._meter = meter
        self._parts = parts
        self._of_step = StepWork()

    def train(self) -> str:
        """Train until the coordinator ends the run; returns one sentence about the end."""
        self._push()
        while not isinstance(share := self._next_share(), str):
            if share.batch.is_last is False:
                self._take_part(share)
                continue
            outcome, timings = self._take_step(share)
            self._report(outcome, timings)
            self._save_when_due()
        self._save()
        if not self._settings.run.max_steps:
            return "Ended: every answer is scored."  # an evaluation has no steps
        return f"Ended at step {self._step}: {share}."

    def _push(self) -> dict[str, float]:
        """Push the current weights to every server; returns the times. Raises: as `RankPusher.push`."""
        self._set_phase(f"pushing version {self._version}")
        report = self._pusher.push(self._version)
        return report.times() if report is not None and report.synced else {}

    def _next_share(self) -> Share | str:
        step, settings = self._step + 1, self._settings
        waiting = f"{WAITING_FOR_BATCH} {step}"
        self._set_phase(waiting)
        started, limit_s, waited_s = time.monotonic(), settings.learner.batch_timeout_s, 0.0
        part = UNSET if self._parts is None else self._of_step.num_parts
        while (answer := self._coordinator.next_batch(step, self._rank, limit_s, waited_s, part)) is None:
            waited_s = time.monotonic() - started
            self._pusher.set_absent([])
            self._push()
            # The run's command starts a crashed server on a shared device in this phase only.
            self._set_phase(waiting)
        if isinstance(answer, str):
            return answer
        self._pusher.set_absent(answer[0].absent)
        return Share(*answer, wait_s=time.monotonic() - started)

    def _take_part(self, share: Share) -> None:
        assert self._parts is not None
        self._set_phase(f"training a part of step {self._step + 1}")
        started = time.monotonic()
        self._parts.take_part(share.batch, share.trajectories, self._version)
        self._of_step.add(share, time.monotonic() - started)

    def _take_step(self, share: Share) -> tuple[StepOutcome, dict[str, float]]:
        self._set_phase(f"training step {self._step + 1}")
        switch_s = self._device.learn()
        started = time.monotonic()
        outcome = self._objective.take_step(share.batch, share.trajectories, self._version)
        self._of_step.add(share, time.monotonic() - started)
        work, self._of_step = self._of_step, StepWork()
        self._step += 1
        timings = {"time/wait_s": work.wait_s, "time/train_s": work.train_s}
        timings |= self._meter(work.train_s)
        timings |= {"time/switch_s": switch_s} if switch_s else {}
        if outcome.applied:
            self._version += 1
            timings |= self._push()
        self._device.generate()
        return outcome, timings

    def _report(self, outcome: StepOutcome, timings: Mapping[str, float]) -> None:
        """Report the step to the coordinator, which frees its slots: the servers hold the new weights by now."""
        if self._rank != 0:
            return
        metrics = {**outcome.metrics, **timings}
        self._coordinator.report_step(self._step, self._version, outcome.applied, outcome.detail, metrics)

    def _save_when_due(self) -> None:
        """Save every checkpoint_every_steps; `train` saves after the last step, when its evaluation is done too."""
        every = self._settings.learner.checkpoint_every_steps
        if every and self._step % every == 0 and self._step < self._settings.run.max_steps:
            self._save()

    def _save(self) -> None:
        if self._step == self._saved_step:
            return
        self._set_phase(f"saving step {self._step}")
        self._device.learn()
        self._checkpoints.save(self._step, self._version)
        self._device.generate()
        self._saved_step = self._step


def train(
    world: World,
    models: Models,
    settings: Settings,
    folder: Path,
    model: Path,
    run: RunPlace,
    reach_server: Callable[[str], ServerControls],
    servers_now: Callable[[], tuple[str, ...]],
    report: Report,
) -> str:
    """Train until the coordinator ends the run; returns one sentence about the end.

    folder: the run folder. model: the folder from which the policy was loaded first. reach_server: returns the weight
    controls of a named rollout server, for rank 0. servers_now: returns the names of the run's servers. report: takes
    the rank's phase.
    """
    rank, keys = world.place.rank, load_keys()
    channel = DealerChannel(run.coordinator_address, f"rank-{rank}", keys.peer, keys.coordinator.public)
    coordinator = CoordinatorClient(channel, run.run_id, run.incarnation)
    servers = [reach_server(name) for name in run.servers] if rank == 0 else []
    learner = learner_name(run.run_id, run.incarnation)
    text = natural_text(model, trust_remote_code=settings.policy.trust_remote_code) if settings.weights.probe else []
    has_card = run.shares_devices and run.weights_backend == "ipc" and world.place.world_size > 1
    name = share_object(secrets.token_hex(16)) if has_card else ""
    card = OwnCard(name, rank, settings.weights.deadline_s, share_object) if has_card else None
    where = (world.place.host, run.weights_backend)
    pusher = RankPusher(models.roles.policy, settings, servers, *where, text, learner, card)
    if servers:
        pusher.follow(servers_now, reach_server)
    if run.shares_devices:
        parked = ParkedModels([models.roles], own_device())
        pusher.device = SharedDevice(parked, pusher.switch_servers, lambda: reduce_max(0.0, own_device()))
    saved = (folder, model, settings.learner.keep_checkpoints, settings.eval)
    checkpoints = CheckpointWriter(models.roles, coordinator, world.solo, *saved, served_digest=lambda: pusher.digest)
    objective = objective_of(settings, models.roles, model)
    parts: RecordedValues | None = None
    if isinstance(objective, PolicyGradient):
        recorded = RecordedValues(objective, settings, folder, rank)
        own = {"is_whitened": objective.algorithm.is_whitened, "has_critic": models.roles.critic is not None}
        parts = recorded if takes_parts(settings, **own) and not run.shares_devices else None
        objective = recorded
    if settings.learner.keep_batches:
        objective = KeptSteps(objective, settings, folder, lambda: pusher.digest)
    meter = make_meter(models.roles.policy, settings) if is_trained(settings) else no_mfu
    of_peers = (coordinator, pusher, checkpoints, report)
    ended = Trainer(world, models, objective, settings, *of_peers, meter, parts).train()
    pusher.close()
    channel.close()
    return ended


def objective_of(settings: Settings, roles: Roles, model: Path) -> Objective:
    """Return the objective of the settings on this rank. Collective. model: folder of the tokenizer."""
    of_rows = _OF_ROWS.get(settings.objective)
    if of_rows is None:
        return PolicyGradient(roles, settings, reduce_tensor)
    return of_rows(roles, settings, model, reduce_tensor)
