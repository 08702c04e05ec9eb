"""The scorer by a model, against the model's own outputs one text at a time."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from protocol.errors import OperatorError
from rewards.reward_model import ModelOptions, RewardModel, _batches, make_model_scorer
from rewards.sample import make_sample
from tests.fakes.tiny_models import byte_tokenizer, tiny_config

TEXTS = ["short", "a much longer text than the others<eos>", "middling<eos>", "", "short<eos>"]


def _config(**options: object) -> Qwen2Config:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    return tiny_config(**shape, initializer_range=0.2, pad_token_id=1, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a reward model whose padding is its end of text, as is common."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("rm")
    Qwen2ForSequenceClassification(_config(num_labels=1, mean=0.5, std=2.0)).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def _expected(folder: Path, text: str) -> float:
    tokenizer, model = byte_tokenizer(), Qwen2ForSequenceClassification.from_pretrained(folder)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = ids if ids[-1:] == [1] else [*ids, 1]
    with torch.inference_mode():
        hidden = model.model(torch.tensor([ids])).last_hidden_state
        return (float(model.score(hidden)[0, -1, 0]) - 0.5) / 2.0


@pytest.mark.parametrize("batch_tokens", [16_384, 30])
def test_rewards_are_the_heads_output_at_the_end_of_text_whatever_the_batch(folder: Path, batch_tokens: int) -> None:
    model = RewardModel(ModelOptions(str(folder), batch_tokens=batch_tokens, device="cpu"))
    expected = [_expected(folder, text) for text in TEXTS]
    assert model.score(TEXTS) == pytest.approx(expected, abs=1e-5)
    assert len({round(reward, 6) for reward in expected}) == 4  # "short" is "short<eos>"


async def test_samples_of_several_requests_get_their_own_rewards(folder: Path) -> None:
    scorer = make_model_scorer(ModelOptions(str(folder), device="cpu"))
    requests = [[make_sample(text, None, None) for text in TEXTS[start:]] for start in range(len(TEXTS))]
    answers = await asyncio.gather(*(scorer(samples) for samples in requests))
    for start, scores in enumerate(answers):
        expected = [_expected(folder, text) for text in TEXTS[start:]]
        assert [score.reward for score in scores] == pytest.approx(expected, abs=1e-5)


def test_long_text_is_read_from_its_end(folder: Path) -> None:
    model = RewardModel(ModelOptions(str(folder), device="cpu"))
    ending = "z" * 63
    assert model.score(["begins with this " * 20 + ending]) == pytest.approx([_expected(folder, ending)], abs=1e-5)


def test_batches_are_of_like_length_and_bounded() -> None:
    assert _batches([5, 100, 6, 64], 20) == [[0, 2], [3], [1]]


def test_model_without_a_trained_head_is_refused(tmp_path: Path) -> None:
    Qwen2ForCausalLM(_config()).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(OperatorError, match=r"has 2 outputs|has no weights score\.weight: it is not a reward model"):
        RewardModel(ModelOptions(str(tmp_path)))


def test_folder_that_is_missing_is_named() -> None:
    with pytest.raises(OperatorError, match="rewards: --model /nowhere is not a folder"):
        RewardModel(ModelOptions("/nowhere"))
