"""The scorer by a model, against the model's own outputs one text at a time."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Gemma2Config,
    Gemma2ForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from protocol.errors import OperatorError
from rewards.bundled import ScorerOptions, scorer_named
from rewards.reward_model import ModelOptions, RewardModel, _batches, make_model_scorer
from rewards.sample import make_sample
from tests.fakes.tiny_encoder import word_tokenizer
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


@pytest.mark.parametrize(
    ("prompt", "is_foreign"),
    [("Say <search> or | or <|>", False), ("<eos>plain", False), ("<|im_start|>user\nHi", True), ("[INST] Hi", True)],
)
async def test_prompt_in_another_template_than_the_models_is_marked(
    folder: Path, prompt: str, is_foreign: bool
) -> None:
    scorer = make_model_scorer(ModelOptions(str(folder), device="cpu"))
    (score,) = await scorer([make_sample(f"{prompt} answer", prompt, None)])
    assert score.logs == ({"foreign_marks": 1.0} if is_foreign else {})


def test_long_text_is_read_from_its_end(folder: Path) -> None:
    model = RewardModel(ModelOptions(str(folder), device="cpu"))
    ending = "z" * 63
    assert model.score(["begins with this " * 20 + ending]) == pytest.approx([_expected(folder, ending)], abs=1e-5)


@pytest.mark.parametrize("num_characters", [63, 64])
async def test_text_that_the_model_does_not_read_whole_is_marked(folder: Path, num_characters: int) -> None:
    scorer = make_model_scorer(ModelOptions(str(folder), max_tokens=64, device="cpu"))
    (score,) = await scorer([make_sample("z" * num_characters, None, None)])
    assert score.logs == ({} if num_characters == 63 else {"cut_texts": 1.0})  # the end of text is the 64th token


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


HEADS = {
    "OpenRLHF": (("score.", "value_head."),),
    "DeepSpeed-Chat": (("score.", "v_head."), ("model.", "rwtransformer.")),
    "verl": (),
    "TRL": (("model.", "pretrained_model.model."), ("score.", "v_head.summary.")),
}


@pytest.mark.parametrize("trainer", HEADS)
def test_reward_model_of_another_trainer_gives_the_same_rewards(folder: Path, tmp_path: Path, trainer: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    for theirs, other in HEADS[trainer]:
        tensors = {other + name.removeprefix(theirs) if name.startswith(theirs) else name: tensor
                   for name, tensor in tensors.items()}  # fmt: skip
    if bias := {"TRL": "v_head.summary.bias", "verl": "score.bias"}.get(trainer):
        tensors[bias] = torch.tensor([3.0])
    shutil.copytree(folder, tmp_path / "theirs")
    save_file(tensors, tmp_path / "theirs" / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for name in () if trainer == "verl" else ("id2label", "label2id", "architectures"):
        config.pop(name, None)
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    shift = 3.0 / 2.0 if bias else 0.0
    rewards = RewardModel(ModelOptions(str(tmp_path / "theirs"), device="cpu")).score(TEXTS)
    assert rewards == pytest.approx([_expected(folder, text) + shift for text in TEXTS], abs=1e-5)


@pytest.mark.parametrize("name", ["mlp.up_proj.lora_A.weight", "attn.bias"])
def test_weights_that_the_model_would_leave_out_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(folder, tmp_path / "theirs")
    more = {f"model.layers.0.{name}": torch.zeros(1)}
    save_file(
        load_file(folder / "model.safetensors") | more, tmp_path / "theirs" / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(OperatorError, match=f"such as model.layers.0.{name}"):
        RewardModel(ModelOptions(str(tmp_path / "theirs"), device="cpu"))


def test_soft_cap_of_the_attention_counts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 1, "num_labels": 1}
    config = Gemma2Config(**shape, **heads, attn_logit_softcapping=0.5, initializer_range=0.5)
    Gemma2ForSequenceClassification(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    own = Gemma2ForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager")
    ids = byte_tokenizer()(TEXTS[1], add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        expected = float(own.score(own.model(ids).last_hidden_state)[0, -1, 0])
    (reward,) = RewardModel(ModelOptions(str(tmp_path), device="cpu")).score([TEXTS[1]])
    assert reward == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_long_text_of_an_encoder_keeps_its_first_token(tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 19, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 64, "num_labels": 1, "initializer_range": 0.5}  # fmt: skip
    if family == "bert":
        BertForSequenceClassification(BertConfig(**shape, max_position_embeddings=16)).save_pretrained(tmp_path)
    else:  # two of RoBERTa's positions stand for padding
        config = RobertaConfig(**shape, max_position_embeddings=18, pad_token_id=1)
        RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    model = RewardModel(ModelOptions(str(tmp_path), device="cpu"))
    long, same = model.score(["where " * 40 + "is a town", "where " * 11 + "is a town"])
    assert long == pytest.approx(same, abs=1e-5)


@pytest.mark.parametrize("kind", ["bert", "fnet", "convbert", "xlnet"])
def test_reward_of_an_encoder_is_its_own_alone_and_beside_others_though_it_reads_padding(
    tmp_path: Path, kind: str
) -> None:
    shape = {"hidden_size": 32, "embedding_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes = {"intermediate_size": 32, "vocab_size": 32, "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 64}
    config = AutoConfig.for_model(kind, **shape, **sizes, initializer_range=0.5, num_labels=1)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    texts = ["oslo", "where is oslo a town of norway a capital of finland", "turku"]
    with torch.inference_mode():
        ids = [torch.tensor([word_tokenizer()(text)["input_ids"]]) for text in texts]
        expected = [float(model(input_ids=row).logits[0, 0]) for row in ids]
    scored = RewardModel(ModelOptions(str(tmp_path), device="cpu", max_tokens=64))
    assert scored.score(texts) == pytest.approx(expected, abs=1e-4)
    assert (scored._batch_tokens == 1) == (kind != "bert")


def test_digest_of_a_served_scorer_is_of_its_name_options_and_model_whatever_its_place(
    folder: Path, tmp_path: Path
) -> None:
    def digest(name: str, **options: Any) -> str:
        return scorer_named(name, ScorerOptions(**options)).digest

    copy, other = (Path(shutil.copytree(folder, tmp_path / name)) for name in ("copy", "other"))
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"})
    same = [
        digest("reward_model", model=str(folder), model_device="cpu"),
        digest("reward_model", model=str(copy), model_device="cpu", batch_tokens=64, workers=2),
    ]
    others = [
        digest("reward_model", model=str(other), model_device="cpu"),
        digest("reward_model", model=str(folder), model_device="cpu", model_dtype="bfloat16"),
        digest("exact_match"),
        digest("math_answer"),
        digest("format"),
        digest("format", tags="answer"),
    ]
    assert same[0] == same[1]
    assert len({*same, *others}) == 7
