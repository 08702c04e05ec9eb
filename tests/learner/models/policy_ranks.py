"""Small learner worlds, run by test_policy_ranks: `python policy_ranks.py FOLDER`.

Worlds of one rank and of two train: for each ZeRO stage a world steps on the same seven trajectories, then goes through
what must leave the weights alone, saves, loads, goes on and exports; two ranks then go on from what one rank saved.
Rank 0 writes what it found to FOLDER/ranks_WORLD_SIZE.pt.
Worlds of one and of three ranks go on, in each ZeRO stage, from each state that two ranks saved: rank 0 writes what it
found to FOLDER/resumed_WORLD_SIZE.pt. Ranks are forked from this process, which has imported everything.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from learner.data.packing import plan_step
from learner.data.sft_rows import SftRow
from learner.models.gradient import StepResult, Sums
from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from learner.models.parked import ParkedModels
from learner.models.policy import PolicyEngine
from learner.models.read_back import find_mismatch
from learner.models.reference import ReferenceModel
from learner.models.training.deepspeed_config import import_deepspeed
from learner.models.training.optimizer import NonFiniteWeightsError
from learner.objectives.supervised import run_sft
from protocol.errors import OperatorError
from tests.learner.models.forked_world import run_world
from tests.learner.models.small_policy import LENGTHS, Loss, loss, same, settings, trajectories

# Ranks of the worlds that train, and of those that go on from what two ranks saved.
TRAINING, RESUMING = (1, 2), (1, 3)
STAGES: tuple[Literal[0, 1, 2, 3], ...] = (0, 2, 3)
# The tiny model's state is 0.8 MB: it goes to several files, so that each rank writes one.
SHARD_BYTES = 200_000


@contextmanager
def whole_weights_moved() -> Iterator[list[int]]:
    """Return a list of how many weights each `Module.to` inside the block moved, without those that ZeRO 3 has divided.

    On a CPU such a call does nothing; on a GPU it puts them all on the card.
    """
    moved: list[int] = []
    move = torch.nn.Module.to

    def counted(module: torch.nn.Module, *args: Any, **options: Any) -> torch.nn.Module:
        moved.append(sum(parameter.numel() for parameter in module.parameters()))
        return move(module, *args, **options)

    with patch.object(torch.nn.Module, "to", counted):
        yield moved


class Rank:
    """What one rank does with one ZeRO stage."""

    def __init__(self, model: Path, zero_stage: Literal[0, 1, 2, 3], folder: Path) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.stage, self.folder = zero_stage, folder
        self.settings = settings(model, zero_stage)
        with whole_weights_moved() as self.moved:
            self.policy = PolicyEngine(self.settings)

    def step(self, samples: list[LearnerSample], micro_batch_tokens: int, loss_function: Loss = loss) -> StepResult:
        plan = plan_step([len(s.tokens) for s in samples], self.world_size, micro_batch_tokens)[self.rank]
        parts = [make_micro_batch([samples[i] for i in part]) for part in plan]
        total = sum(int(s.loss_mask.sum()) for s in samples)
        return self.policy.step(parts, loss_function, total)

    def weights(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self.policy.weights():
            with self.policy.gather([parameter]):
                found[name] = parameter.detach().clone()
        return found

    def moments(self) -> dict[str, Tensor]:
        """Return AdamW's first moments: after one step, the clipped gradient times 0.1."""
        from deepspeed.utils import safe_get_full_optimizer_state

        found = {}
        for name, parameter in self.policy.weights():
            if self.stage == 0:
                found[name] = self.policy._engine.optimizer.state[parameter]["exp_avg"].clone()
            else:
                found[name] = safe_get_full_optimizer_state(parameter, "exp_avg").clone()
        return found

    def run(self) -> dict[str, object]:
        samples = trajectories()
        found: dict[str, object] = {"moved": self.moved}
        probe = make_micro_batch(samples[:3])
        found["logprobs"] = self.policy.logprobs(probe)
        found["loads_before_the_first_step"] = self.saves_and_loads()
        found["first"] = self.step(samples, micro_batch_tokens=50)
        found["moments"] = self.moments()
        found["weights"] = self.weights()
        found["refused"] = self.refuse(samples)
        found["flipped"] = self.flip()
        found["second"] = self.step(samples, micro_batch_tokens=90)
        found["few"] = self.step(samples[:1], micro_batch_tokens=90)
        state = self.folder / f"state_{self.world_size}_{self.stage}"
        found["digests"] = self.policy.state_digests()
        written = self.policy.save_state(state, SHARD_BYTES)
        written |= self.policy.export_hf(self.folder / f"export_{self.world_size}_{self.stage}")
        found["mismatch"] = find_mismatch(written, self.policy.device)
        found["pushed_digests"] = self.pushed_digests()
        saved = self.weights()
        found["further"] = further = self.further(samples)
        self.policy.load_state(state)
        found["loads"] = same(saved, self.weights())
        again = self.further(samples)
        found["resumes"] = same(further["weights"], again["weights"]) and further["losses"] == again["losses"]
        self.policy.load_state(state)
        found["parked"] = self.park()
        between_parkings = self.further(samples, self.park)
        found["trains_on"] = same(further["weights"], between_parkings["weights"])
        found["trains_on"] &= further["losses"] == between_parkings["losses"]
        found["saved"] = saved
        found["refused_state"] = self.load_what_does_not_fit(state)
        found["reference"] = self.refer(found["logprobs"], probe)
        found["sft"] = self.fine_tune(samples)
        if self.stage == 3:
            found["within_nodes"] = self.gather_within_nodes(samples)
        if self.world_size == 2:  # one rank alone was there before
            found["resumed_from_1"] = self.resume(written_by=1)
        return found

    def gather_within_nodes(self, samples: list[LearnerSample]) -> tuple[dict[str, Tensor], int]:
        """Return the weights after a first step, and how many of them this rank holds for its node."""
        node = Rank.__new__(Rank)
        vars(node).update(vars(self))
        zero = {"zero_hpz_partition_size": self.world_size}
        node.policy = PolicyEngine(replace(self.settings, deepspeed={"zero_optimization": zero}))
        node.step(samples, micro_batch_tokens=50)
        weights = node.weights()
        kept = [getattr(parameter, "ds_secondary_tensor", None) for _, parameter in node.policy.weights()]
        return weights, sum(part.numel() for part in kept if part is not None)

    def refer(self, first: Any, probe: MicroBatch) -> tuple[list[float], float]:
        """Return a reference's largest differences from the policy, and the share of it that this rank holds.

        The differences are those from the first policy, after a refresh, and after its state was saved and loaded.
        """
        reference = ReferenceModel(self.settings, is_offloaded=False, is_kept=True)
        differences = [float((reference.logprobs(probe) - first).abs().max())]
        reference.refresh(self.policy)
        now = self.policy.logprobs(probe)
        differences.append(float((reference.logprobs(probe) - now).abs().max()))
        state = self.folder / f"reference_{self.world_size}_{self.stage}"
        reference.save_state(state)
        reference.load_state(state)
        differences.append(float((reference.logprobs(probe) - now).abs().max()))
        own = sum(getattr(each, "ds_tensor", each).numel() for each in reference._model.parameters())
        return differences, own / sum(reference._shards.whole_numel(each) for each in reference._model.parameters())

    def pushed_digests(self) -> set[str]:
        """Return the digests of a push while its parameters are whole, and while they are split."""
        digests = {self.policy.pushed_digest()}
        parameters: list[Any] = [parameter for _, parameter in self.policy.weights()]
        if self.stage == 3:  # which keeps parameters of this size whole between steps
            parameters[0].partition(parameters)
            digests.add(self.policy.pushed_digest())
            parameters[0].all_gather(parameters)
        return digests

    def saves_and_loads(self) -> bool:
        """Return whether a state that no step was taken in can be saved and loaded, and changes nothing."""
        before, state = self.weights(), self.folder / f"fresh_{self.world_size}_{self.stage}"
        self.policy.save_state(state)
        self.policy.load_state(state)
        return same(before, self.weights())

    def park(self) -> dict[str, int]:
        """Move the policy away and back; return the bytes that were away, and those of its weights left meanwhile.

        mapped: of weights that lie in their file, as at stage 0 on a CPU, and never on a GPU.
        """
        models = ParkedModels([self.policy], torch.device("cpu"))
        models.park()
        left = [getattr(weight, "ds_tensor", weight).untyped_storage() for _, weight in self.policy.weights()]
        found = {"away": models.num_bytes, "left": sum(part.nbytes() for part in left if part.resizable())}
        found["mapped"] = sum(part.nbytes() for part in left if not part.resizable())
        models.restore()
        return found

    def further(self, samples: list[LearnerSample], between: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """Return losses, learning rates and weights of three steps more. between: done before each."""
        losses, rates = [], []
        for part in (samples, samples[2:], samples[:5]):
            between()
            losses.append(self.step(part, micro_batch_tokens=50).loss)
            rates.append(self.policy._scheduler.get_last_lr()[0])
        return {"losses": losses, "rates": rates, "weights": self.weights()}

    def resume(self, written_by: int) -> dict[int, dict[str, Any]]:
        """Return, by the ZeRO stage of the writer, what going on from its state gave."""
        found = {}
        for stage in STAGES:
            self.policy.load_state(self.folder / f"state_{written_by}_{stage}")
            found[stage] = self.further(trajectories())
        return found

    def load_what_does_not_fit(self, state: Path) -> str:
        """Return what is said of a state with a parameter that the policy has not."""
        copy = state.with_name(f"{state.name}_other")
        if self.rank == 0:
            shutil.copytree(state, copy)
            description = json.loads((copy / "state.json").read_text())
            description["files"]["model.extra.weight"] = "state_00000.safetensors"
            (copy / "state.json").write_text(json.dumps(description))
        dist.barrier()
        try:
            self.policy.load_state(copy)
        except OperatorError as error:
            return str(error)
        return "accepted"

    def fine_tune(self, samples: list[LearnerSample]) -> list[float]:
        """Return the loss of each of six steps on the seven rows, four at a time."""
        losses: list[float] = []
        rows = [SftRow(s.tokens, np.where(s.loss_mask, 0.5, 0.0).astype(np.float32)) for s in samples]
        run_sft(
            self.policy,
            rows,
            rows_per_step=4,
            max_steps=6,
            micro_batch_tokens=60,
            on_step=lambda step, loss: losses.append(loss),
        )
        return losses

    def refuse(self, samples: list[LearnerSample]) -> dict[str, object]:
        """Take steps with one bad number on one rank; return what each reported and whether all bits stayed."""
        weights, moments = self.weights(), self.moments()
        broken = np.full(LENGTHS[0], np.nan, np.float32)
        # Its clamped ratio, and so its loss, are finite.
        broken_by_infinity = np.full(LENGTHS[0], np.inf, np.float32)
        bad_sample = replace(samples[0], behaviour_logprobs=broken)

        def infinite(logprobs: Tensor, entropies: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
            value, sums = loss(logprobs, entropies, micro_batch)
            return (value + float("inf") if self.rank == self.world_size - 1 else value), sums

        outcomes = {
            "nan_gradient": self.step([bad_sample, *samples[1:]], 50),
            "infinite_loss": self.step(samples, 50, infinite),
            "infinite_behaviour": self.step(
                [replace(samples[0], behaviour_logprobs=-broken_by_infinity), *samples[1:]], 50
            ),
        }
        applied = {name: outcome.applied for name, outcome in outcomes.items()}
        return {"applied": applied, "intact": same(weights, self.weights()) and same(moments, self.moments())}

    def flip(self) -> list[str]:
        """Make a weight of the last rank NaN, then a number of its optimizer's state; return what was said of it."""
        self.policy.check_finite(with_optimizer=True)
        optimizer = getattr(self.policy._engine.optimizer, "optimizer", self.policy._engine.optimizer)
        _, parameter = self.policy.weights()[-1]
        weights = getattr(parameter, "ds_tensor", parameter).detach().view(-1)
        moments = next(iter(optimizer.state.values()))["exp_avg"].view(-1)
        said = []
        for numbers in (weights, moments):
            kept = numbers[0].item()
            if self.rank == self.world_size - 1:
                numbers[0] = float("nan")
            try:
                self.policy.check_finite(with_optimizer=numbers is moments)
            except NonFiniteWeightsError as error:
                said.append(str(error))
            numbers[0] = kept
        self.policy.check_finite(with_optimizer=True)
        return said


def train(folder: Path) -> dict[int, dict[str, object]]:
    return {stage: Rank(folder / "model", stage, folder).run() for stage in STAGES}


def resume(folder: Path) -> dict[int, dict[int, dict[str, Any]]]:
    return {stage: Rank(folder / "model", stage, folder).resume(written_by=2) for stage in STAGES}


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0])
    import_deepspeed()
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401  # once, not once a rank

    for world_size in TRAINING:
        run_world(world_size, folder, f"ranks_{world_size}", train)
    for world_size in RESUMING:
        run_world(world_size, folder, f"resumed_{world_size}", resume)


if __name__ == "__main__":
    main(sys.argv[1:])
