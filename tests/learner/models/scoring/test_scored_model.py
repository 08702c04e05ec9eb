"""Real tiny models asked for logprobs: through their heads, by their logits, and which way is chosen."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from learner.models import varlen_attention
from learner.models.gradient import score_tokens, token_logits
from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from learner.models.scoring.scored_model import Scoring, make_scored, scored_model
from learner.models.weights.lora import LoraForm, add_adapters
from tests.benchmarks.packing_table import _BASE, ARCHITECTURES, VOCAB, OneProcess

TEMPERATURE = 0.7
# Each does something else between its head and its logits, the last one nothing.
MODELS: dict[str, dict[str, Any]] = {
    "Gemma2Config": {"final_logit_softcapping": 3.0},
    "CohereConfig": {"logit_scale": 0.3},
    "GraniteConfig": {"logits_scaling": 3.0},
    "PhiConfig": {},  # a head with a bias
    "Qwen2Config": {},
}


def make_model(name: str, **others: Any) -> Any:
    torch.manual_seed(0)
    varlen_attention.register()
    config = getattr(transformers, name)(**{**_BASE, **ARCHITECTURES[name][0], **MODELS.get(name, {}), **others})
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=varlen_attention.NAME)
    return model.float()


def micro_batch() -> MicroBatch:
    rng = np.random.default_rng(0)
    samples = []
    for length in (20, 13):
        mask = rng.random(length) < 0.7
        mask[0] = False
        tokens = rng.integers(0, VOCAB, length).astype(np.int32)
        samples.append(LearnerSample(tokens, mask, np.zeros(length, np.float32)))
    return make_micro_batch(samples)


def score(model: Any, *, with_entropy: bool = True) -> tuple[Tensor, Tensor]:
    return score_tokens(OneProcess(model), micro_batch(), TEMPERATURE, with_entropy=with_entropy)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_both_ways_give_the_same_logprobs_entropies_and_gradient(name: str, is_tied: bool) -> None:
    model = make_model(name, tie_word_embeddings=is_tied)
    make_scored(model)
    found = {}
    for way in ("head", "logits"):
        scored_model(model).method = way  # type: ignore[assignment]
        model.zero_grad()
        logprobs, entropies = score(model)
        (logprobs * torch.linspace(-1.0, 1.0, len(logprobs))).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found[way] = (logprobs.detach(), entropies, gradient)
    for by_head, by_logits in zip(found["head"], found["logits"], strict=True):
        assert float((by_head - by_logits).norm() / by_logits.norm()) < 2e-6


@pytest.mark.parametrize("name", MODELS)
def test_model_that_is_not_asked_for_logprobs_gives_its_own_logits_before_and_after(name: str) -> None:
    model, prepared = make_model(name), make_model(name)
    make_scored(prepared)
    batch = micro_batch()
    asked = {"input_ids": batch.tokens, "segments": varlen_attention.Segments(batch.lengths, torch.device("cpu"))}
    expected = model(**asked).logits
    assert torch.equal(prepared(**asked).logits, expected)
    score(prepared)
    assert torch.equal(prepared(**asked).logits, expected)


class Doubling(transformers.Qwen2ForCausalLM):  # type: ignore[misc]
    """A model whose code changes its logits, which no configuration shows."""

    def forward(self, **inputs: Any) -> Any:  # type: ignore[override]
        output = super().forward(**inputs)
        output.logits = 2.0 * output.logits
        return output


def strange(kind: type[Any]) -> Any:
    varlen_attention.register()
    torch.manual_seed(0)
    model = kind._from_config(transformers.Qwen2Config(**_BASE), attn_implementation=varlen_attention.NAME)
    make_scored(model)
    return model


def test_way_by_logits_follows_a_model_that_changes_its_logits() -> None:
    model = strange(Doubling)
    scored_model(model).method = "logits"
    batch = micro_batch()
    segments = varlen_attention.Segments(batch.lengths, torch.device("cpu"))
    positions = batch.position_ids
    logits = model(input_ids=batch.tokens, position_ids=positions, segments=segments).logits[0][batch.predict_at]
    expected = (logits / TEMPERATURE).log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
    torch.testing.assert_close(score(model)[0], expected)


class EveryToken(transformers.Qwen2ForCausalLM):  # type: ignore[misc]
    """A model that knows nothing of logits_to_keep, as models with code of their own may."""

    def forward(self, logits_to_keep: Any = None, **inputs: Any) -> Any:  # type: ignore[override]
        return super().forward(**inputs)


@pytest.mark.parametrize("way", ["head", "logits"])
def test_model_that_gives_logits_of_other_tokens_than_asked_for_is_refused_and_can_be_asked_again(way: Any) -> None:
    model = strange(EveryToken)
    scored_model(model).method = way
    with pytest.raises(ValueError, match=r"the model returns logits for 33 tokens, expected 2\d"):
        score(model)
    tokens = torch.ones(1, 4, dtype=torch.long)
    segments = varlen_attention.Segments((4,), torch.device("cpu"))
    asked = Scoring(torch.tensor([1, 2, 3, 1]), 1.0, with_entropy=False)
    assert model(input_ids=tokens, segments=segments, scoring=asked).logits.shape == (1, 4, 2)


def test_head_with_adapters_has_the_logprobs_of_its_logits() -> None:
    model = make_model("Qwen2Config")
    add_adapters(model, LoraForm(rank=4, alpha=8.0, targets=("q_proj", "lm_head")))
    torch.nn.init.normal_(model.lm_head.lora_B["default"].weight)
    make_scored(model)
    scored_model(model).use("head")  # the choice of a check that sees no adapters
    logprobs, _ = score(model)
    batch = micro_batch()
    logits = token_logits(OneProcess(model), batch) / TEMPERATURE
    expected = logits.log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)
