"""Encoders as they are on users' disks: each vector is the model's own, whatever is encoded with it, or a refusal."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertModel,
    DPRConfig,
    DPRQuestionEncoder,
    FNetConfig,
    FNetModel,
    T5Config,
    T5EncoderModel,
    T5Model,
    XLNetConfig,
    XLNetModel,
)

from protocol.errors import OperatorError
from retriever.indexes.encoder import Encoder
from tests.fakes.tiny_encoder import make_tiny_encoder, word_tokenizer

TEXTS = ["oslo", "where is oslo a town of norway a capital of finland", "what is turku", "bergen"]


def _save(folder: Path, model: Any, **options: Any) -> Path:
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | options))
    return folder


def _bert(folder: Path, **options: Any) -> Path:
    make_tiny_encoder(folder)
    return _save(folder, BertModel.from_pretrained(folder), **options)


def _bfloat16(folder: Path) -> Path:
    make_tiny_encoder(folder)
    return _save(folder, BertModel.from_pretrained(folder).to(torch.bfloat16))


def _fnet(folder: Path) -> Path:
    torch.manual_seed(0)
    shape = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64}
    return _save(folder, FNetModel(FNetConfig(**shape, initializer_range=0.5)))


def _xlnet(folder: Path) -> Path:
    torch.manual_seed(0)
    shape = {"vocab_size": 32, "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 64}
    return _save(folder, XLNetModel(XLNetConfig(**shape, initializer_range=0.5)))


def _few_positions(folder: Path) -> Path:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return _save(folder, BertModel(BertConfig(vocab_size=32, max_position_embeddings=8, **shape)))


def _of_sentence_transformers(folder: Path, pooling: dict[str, Any], *others: str) -> Path:
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"} | {each: each for each in others}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    _state(folder, {"prompts": {"query": "what: ", "document": ""}})
    return folder


def _state(folder: Path, stated: dict[str, Any]) -> Path:
    (folder / "config_sentence_transformers.json").write_text(json.dumps(stated))
    return folder


def _plain(
    folder: Path, text: str, is_first: bool = False, most: int | None = None, has_length_1: bool = True
) -> NDArray[np.float32]:
    """Return the vector of a text by transformers alone."""
    from transformers import AutoModel, AutoTokenizer

    cut = {} if most is None else {"truncation": True, "max_length": most}
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(text, **cut)["input_ids"]])
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = model(input_ids=ids).last_hidden_state[0]
    vector: NDArray[np.float32] = (hidden[0] if is_first else hidden.mean(0)).numpy()
    return vector / np.linalg.norm(vector) if has_length_1 else vector


@pytest.mark.parametrize(
    "make",
    [
        _bert,
        lambda folder: _bert(folder, padding_side="left"),
        lambda folder: _bert(folder, pad_token=None),
        _bfloat16,
        _fnet,
        _few_positions,
        _xlnet,
    ],
    ids=["bert", "left", "no padding token", "bfloat16", "reads padding", "few positions", "no positions"],
)
def test_vector_of_a_text_is_the_models_own_alone_and_beside_others(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    folder = make(tmp_path)
    encoder = Encoder(str(folder), "dense")
    beside = encoder.queries(TEXTS)
    for text, vector in zip(TEXTS, beside, strict=True):
        if make is not _few_positions or len(text) < 20:  # longer ones are cut
            np.testing.assert_allclose(vector, _plain(folder, text), atol=1e-5)
        np.testing.assert_allclose(encoder.queries([text])[0], vector, atol=1e-5)


def test_dense_pools_and_asks_as_the_folder_says(tmp_path: Path) -> None:
    folder = _of_sentence_transformers(_bert(tmp_path), {"pooling_mode_cls_token": True})
    encoder = Encoder(str(folder), "dense")
    np.testing.assert_allclose(encoder.queries(["oslo"])[0], _plain(folder, "what: oslo", is_first=True), atol=1e-5)
    np.testing.assert_allclose(encoder.passages(["oslo"])[0], _plain(folder, "oslo", is_first=True), atol=1e-5)
    assert encoder.family != Encoder(str(make_tiny_encoder(tmp_path / "plain")), "dense").family
    assert Encoder(str(folder), "bge").family == "bge"


def test_vectors_of_a_folder_whose_similarity_is_the_dot_product_keep_their_length(tmp_path: Path) -> None:
    folder = _of_sentence_transformers(_bert(tmp_path), {"pooling_mode": "mean"})
    modules = [each for each in json.loads((folder / "modules.json").read_text()) if "Normalize" not in each["type"]]
    (folder / "modules.json").write_text(json.dumps(modules))
    for measure, has_length_1 in (("dot", False), ("cosine", True), (None, True)):
        _state(folder, {"similarity_fn_name": measure})
        plain = _plain(folder, "oslo", has_length_1=has_length_1)
        np.testing.assert_allclose(Encoder(str(folder), "dense").passages(["oslo"])[0], plain, atol=1e-5)
    assert np.linalg.norm(_plain(folder, "oslo", has_length_1=False)) > 1.5


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "tokenizer_config.json"])
def test_texts_are_cut_where_a_folder_of_sentence_transformers_says(tmp_path: Path, name: str) -> None:
    folder = _of_sentence_transformers(_bert(tmp_path), {"pooling_mode": "mean"})
    key = "max_seq_length" if name.startswith("sentence") else "model_max_length"
    known = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps(known | {key: 6}))
    text = "where is oslo a town of norway a capital of finland"
    found = Encoder(str(folder), "dense").passages([text])[0]
    np.testing.assert_allclose(found, _plain(folder, text, most=6), atol=1e-5)
    assert np.abs(found - _plain(folder, text)).max() > 0.01


def test_text_without_tokens_has_a_vector(tmp_path: Path) -> None:
    folder = _bert(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | {"post_processor": None}))
    encoder = Encoder(str(folder), "dense")
    assert np.isfinite(encoder.queries(["", "oslo"])).all()
    np.testing.assert_allclose(encoder.queries([""])[0], encoder.queries(["", "oslo is a town"])[0], atol=1e-5)


def _without(folder: Path, part: str, prefix: str = "") -> Path:
    tensors = load_file(folder / "model.safetensors")
    kept = {prefix + name: tensor for name, tensor in tensors.items() if part not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def _t5(folder: Path, kind: type[T5Model | T5EncoderModel] = T5Model) -> Path:
    return _save(folder, kind(T5Config(vocab_size=32, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2)))


def _dpr(folder: Path) -> Path:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return _save(folder, DPRQuestionEncoder(DPRConfig(vocab_size=32, **shape)))


def _with_adapter(folder: Path) -> Path:
    tensors = load_file(_bert(folder) / "model.safetensors")
    tensors["encoder.layer.0.output.adapter.weight"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("make", "family", "problem"),
    [
        (lambda folder: _without(_bert(folder), "layer.0.intermediate"), "dense", "it has no weights encoder.layer.0"),
        (lambda folder: _without(_bert(folder), "#", "encoder_model."), "dense", "it has no weights embeddings"),
        (_with_adapter, "dense", "does not use its weights encoder.layer.0.output.adapter.weight"),
        (_t5, "dense", "it has an encoder and a decoder"),
        (lambda folder: _t5(folder, T5EncoderModel), "dense", "it has an encoder and a decoder"),
        (_dpr, "dense", "of the kind dpr cannot encode a text"),
        (
            lambda folder: _of_sentence_transformers(_bert(folder), {"pooling_mode_lasttoken": True}),
            "dense",
            "it pools by pooling_mode_lasttoken, and only the mean and the first token",
        ),
        (
            lambda folder: _of_sentence_transformers(_bert(folder), {"pooling_mode": "cls"}),
            "e5",
            "it pools by cls, and --retriever-name e5 by mean. Set it to dense",
        ),
        (
            lambda folder: _of_sentence_transformers(_bert(folder), {"pooling_mode": "mean", "include_prompt": False}),
            "dense",
            "it pools without its prompts",
        ),
        (
            lambda folder: _of_sentence_transformers(_bert(folder), {"pooling_mode": "mean"}, "Dense"),
            "dense",
            "its modules.json has the module Dense",
        ),
    ],
)
def test_encoder_whose_vectors_would_be_others_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], family: str, problem: str
) -> None:
    with pytest.raises(OperatorError, match=problem):
        Encoder(str(make(tmp_path)), family)
