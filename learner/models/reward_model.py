"""A reward model under training: a language model's body with one number for each text, at its last token.

Shapes: S trajectories of a micro-batch.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learner.models.critic import load_value_model
from learner.models.gradient import LossFunction, StepResult, Sums, accumulate
from learner.models.micro_batch import MicroBatch
from learner.models.policy import PolicyEngine
from learner.models.read_back import WrittenFiles
from learner.models.settings import PolicySettings
from learner.models.start_check import check_model
from learner.models.training.trained_model import TrainedModel


class RewardEngine(PolicyEngine):
    """The trained reward model, in the policy's place: losses get rewards [S] where a policy's get logprobs [K]."""

    def __init__(self, settings: PolicySettings) -> None:
        TrainedModel.__init__(self, load_value_model, settings, "reward model")
        self._model.bias.zero_()  # shifts all rewards alike; exported folders have none
        self.scale: tuple[float, float] | None = None  # mean and deviation of held-out rewards, for exported folders

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_function: LossFunction,
        global_weight: float,
        *,
        with_entropy: bool = True,
    ) -> StepResult:
        """Return the outcome of one optimizer step; arguments as of `PolicyEngine.step`."""

        def loss_of(micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
            rewards = self._engine(_at_ends(micro_batch))
            return loss_function(rewards, torch.zeros_like(rewards), micro_batch)

        sums = accumulate(self._engine, micro_batches, loss_of, self._world_size / global_weight)
        return self.update(sums, global_weight)

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch, temperature: float | None = None) -> Tensor:
        """Return each text's reward, float32 [S]. Collective in ZeRO 3."""
        rewards: Tensor = self._engine(_at_ends(micro_batch.to(self.device)))
        return rewards

    def export_hf(self, folder: Path) -> WrittenFiles:
        """Write a folder of transformers' sequence classification; otherwise as `PolicyEngine.export_hf`."""
        written = super().export_hf(folder)
        if dist.get_rank() == 0:
            _describe(folder / "config.json", self.scale)
        return written


def load_reward_model(settings: PolicySettings, *, name: str) -> RewardEngine:
    """Return the reward model after the check of its model. Arguments, errors: as of `load_policy`. Collective."""
    check_model(settings, "critic", name=name)
    return RewardEngine(settings)


def find_unserved(folder: Path) -> str | None:
    """Return a sentence for a model whose trained folder no reward service could load, or None."""
    if _class_name(json.loads((folder / "config.json").read_text(encoding="utf-8"))) is not None:
        return None
    return (
        f"transformers has no sequence classification for {folder}: sluice serve-reward cannot load the trained reward "
        "model. critic.model can."
    )


def _at_ends(micro_batch: MicroBatch) -> MicroBatch:
    """Return the micro-batch with the last token of each trajectory in place of its model tokens."""
    ends = torch.tensor(micro_batch.lengths, device=micro_batch.tokens.device).cumsum(0) - 1
    return replace(micro_batch, predict_at=ends)


def _describe(path: Path, scale: tuple[float, float] | None) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"architectures": [name]} if (name := _class_name(config)) else {}
    config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}  # one output
    config |= {"mean": None, "std": None} if scale is None else {"mean": scale[0], "std": scale[1]}
    config.pop("normalize_reward", None)  # of the model that the training began from
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _class_name(config: dict[str, Any]) -> str | None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    name: str | None = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config["model_type"])
    return name
