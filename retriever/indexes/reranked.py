"""An index whose hits are reordered by a cross-encoder, which reads query and document together."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from protocol.errors import OperatorError
from retriever.corpus import Corpus
from retriever.indexes.index import Hit, Index

_BATCH = 32
_MAX_TOKENS = 512


class RerankedIndex:
    """Searches `first` for `depth` documents and returns the topk by the cross-encoder's score."""

    def __init__(self, first: Index, corpus: Corpus, model: str, depth: int) -> None:
        """Raises: OperatorError if the model is not a cross-encoder with one output."""
        self._first = first
        self._corpus = corpus
        self._depth = depth
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        where = f"retriever: --reranker {model}"
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model)
            loaded, found = AutoModelForSequenceClassification.from_pretrained(model, output_loading_info=True)
        except (OSError, ValueError) as error:
            raise OperatorError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from None
        if loaded.config.num_labels != 1 or found["missing_keys"]:
            raise OperatorError(
                f"{where} is not a cross-encoder: expected a sequence-classification model of one output."
            )
        self._model = loaded.to(self._device).eval()

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return at most topk hits for each query; scores are the cross-encoder's, ties in corpus order."""
        found = self._first.search(queries, max(topk, self._depth))
        pairs = [(query, hit.row) for query, hits in zip(queries, found, strict=True) for hit in hits]
        scores = iter(self._scores([(query, self._corpus.contents[row]) for query, row in pairs]))
        ranked = []
        for hits in found:
            rescored = [Hit(hit.row, next(scores)) for hit in hits]
            ranked.append(sorted(rescored, key=lambda hit: (-hit.score, hit.row))[:topk])
        return ranked

    def save(self, folder: Path) -> None:
        self._first.save(folder)

    @torch.inference_mode()
    def _scores(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(pairs), _BATCH):
            queries, documents = zip(*pairs[start : start + _BATCH], strict=True)
            encoded = self._tokenizer(
                list(queries),
                list(documents),
                padding=True,
                truncation=True,
                max_length=_MAX_TOKENS,
                return_tensors="pt",
            )
            scores += self._model(**encoded.to(self._device)).logits[:, 0].float().cpu().tolist()
        return scores
