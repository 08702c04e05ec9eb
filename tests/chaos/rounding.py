"""Honest pushes of bfloat16 mixtures between the real learner and real vLLM, which share no kernel: none is refused.

    python -m tests.chaos.rounding [--seed N] [--models N] [--pushes N] [--short]

Random models of 16 to 28 layers with 64 experts, whose logits have a deviation of 3: rounding sends tokens to other
experts, and moves a few logprobs by more than a nat. Before each push every weight moves by up to a percent. One server
serves all models of a shape, one learner after another.
--short: one model of 16 layers, two pushes.

holds: no push is refused. largest, tail, median: the largest of each over all pushes, in nats.
"""

import sys
import tempfile
from pathlib import Path
from random import Random

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from learner.models.policy import PolicyEngine
from learner.models.world import join_world
from learner.rank.push import RankPusher, natural_text
from protocol.settings.settings import Settings
from tests.benchmarks.push_server import MeasuredLine, served
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.policy_settings import small_policy_settings
from tests.fakes.ports import free_port
from tests.fakes.tiny_models import byte_tokenizer

_HOST = "127.0.0.1"
_LAYERS = (16, 20, 24, 28)
_SIZE, _WIDTH, _LOGITS = 256, 0.06, 3.0  # hidden size; deviation of weights and of logits


def main() -> int:
    asked = options(__doc__ or "", {"models": 1, "pushes": 1}, models=20, pushes=10)
    draw = Random(asked.seed)
    torch.manual_seed(asked.seed)
    torch.set_num_threads(1)
    join_world(0, 1, _HOST, free_port(), 600.0)
    refused: list[str] = []
    seen = np.zeros(3)
    num_models, num_pushes = (1, 2) if asked.short else (asked.models, asked.pushes)
    for place, layers in enumerate(_LAYERS[:num_models]):
        with (
            tempfile.TemporaryDirectory() as folder,
            served(_make_mixture(Path(folder), layers), 1, "in_place") as servers,
        ):
            for number in range(place, num_models, len(_LAYERS)):
                model = _make_mixture(Path(folder), layers)
                pushes = _Pushes(model, [MeasuredLine(name, _HOST, port) for name, port in servers], refused)
                for version in range(1, num_pushes + 1):
                    pushes.push(version, 10 ** draw.uniform(-6, -2))
                pushes.pusher.close()
                seen = np.maximum(seen, pushes.seen)
                print(
                    f"rounding: model {number + 1} layers={layers} refused={len(refused)} seen={pushes.seen}",
                    flush=True,
                )
    figures = dict(zip(("median", "tail", "largest"), map(float, seen), strict=True))
    return conclude(
        "rounding", not refused, models=num_models, pushes=num_models * num_pushes, refused=len(refused), **figures
    )


class _Pushes:
    """The learner of one model, and what its server's answers differed by."""

    def __init__(self, model: Path, servers: list[MeasuredLine], refused: list[str]) -> None:
        settings = Settings.model_validate({"policy": {"model": str(model), "dtype": "bfloat16"}})
        self._policy = PolicyEngine(small_policy_settings(model, dtype="bfloat16", is_trained=False))
        self.pusher = RankPusher(self._policy, settings, servers, _HOST, "gloo", natural_text(model))
        self.seen, self._refused, self._servers = np.zeros(3), refused, servers
        self._judge, self.pusher._probe.find_fault = self.pusher._probe.find_fault, self._find_fault  # type: ignore[method-assign]

    def push(self, version: int, step: float) -> None:
        with torch.no_grad():
            for parameter in self._policy._model.parameters():
                parameter.mul_(1 + step * torch.randn_like(parameter))
        report = self.pusher.push(version)
        assert report is not None
        assert not report.failed.keys() - {self._servers[0].name}

    def _find_fault(self, server: str, logprobs: list[float]) -> str | None:
        """Keep the differences and the fault, and accept: the next push is to be tried too."""
        differences = np.abs(np.array(logprobs) - self.pusher._probe._expected)
        self.seen = np.maximum(self.seen, np.quantile(differences, (0.5, 0.95, 1.0)))
        if (fault := self._judge(server, logprobs)) is not None:
            print(f"rounding: {fault}", flush=True)
            self._refused.append(fault)
        return None


def _make_mixture(folder: Path, layers: int) -> Path:
    config = Qwen3MoeConfig(
        vocab_size=8192,
        hidden_size=_SIZE,
        num_hidden_layers=layers,
        num_attention_heads=_SIZE // 64,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=2 * _SIZE,
        moe_intermediate_size=_SIZE // 2,
        num_experts=64,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=_WIDTH,
        torch_dtype="bfloat16",
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(_LOGITS / (_WIDTH * _SIZE**0.5))
    model.to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


if __name__ == "__main__":
    sys.exit(main())
