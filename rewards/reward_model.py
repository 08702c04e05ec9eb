"""The bundled model scorer: the output of a Hugging Face sequence-classification model with one output.

Input: the whole query with special tokens, encoded by the model's own tokenizer. Reward: the output at the last token,
normalised by `mean` and `std` of config.json if they exist. Samples of several requests share a batch, sorted by
length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from protocol.errors import OperatorError
from protocol.http.dynamic_batcher import DynamicBatcher
from rewards.sample import Sample, Score, Scorer

# Samples that are read from the queue at a time, then batched by length.
_QUEUE_BATCH = 256


@dataclass(frozen=True)
class ModelOptions:
    """Options of a reward model."""

    model: str  # folder, or name on the Hugging Face hub
    dtype: str = "float32"  # dtype of the weights: float32 or bfloat16
    batch_tokens: int = 16_384  # most tokens of one forward pass, padding included
    max_tokens: int = 8_192  # last tokens that are read; at most the model's positions
    device: str = ""  # such as cpu or cuda:1; empty: the first GPU, else cpu


class RewardModel:
    """A model that scores texts; not thread-safe."""

    def __init__(self, options: ModelOptions) -> None:
        """Raises: OperatorError if the folder is not a reward model."""
        self._options = options
        self._device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._tokenizer, self._model = _load(options)
        self._model.to(self._device).eval()
        # The head of an encoder has another name and reads the first token.
        self._is_encoder = not hasattr(self._model, "score")
        config = self._model.config
        self._mean = float(getattr(config, "mean", None) or 0.0)
        self._std = float(getattr(config, "std", None) or 1.0)
        positions = getattr(config, "max_position_embeddings", None) or options.max_tokens
        self._max_tokens = min(options.max_tokens, positions)
        pad = self._tokenizer.pad_token_id
        self._pad = pad if pad is not None else 0  # masked, so any token works

    def score(self, texts: Sequence[str]) -> list[float]:
        """Return each text's reward; blocks during the forward passes."""
        rows = [ids[-self._max_tokens :] or [self._pad] for ids in self._encode(texts)]
        rewards = [0.0] * len(rows)
        for batch in _batches([len(row) for row in rows], self._options.batch_tokens):
            for index, value in zip(batch, self._forward([rows[i] for i in batch]), strict=True):
                rewards[index] = (value - self._mean) / self._std
        return rewards

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the texts' tokens; end-of-text is appended where it is missing, as in training."""
        if self._is_encoder:
            whole: list[list[int]] = self._tokenizer(list(texts))["input_ids"]
            return whole
        # The chat template has already inserted the special tokens.
        encoded: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        end = self._tokenizer.eos_token_id
        return [ids if end is None or ids[-1:] == [end] else [*ids, end] for ids in encoded]

    @torch.inference_mode()
    def _forward(self, rows: Sequence[list[int]]) -> list[float]:
        lengths = torch.tensor([len(row) for row in rows])
        longest = int(lengths.max())
        # Padding on the right keeps the positions of the text.
        tokens = torch.tensor([row + [self._pad] * (longest - len(row)) for row in rows], device=self._device)
        mask = (torch.arange(longest)[None, :] < lengths[:, None]).long().to(self._device)
        if self._is_encoder:
            values = self._model(input_ids=tokens, attention_mask=mask).logits[:, 0]
        else:
            # The model itself selects the last token whose id is not padding. If padding and end-of-text are the same
            # token, that is the token before the end.
            hidden = self._model.base_model(input_ids=tokens, attention_mask=mask).last_hidden_state
            last = (lengths - 1).to(self._device)
            values = self._model.score(hidden[torch.arange(len(rows), device=self._device), last])[:, 0]
        numbers: list[float] = values.float().cpu().tolist()
        return numbers


def make_model_scorer(options: ModelOptions) -> Scorer:
    """Return the scorer. Raises: OperatorError if the model cannot be used."""
    model = RewardModel(options)
    batcher: DynamicBatcher[str, float] = DynamicBatcher(model.score, _QUEUE_BATCH, "reward-model")

    async def score(samples: Sequence[Sample]) -> list[Score]:
        return [Score(reward) for reward in await batcher.run([sample.query for sample in samples])]

    return score


def _load(options: ModelOptions) -> tuple[Any, Any]:
    where = f"rewards: --model {options.model}"
    if not Path(options.model).is_dir() and Path(options.model).is_absolute():
        raise OperatorError(f"{where} is not a folder. Give a folder with config.json, weights and tokenizer.")
    try:
        config = AutoConfig.from_pretrained(options.model)
        if config.num_labels != 1:
            raise OperatorError(f"{where} has {config.num_labels} outputs (num_labels), expected a reward model's 1.")
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model, found = AutoModelForSequenceClassification.from_pretrained(
            options.model, dtype=getattr(torch, options.dtype), output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise OperatorError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from None
    if found["missing_keys"]:
        # transformers fills them with random numbers, so every reward would be random.
        names = ", ".join(sorted(found["missing_keys"])[:3])
        raise OperatorError(
            f"{where} has no weights {names}: it is not a reward model. Expected a trained head `score`."
        )
    return tokenizer, model


def _batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Return the indices of texts in batches of similar length, each at most batch_tokens with padding.

    A longer text is a batch by itself. Example: lengths 5, 100, 6 and 64 tokens: [[0, 2], [1]].
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        # The newest text of a batch is its longest.
        if batches and (len(batches[-1]) + 1) * lengths[index] <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
