"""Numbers that are not finite, put into everything a step is made of: none is applied, pushed or saved.

    python -m tests.chaos.nonfinite [--seed N] [--short]

Two DeepSpeed ranks in processes of their own, forked from the command's, train a tiny model in ZeRO 0, then 2. Ten
injections each, on one rank that is drawn: NaN and infinity in behaviour logprobs, advantages, loss and gradient; a
flipped bit in a weight; one in the optimizer's moments, which only the step after it carries into the weights. After
each, the ranks do what a learner does: report the step to a real coordinator, push over a real gloo group, save a real
checkpoint, or are refused.

holds: of 20 injections none was applied, pushed or saved (applied=0 pushed=0 saved=0), each is recorded as a step that
was not applied or an error that says what is not finite (recorded=20), the weights afterwards are bit for bit those
before, for a flipped bit those of the checkpoint (intact=20), and training goes on (steps_after). --short: ZeRO 2
alone, ten injections.
"""

import json
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import torch.distributed as dist
from torch import Tensor

from learner.checkpoint.folder import newest_valid
from learner.checkpoint.sealed_files import Report
from learner.data.packing import plan_step
from learner.disk.run_folder import CHECKPOINTS
from learner.models.gradient import LossFunction, StepResult, Sums
from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from learner.models.policy import PolicyEngine
from learner.models.roles import Roles
from learner.models.training.deepspeed_config import import_deepspeed
from learner.models.training.optimizer import NonFiniteWeightsError
from learner.objectives.policy_gradient import make_loss
from learner.rank.checkpoint import CheckpointWriter
from learner.rank.push import RankPusher
from learner.rank.solo_work import SoloWork
from protocol.settings.evaluation import EvalSettings
from protocol.settings.settings import Settings
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.tiny_models import make_tiny_model
from tests.learner.coordinator.coordinator_script import Script, settings_of
from tests.learner.models.forked_world import run_world
from tests.learner.models.small_policy import same, settings, trajectories
from tests.learner.weights.fake_server import FakeServer

NUM_RANKS = 2
# What all ranks found, as the worst of them found it.
_WORST: dict[str, Callable[[Iterable[int]], int]] = {
    "injected": min,
    "applied": max,
    "pushed": max,
    "saved": max,
    "recorded": min,
    "intact": min,
    "steps_after": min,
}
RUN_SETTINGS = Settings.model_validate({"policy": {"dtype": "float32"}, "weights": {"probe": False, "bucket_mb": 1}})
INTO_SAMPLES: dict[str, Callable[[LearnerSample, float], LearnerSample]] = {
    "behaviour": lambda sample, bad: replace(
        sample, behaviour_logprobs=np.where(sample.loss_mask, bad, 0.0).astype(np.float32)
    ),
    "advantage": lambda sample, bad: replace(sample, advantage=bad),
}


def main() -> int:
    arguments = options(__doc__ or "")
    stages = "2" if arguments.short else "02"
    import_deepspeed()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model = partial(make_tiny_model, folder / "model", tied=True, hidden_size=64)
        try:
            run_world(1, folder, "model", lambda _: {"folder": str(make_model())})  # nothing computes in this process
            run_world(NUM_RANKS, folder, "ranks", lambda _: run_rank(folder, stages, arguments.seed), limit_s=240)
        except SystemExit as failed:
            print(failed, file=sys.stderr)
            return conclude("nonfinite", False, world="failed")
        by_rank = [json.loads((folder / f"found_{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    found = {name: _WORST[name](each[name] for each in by_rank) for name in _WORST}
    injected = found["injected"]
    holds = injected == 10 * len(stages) == found["recorded"] == found["intact"]
    holds = holds and not any(found[name] for name in ("applied", "pushed", "saved")) and found["steps_after"] > 0
    return conclude("nonfinite", holds, **found)


# -- a rank -----------------------------------------------------------------------------------------------------------


class Rank:
    """One rank in one ZeRO stage, and on rank 0 the coordinator, the server and the accounts."""

    def __init__(self, folder: Path, stage: Literal[0, 2], seed: int, solo: SoloWork) -> None:
        self.rank = dist.get_rank()
        self.solo = solo
        self.folder = folder / f"run_{stage}"
        self.model = folder / "model"
        self.stage = stage
        self.draw = Random(seed + stage)  # the same on every rank
        self.policy = PolicyEngine(settings(self.model, stage))
        self.server = FakeServer("server")
        servers = [self.server] if self.rank == 0 else []
        self.pusher = RankPusher(self.policy, RUN_SETTINGS, servers, "127.0.0.1", "gloo", [])
        self.step_number = self.version = 0
        self.found = dict.fromkeys(_WORST, 0)
        if self.rank == 0:
            self.folder.mkdir()
            self.script = Script(self.folder, settings_of(run={"max_steps": 1000}), num_prompts=4)

    def save_ledger(self, path: Path, step: int, report: Report) -> None:
        """Stand in for the coordinator's client, as `CheckpointWriter` needs it."""
        path.write_bytes(b"")

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.policy.weights()}

    # -- what a learner does ------------------------------------------------------------------------------------------

    def step(self, samples: list[LearnerSample], loss: LossFunction) -> StepResult:
        plan = plan_step([len(s.tokens) for s in samples], NUM_RANKS, 90)[self.rank]
        parts = [make_micro_batch([samples[i] for i in part]) for part in plan]
        result = self.policy.step(parts, loss, sum(int(s.loss_mask.sum()) for s in samples))
        self.step_number += 1
        self.version += result.applied
        if self.rank == 0:
            for lease in self.script.demand(version=self.version - result.applied):
                self.script.finish("s1", lease, version=self.version - result.applied)
            self.script.batch(self.step_number)
            detail = f"loss {result.loss}, norm {result.grad_norm}"
            self.script.step(self.step_number, self.version, result.applied, detail)
        return result

    def push(self) -> None:
        self.pusher.push(self.version)

    def save(self) -> None:
        client: Any = self
        CheckpointWriter(Roles(self.policy), client, self.solo, self.folder, self.model, 2, EvalSettings()).save(
            self.step_number, self.version
        )

    def refusal(self, act: Callable[[], None]) -> str | None:
        """Return why it was refused; None when it was done."""
        try:
            act()
        except NonFiniteWeightsError as error:
            return str(error)
        return None

    # -- what is done to it -------------------------------------------------------------------------------------------

    def run(self) -> dict[str, int]:
        """Return what became of ten injections."""
        loss = make_loss(RUN_SETTINGS)
        assert self.step(trajectories(), loss).applied
        self.push()
        self.save()
        for kind in ("behaviour", "advantage", "loss", "gradient"):
            for bad in (float("nan"), float("inf")):
                self.put_into_step(kind, bad, loss)
            assert self.step(trajectories(), loss).applied  # five refused ones in a row would end the run
            self.push()
        self.put_into_weights("weight")
        self.put_into_weights("moment")
        for _ in range(2):
            self.found["steps_after"] += self.step(trajectories(), loss).applied
            self.push()
            self.save()
        self.policy.check_finite(with_optimizer=True)
        self.pusher.close()
        return self.found

    def put_into_step(self, kind: str, bad: float, loss: LossFunction) -> None:
        """Have one number of a step be bad; the step must leave everything as it was, and be on record."""
        before, version, server = self.weights(), self.version, self.server.digest
        victim, samples, handles = self.draw.randrange(NUM_RANKS), trajectories(), []
        if kind in INTO_SAMPLES:
            place = self.draw.randrange(len(samples))
            samples[place] = INTO_SAMPLES[kind](samples[place], bad)
        if kind == "gradient" and self.rank == victim:
            _, parameter = self.draw_parameter()
            hook: Any = parameter.register_hook
            handles.append(hook(lambda gradient: gradient * bad))
        elif kind == "gradient":
            self.draw_parameter()
        result = self.step(samples, self.broken(loss, bad, victim) if kind == "loss" else loss)
        for handle in handles:
            handle.remove()
        self.found["injected"] += 1
        self.found["applied"] += result.applied
        self.found["pushed"] += self.version != version or self.server.digest != server
        self.found["intact"] += same(before, self.weights())
        on_record = 1
        if self.rank == 0:
            ((detail,),) = self.script.rows(
                "SELECT detail FROM events WHERE kind = 'not_applied' ORDER BY rowid DESC LIMIT 1"
            )
            on_record = int(detail.startswith(f"step {self.step_number}: "))
            print(f"ZeRO {self.stage}: {bad} in {kind} of one rank: not applied; recorded {detail!r}")
        self.found["recorded"] += on_record

    def broken(self, loss: LossFunction, bad: float, victim: int) -> LossFunction:
        def broken_loss(logprobs: Tensor, entropies: Tensor, batch: MicroBatch) -> tuple[Tensor, Sums]:
            value, sums = loss(logprobs, entropies, batch)
            return (value + bad if self.rank == victim else value), sums

        return broken_loss

    def put_into_weights(self, kind: str) -> None:
        """Flip a bit of what one rank holds: push and save must refuse on every rank; the checkpoint is as it was."""
        checkpoint = newest_valid(self.folder / CHECKPOINTS)
        assert checkpoint is not None
        Roles(self.policy).load_state(checkpoint.path / "state")
        before, digest = self.weights(), self.server.digest
        victim = self.draw.randrange(NUM_RANKS)
        name, parameter = self.draw_parameter()
        if self.rank == victim:
            self.flip(kind, parameter)
        refusals = [self.refusal(self.save)]
        if kind == "moment":  # the next step carries it into the weights
            self.step(trajectories(), make_loss(RUN_SETTINGS))
        refusals.append(self.refusal(self.push))
        dist.barrier()
        self.found["injected"] += 1
        self.found["saved"] += newest_valid(self.folder / CHECKPOINTS) != checkpoint
        self.found["pushed"] += self.server.digest != digest
        self.found["recorded"] += all(why is not None and "is not finite" in why for why in refusals)
        Roles(self.policy).load_state(checkpoint.path / "state")
        self.found["intact"] += same(before, self.weights())
        if self.rank == 0:
            print(f"ZeRO {self.stage}: bit flipped in a {kind} of rank {victim} ({name}): {refusals[0]}")

    def flip(self, kind: str, parameter: Tensor) -> None:
        """Make one number NaN by setting all bits of its exponent."""
        if kind == "weight":
            values = parameter.detach().view(-1)
        else:
            optimizer = getattr(self.policy._engine.optimizer, "optimizer", self.policy._engine.optimizer)
            values = next(iter(optimizer.state.values()))["exp_avg"].view(-1)
        bits = struct.unpack("<i", struct.pack("<f", float(values[3])))[0] | 0x7F800001
        values[3] = struct.unpack("<f", struct.pack("<i", bits))[0]

    def draw_parameter(self) -> tuple[str, Tensor]:
        return self.draw.choice(self.policy.weights())


def run_rank(folder: Path, stages: str, seed: int) -> dict[str, int]:
    """Go through all injections as one rank; what it found is written to found_RANK.json."""
    rank = dist.get_rank()
    solo = SoloWork(dist.distributed_c10d._get_default_store(), rank, 120.0)
    found = dict.fromkeys(_WORST, 0)
    for stage in stages:
        for key, value in Rank(folder, 0 if stage == "0" else 2, seed, solo).run().items():
            found[key] += value
    (folder / f"found_{rank}.json").write_text(json.dumps(found))
    return found


if __name__ == "__main__":
    sys.exit(main())
