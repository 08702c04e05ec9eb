"""The loss that balances a mixture's experts: the formula's, weighed by model tokens, refused without a router."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from learner.models.gradient import COMPUTED_TOKENS, ROUTER_AUX_LOSS, Sums, add_gradient
from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from learner.models.model_loading import load_model, router_loss_of
from learner.models.varlen_attention import Segments
from protocol.errors import OperatorError
from tests.benchmarks.packing_table import _BASE, ARCHITECTURES, VOCAB, OneProcess, settings_of

WEIGHT = 0.5


def model_of(name: str, folder: Path, weight: float = WEIGHT) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**_BASE, **ARCHITECTURES[name][0]})
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return load_model(replace(settings_of(folder), router_aux_loss=weight))


def micro_batches(*, one_each: bool = False) -> list[MicroBatch]:
    rng = np.random.default_rng(0)
    samples = [
        LearnerSample(
            rng.integers(0, VOCAB, length).astype(np.int32), np.arange(length) > 3, np.zeros(length, np.float32)
        )
        for length in (20, 9, 13)
    ]
    if one_each:
        return [make_micro_batch([sample]) for sample in samples]
    return [make_micro_batch(samples[:2]), make_micro_batch(samples[2:])]


def nothing(logprobs: Tensor, entropies: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
    return 0.0 * logprobs.sum(), {"tokens": torch.ones_like(logprobs).sum()}


def slow_loss(routers: list[Tensor], num_chosen: int) -> Tensor:
    """Return experts * sum over experts of (share of tokens that chose it) * (mean probability), all layers' tokens.

    Source: Switch Transformers, arXiv:2101.03961, equations 4 to 6, each of a token's choices counted.
    """
    probabilities = torch.cat(routers).softmax(-1)
    num_tokens, num_experts = probabilities.shape
    total = torch.zeros(())
    for expert in range(num_experts):
        chosen = sum(int(expert in row.topk(num_chosen).indices.tolist()) for row in probabilities)
        total = total + chosen / num_tokens * probabilities[:, expert].mean()
    return num_experts * total


def add(model: Any, parts: list[MicroBatch]) -> tuple[Sums, dict[str, Tensor]]:
    """Return the sums, and the gradient by parameter."""
    model.zero_grad()
    loss = router_loss_of(model, WEIGHT)
    form: dict[str, Any] = {"temperature": 1.0, "with_entropy": False, "router_loss": loss, "router_weight": WEIGHT}
    sums = add_gradient(OneProcess(model), parts, nothing, 0.1, **form)
    return sums, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["MixtralConfig", "Qwen3MoeConfig"])
def test_router_loss_is_the_formulas_of_each_trajectory_weighed_by_model_tokens(name: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path)
    sums, gradient = add(model, micro_batches())
    model.zero_grad()
    expected = torch.zeros(())
    for part in micro_batches(one_each=True):
        output = model(
            input_ids=part.tokens,
            position_ids=part.position_ids,
            segments=Segments(part.lengths, torch.device("cpu")),
            use_cache=False,
        )
        expected = expected + slow_loss(list(output.router_logits), 2) * part.num_model_tokens
    (0.1 * WEIGHT * expected).backward()
    assert float(sums[ROUTER_AUX_LOSS]) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert float(sums["loss"]) == pytest.approx(WEIGHT * float(expected.detach()), rel=1e-5)
    routers = [name for name in gradient if name.endswith(("gate.weight", "router.weight"))]
    assert routers
    for router in routers:
        torch.testing.assert_close(gradient[router], dict(model.named_parameters())[router].grad, rtol=1e-4, atol=1e-6)


def test_router_loss_does_not_depend_on_packing(tmp_path: Path) -> None:
    model = model_of("MixtralConfig", tmp_path)
    (packed, gradient), (alone, expected) = add(model, micro_batches()), add(model, micro_batches(one_each=True))
    assert float(packed[ROUTER_AUX_LOSS]) == pytest.approx(float(alone[ROUTER_AUX_LOSS]), rel=1e-5)
    for name, each in expected.items():
        torch.testing.assert_close(gradient[name], each, rtol=1e-4, atol=1e-6)


def test_router_loss_does_not_depend_on_a_shared_prompt(tmp_path: Path) -> None:
    model = model_of("MixtralConfig", tmp_path)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 100).astype(np.int32)
    samples = [
        LearnerSample(tokens[:length], np.arange(length) >= 70, np.zeros(length, np.float32)) for length in (100, 83)
    ]
    parts = [[make_micro_batch(samples, share_prompts=share_prompts)] for share_prompts in (True, False)]
    assert [part.tokens.numel() for (part,) in parts] == [113, 183]
    (shared, gradient), (alone, expected) = (add(model, part) for part in parts)
    assert float(shared[ROUTER_AUX_LOSS]) == pytest.approx(float(alone[ROUTER_AUX_LOSS]), rel=1e-5)
    for name, each in expected.items():
        torch.testing.assert_close(gradient[name], each, rtol=1e-4, atol=1e-6)


def test_model_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"learner\.router_aux_loss = 0\.5 needs a mixture of experts .* qwen2 has"):
        router_loss_of(model_of("Qwen2Config", tmp_path), 0.5)


def test_nothing_is_added_unless_it_is_asked_for(tmp_path: Path) -> None:
    model = model_of("MixtralConfig", tmp_path, 0.0)
    sums = add_gradient(OneProcess(model), micro_batches(), nothing, 1.0, temperature=1.0, with_entropy=False)
    assert sums.keys() == {"loss", "tokens", COMPUTED_TOKENS}
    assert float(sums["loss"]) == 0.0
