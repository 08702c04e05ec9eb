"""Encodes texts as vectors with any Hugging Face encoder, in float32.

Vectors have length 1, so their product is the cosine. A folder of sentence-transformers says its own pooling, and
whether the product of its vectors as they are counts.
Shape letters: N texts, T tokens of the longest, D dimensions.
"""

import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer
from transformers.utils import cached_file

from protocol.errors import OperatorError

# Texts of one pass. On a CPU larger batches are no faster, and each batch is as slow as its longest text.
_CPU_BATCH, _GPU_BATCH = 16, 64
_MAX_TOKENS = 256  # of a query or passage; the rest is cut off
_MOST_TOKENS = 512  # largest value that a folder of sentence-transformers can set
_PADDING_CHANGES = 1e-3  # difference of a vector's numbers beyond rounding
_ANY_NUMBER = 1 << 30
_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first", "mean": "mean", "cls": "first"}
_OF_A_LAYER = re.compile(r"\.(layer|layers|h|block|blocks)\.\d+\.(?!.*\b(attn|attention)\.(masked_)?bias$|.*inv_freq$)")


@dataclass(frozen=True)
class Family:
    """Input format of a family of encoders."""

    query_prefix: str  # text before a query
    passage_prefix: str  # text before a document
    pooling: str  # mean: average of all tokens; first: vector of the first token
    max_tokens: int = _MAX_TOKENS
    has_length_1: bool = True  # vectors are scaled to length 1


FAMILIES = {
    "e5": Family("query: ", "passage: ", "mean"),
    "bge": Family("Represent this sentence for searching relevant passages: ", "", "first"),
    "dense": Family("", "", "mean"),  # a folder of sentence-transformers: as it says
}


class Encoder:
    """An encoder; threads may share it."""

    def __init__(self, model: str, family: str) -> None:
        """Raises: OperatorError when the model cannot be loaded."""
        self.name = model
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._batch = _GPU_BATCH if self._device == "cuda" else _CPU_BATCH
        self._tokenizing = threading.Lock()  # a tokenizer is not thread-safe: it raises in a second thread
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model)
            loaded, found = AutoModel.from_pretrained(model, dtype=torch.float32, output_loading_info=True)
            self._form = _form_of(model, family)
            _check_whole(loaded, found)
        except (OSError, ValueError) as error:
            raise OperatorError(
                f"retriever: --retriever-model {model} cannot be loaded: {type(error).__name__}: {error}"
            ) from None
        self.family = family if self._form == FAMILIES[family] else f"{family} {self._form}"
        self._model = loaded.to(self._device).eval()
        self.dimension = int(self._model.config.hidden_size)
        self._max_tokens = min(self._form.max_tokens, _num_positions(self._model))
        # Some encoders, such as FNet's and ConvBERT's, read padding too: each of their texts is a pass by itself.
        try:
            alone, beside = (self._encode(["a", *others])[0] for others in ((), ("a " * 40,)))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:  # DPR's, CANINE's
            raise OperatorError(
                f"retriever: --retriever-model {model} of the kind {loaded.config.model_type} cannot encode a text "
                f"here: {type(error).__name__}: {error}. Give another encoder."
            ) from None
        if np.abs(alone - beside).max() > _PADDING_CHANGES:
            self._batch = 1

    def queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return [N, D]."""
        return self._encode([self._form.query_prefix + text for text in texts])

    def unscaled_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return [N, D], of the length that the model gives them."""
        return self._pool([self._form.query_prefix + text for text in texts])

    def passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return [N, D]."""
        return self._encode([self._form.passage_prefix + text for text in texts])

    def _encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = self._pool(texts)
        return torch.nn.functional.normalize(torch.from_numpy(vectors)).numpy() if self._form.has_length_1 else vectors

    def _pool(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = np.empty((len(texts), self.dimension), np.float32)
        with self._tokenizing:
            tokens = self._tokenizer(list(texts), truncation=True, max_length=self._max_tokens)
        # Sort by length: a pass is as slow as its longest text.
        order = sorted(range(len(texts)), key=lambda index: len(tokens["input_ids"][index]))
        for start in range(0, len(order), self._batch):
            batch = order[start : start + self._batch]
            vectors[batch] = self._forward({name: [tokens[name][index] for index in batch] for name in tokens})
        return vectors

    @torch.inference_mode()
    def _forward(self, tokens: dict[str, list[list[int]]]) -> NDArray[np.float32]:
        longest = max(1, max(map(len, tokens["input_ids"])))
        # Padding on the right, whatever the tokenizer's side: the positions and the first token stay.
        fills = {"input_ids": self._tokenizer.pad_token_id or 0}
        encoded = {
            name: torch.tensor([row + [fills.get(name, 0)] * (longest - len(row)) for row in rows], device=self._device)
            for name, rows in tokens.items()
        }
        encoded["attention_mask"][:, 0] = 1  # a text without tokens is one of padding
        hidden = self._model(**encoded).last_hidden_state  # [N, T, D]
        if self._form.pooling == "first":
            pooled = hidden[:, 0]
        else:
            mask = encoded["attention_mask"][:, :, None].to(hidden.dtype)  # [N, T, 1]
            pooled = (hidden * mask).sum(1) / mask.sum(1)
        vectors: NDArray[np.float32] = pooled.cpu().numpy()
        return vectors


def _form_of(model: str, family: str) -> Family:
    """Return the input format: dense is as the folder of sentence-transformers says, if it is one.

    Raises: ValueError where the folder says another pooling than the family, or a step that is not done here.
    """
    form = FAMILIES[family]
    modules = {str(each["type"]).rpartition(".")[2]: each["path"] for each in _read(model, "modules.json") or []}
    if others := sorted(modules.keys() - {"Transformer", "Pooling", "Normalize"}):
        raise ValueError(f"its modules.json has the module {others[0]}, and only Transformer and Pooling are done here")
    if "Pooling" not in modules:
        return form
    given = _read(model, f"{modules['Pooling']}/config.json") or {}
    named = [name for name, is_on in given.items() if name.startswith("pooling_mode_") and is_on is True]
    said = str(given.get("pooling_mode") or "+".join(named))
    pooling = _POOLINGS.get(said)
    if pooling is None:
        raise ValueError(f"it pools by {said}, and only the mean and the first token (cls) are known here")
    if family == "dense":
        is_whole = given.get("include_prompt", True)
        return _stated_form(model, pooling, has_length_1="Normalize" in modules, is_whole=is_whole)
    if pooling != form.pooling:
        raise ValueError(f"it pools by {said}, and --retriever-name {family} by {form.pooling}. Set it to dense")
    return form


def _stated_form(model: str, pooling: str, *, has_length_1: bool, is_whole: bool) -> Family:
    """Return the input format that a folder of sentence-transformers states. is_whole: the prompts are pooled too."""
    stated = _read(model, "config_sentence_transformers.json") or {}
    prompts = stated.get("prompts") or {}
    query, passage = prompts.get("query") or "", prompts.get("document") or prompts.get("passage") or ""
    if not is_whole and (query or passage):
        raise ValueError("it pools without its prompts (include_prompt), and only whole texts are pooled here")
    measure = stated.get("similarity_fn_name") or "cosine"
    if not has_length_1 and measure not in ("cosine", "dot"):
        raise ValueError(f"its similarity_fn_name is {measure}, and only cosine and dot are known here")
    most = (_read(model, "sentence_bert_config.json") or {}).get("max_seq_length")
    if most is None:  # as of version 6 it is the tokenizer's
        most = (_read(model, "tokenizer_config.json") or {}).get("model_max_length", _MAX_TOKENS)
    return Family(query, passage, pooling, min(int(most), _MOST_TOKENS), has_length_1 or measure == "cosine")


def _read(model: str, name: str) -> Any:
    """Return a JSON file of the model; None without it."""
    path = cached_file(
        model,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if path is None else json.loads(Path(path).read_bytes())


def _check_whole(model: Any, found: Any) -> None:
    """Raise ValueError for weights that are missing, which transformers fills at random, or that are not used."""
    if model.config.is_encoder_decoder or any(name.startswith("decoder.") for name in found["missing_keys"]):
        raise ValueError("it has an encoder and a decoder, and an encoder alone was expected")
    if missing := sorted(name for name in found["missing_keys"] if not name.startswith("pooler.")):
        raise ValueError(f"it has no weights {missing[0]}, so its vectors would be random")
    if unused := sorted(name for name in found["unexpected_keys"] if _OF_A_LAYER.search(name)):
        raise ValueError(f"the model of its config.json does not use its weights {unused[0]}")


def _num_positions(model: Any) -> int:
    """Return how many tokens an encoder can read. RoBERTa's first positions stand for padding."""
    embeddings = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    positions = max(0, getattr(model.config, "max_position_embeddings", None) or 0) or _ANY_NUMBER  # XLNet: -1
    offset = getattr(embeddings, "padding_idx", None)
    return int(positions if offset is None else positions - offset - 1)
