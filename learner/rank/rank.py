"""One learner rank: warm start, then batch -> loss -> step -> push -> report, until the coordinator ends the run.

One process per rank. `train` is the table of contents of the learner.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from learner.checkpoint.manifest import Checkpoint
from learner.models.roles import Roles, load_policy
from learner.models.settings import policy_settings
from learner.models.step_result import StepResult
from learner.models.world import join_world
from learner.objectives.policy_gradient import StepInputs, prepare_step, step_metrics
from learner.objectives.warm_start import warm_start
from learner.rank.checkpoint import CheckpointWriter, load_checkpoint
from learner.rank.coordinator_client import CoordinatorClient
from learner.rank.place import RankPlace, RunPlace
from learner.rank.push import RankPusher
from learner.rank.solo_work import SoloWork
from protocol.node.home import load_keys
from protocol.settings.settings import Settings
from protocol.weights.controls import ServerControls
from protocol.wire.channel import DealerChannel


class LearnerRank:
    """Call order: prepare, train."""

    def __init__(
        self,
        place: RankPlace,
        settings: Settings,
        folder: Path,
        model: Path,
        reach_server: Callable[[str], ServerControls],
        tell: Callable[[str], None],
    ) -> None:
        """reach_server: returns the weight controls of a named rollout server. tell: takes what the rank is at."""
        self._place = place
        self._settings = settings
        self._folder = folder
        self._model = model
        self._reach_server = reach_server
        self._tell = tell
        # Until training begins, no rollout server is at work on these cores.
        self._use_threads(others=0)

    def prepare(self, checkpoint: Checkpoint | None, listener: socket.socket | None) -> None:
        """Join the world and bring the policy to where the run starts: its checkpoint, or the (warm-started) model.

        listener: rank 0's, where the world meets.
        """
        place, settings = self._place, self._settings
        limit_s = settings.learner.rank_timeout_s
        store = join_world(place.rank, place.world_size, place.host, place.port, limit_s, listener)
        self._solo = SoloWork(store, place.rank, limit_s)
        model = self._model
        if checkpoint is None and settings.policy.warm_start.data is not None:
            model = warm_start(settings, model, self._tell)
        self._tell("loading the policy")
        self._policy = load_policy(
            policy_settings(settings, model),
            name=settings.policy.model,
            micro_batch_tokens=settings.learner.micro_batch_tokens,
        )
        self._roles = Roles(self._policy)
        self._step = self._version = 0
        self._saved_step = -1
        if checkpoint is not None:
            self._step, self._version = load_checkpoint(self._roles, checkpoint)
            self._saved_step = self._step
        self._tell("the policy is ready")

    def train(self, run: RunPlace) -> str:
        """Train until the coordinator ends the run; returns how it ended, in one sentence."""
        self._open(run)
        self._use_threads(others=len(run.servers))
        self._push()
        while not isinstance(inputs := self._next_inputs(), str):
            result, timings = self._take_step(inputs)
            self._report(inputs, result, timings)
            self._save_when_due()
        self._save()
        self._close()
        return f"Ended at step {self._step}: {inputs}."

    def _use_threads(self, others: int) -> None:
        """Take this rank's share of the cores, one left to each of the others that compute beside it.

        More threads than cores make every parallel region wait for one that is not running.
        """
        share = ((os.cpu_count() or 1) - others) // self._place.world_size
        torch.set_num_threads(self._settings.learner.num_threads or max(1, share))

    def _open(self, run: RunPlace) -> None:
        keys = load_keys()
        rank, settings = self._place.rank, self._settings
        channel = DealerChannel(run.coordinator_address, f"rank-{rank}", keys.peer, keys.coordinator.public)
        self._channel = channel
        self._coordinator = CoordinatorClient(channel, run.run_id, run.incarnation)
        keep = settings.learner.keep_checkpoints
        self._checkpoints = CheckpointWriter(
            self._roles, self._coordinator, self._solo, self._folder, self._model, keep
        )
        self._pusher = RankPusher(self._policy, settings, self._servers(run), self._place.host, run.weights_backend)

    def _servers(self, run: RunPlace) -> list[ServerControls]:
        """Return the weight controls of the rollout servers: rank 0 alone talks to them."""
        return [self._reach_server(name) for name in run.servers] if self._place.rank == 0 else []

    def _push(self) -> dict[str, float]:
        """Give every server the current weights; returns how long it took. Raises when a server holds other ones."""
        self._tell(f"pushing version {self._version}")
        report = self._pusher.push(self._version)
        return {"push_s": report.push_s, "pause_s": report.pause_s} if report is not None and report.synced else {}

    def _next_inputs(self) -> StepInputs | str:
        step, settings = self._step + 1, self._settings
        self._tell(f"waiting for the batch of step {step}")
        started = time.monotonic()
        limit_s = settings.learner.batch_timeout_s
        while (answer := self._coordinator.next_batch(step, self._place.rank, limit_s)) is None:
            limit_s = settings.learner.batch_timeout_s - (time.monotonic() - started)
            self._pusher.leave_out([])
            self._push()
        if isinstance(answer, str):
            return answer
        self._pusher.leave_out(answer[0].absent)
        return prepare_step(*answer, settings, wait_s=time.monotonic() - started)

    def _take_step(self, inputs: StepInputs) -> tuple[StepResult, dict[str, float]]:
        self._tell(f"training step {self._step + 1}")
        started = time.monotonic()
        result = self._policy.step(inputs.micro_batches, inputs.loss, inputs.num_model_tokens)
        trained = time.monotonic()
        self._step += 1
        timings = {"wait_s": inputs.wait_s, "train_s": trained - started}
        if result.applied:
            self._version += 1
            timings |= self._push()
        return result, timings

    def _report(self, inputs: StepInputs, result: StepResult, timings: Mapping[str, float]) -> None:
        """Tell the coordinator, which then frees the step's slots: the servers hold the new weights by now."""
        if self._place.rank != 0:
            return
        metrics = {**step_metrics(result, inputs), **timings}
        detail = "" if result.applied else f"non-finite loss or gradient (loss {result.loss}, norm {result.grad_norm})"
        self._coordinator.stepped(self._step, self._version, result.applied, detail, metrics)

    def _save_when_due(self) -> None:
        """Save after every so many steps; `train` saves after the last, when its evaluation is done too."""
        every = self._settings.learner.checkpoint_every_steps
        if every and self._step % every == 0 and self._step < self._settings.run.max_steps:
            self._save()

    def _save(self) -> None:
        if self._step == self._saved_step:
            return
        self._tell(f"saving step {self._step}")
        self._checkpoints.save(self._step, self._version)
        self._saved_step = self._step

    def _close(self) -> None:
        self._pusher.close()
        self._channel.close()
