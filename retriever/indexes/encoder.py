"""Encodes texts as vectors with any Hugging Face encoder.

Vectors have length 1, so their product is the cosine.
Shape letters: N texts, T tokens of the longest, D dimensions.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

from protocol.disk.files import model_files_digest
from protocol.errors import OperatorError

# Texts of one pass. On a CPU larger batches are no faster, and each batch is as slow as its longest text.
_CPU_BATCH, _GPU_BATCH = 16, 64
_MAX_TOKENS = 256  # of a query or passage; the rest is cut off


@dataclass(frozen=True)
class Family:
    """Input format of a family of encoders."""

    query_prefix: str  # text before a query
    passage_prefix: str  # text before a document
    pooling: str  # mean: average of all tokens; first: vector of the first token


FAMILIES = {
    "e5": Family("query: ", "passage: ", "mean"),
    "bge": Family("Represent this sentence for searching relevant passages: ", "", "first"),
    "dense": Family("", "", "mean"),
}


class Encoder:
    """An encoder; threads may share it."""

    def __init__(self, model: str, family: str) -> None:
        """Raises: OperatorError when the model cannot be loaded."""
        self.name = model
        self.family = family
        self._form = FAMILIES[family]
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._batch = _GPU_BATCH if self._device == "cuda" else _CPU_BATCH
        self._tokenizing = threading.Lock()  # a tokenizer is not thread-safe: it raises in a second thread
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model)
            self._model = AutoModel.from_pretrained(model).to(self._device).eval()
        except (OSError, ValueError) as error:
            raise OperatorError(
                f"retriever: --retriever-model {model} cannot be loaded: {type(error).__name__}: {error}"
            ) from None
        self.dimension = int(self._model.config.hidden_size)

    def identity(self) -> str:
        """Return the digest of a folder's files, equal for copies; of a hub model its name."""
        folder = Path(self.name)
        return model_files_digest(folder) if folder.is_dir() else self.name

    def queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return [N, D]."""
        return self._encode([self._form.query_prefix + text for text in texts])

    def passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return [N, D]."""
        return self._encode([self._form.passage_prefix + text for text in texts])

    def _encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = np.empty((len(texts), self.dimension), np.float32)
        with self._tokenizing:
            tokens = self._tokenizer(list(texts), truncation=True, max_length=_MAX_TOKENS)
        # Sort by length: a pass is as slow as its longest text.
        order = sorted(range(len(texts)), key=lambda index: len(tokens["input_ids"][index]))
        for start in range(0, len(order), self._batch):
            batch = order[start : start + self._batch]
            vectors[batch] = self._forward({name: [tokens[name][index] for index in batch] for name in tokens})
        return vectors

    @torch.inference_mode()
    def _forward(self, tokens: dict[str, list[list[int]]]) -> NDArray[np.float32]:
        encoded = self._tokenizer.pad(tokens, return_tensors="pt").to(self._device)
        hidden = self._model(**encoded).last_hidden_state  # [N, T, D]
        if self._form.pooling == "first":
            pooled = hidden[:, 0]
        else:
            mask = encoded["attention_mask"][:, :, None].to(hidden.dtype)  # [N, T, 1]
            pooled = (hidden * mask).sum(1) / mask.sum(1)
        vectors: NDArray[np.float32] = torch.nn.functional.normalize(pooled.float(), dim=-1).cpu().numpy()
        return vectors
