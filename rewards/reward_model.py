"""The bundled model scorer: the output of a Hugging Face sequence-classification model with one output.

Input: the whole query with special tokens, encoded by the model's own tokenizer. Reward: the output at the last token,
normalised by `mean` and `std` of config.json if they exist, unless it has `normalize_reward: false`. An encoder's
output is that of its first token. Models of OpenRLHF, TRL and DeepSpeed-Chat load too: their heads have other names.
Samples of several requests share a batch, sorted by length.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from protocol.errors import OperatorError
from protocol.http.bodies import CUT_TEXTS, FOREIGN_MARKS
from protocol.http.dynamic_batcher import DynamicBatcher
from protocol.value_heads import HEAD_NAMES, WRAPPERS, find_head, is_constant, is_head, is_language_head, read_scale
from rewards.sample import Sample, Score, Scorer

# Samples that are read from the queue at a time, then batched by length.
_QUEUE_BATCH = 256
# Marks of chat templates in a rendered prompt.
_MARKS = re.compile(r"<[|\uff5c][^|\uff5c<>]{1,64}[|\uff5c]>|<start_of_turn>|\[INST\]")
# Relative difference of equal rewards by dtype.
_ROUNDING = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}


@dataclass(frozen=True)
class ModelOptions:
    """Options of a reward model."""

    model: str  # folder, or name on the Hugging Face hub
    dtype: str = "float32"
    batch_tokens: int = 16_384  # most tokens of one forward pass, padding included
    max_tokens: int = 8_192  # last tokens that are read; at most the model's positions
    device: str = ""  # such as cpu or cuda:1; empty: the first GPU, else cpu


class RewardModel:
    """A model that scores texts; not thread-safe."""

    def __init__(self, options: ModelOptions) -> None:
        """Raises: OperatorError if the folder is not a reward model."""
        self._device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._tokenizer, self._model = _load(options)
        self._model.to(self._device).eval()
        # The head of an encoder has another name and reads the first token.
        self._is_encoder = not hasattr(self._model, "score")
        self._mean, self._std = read_scale(self._model.config)
        self._max_tokens = min(options.max_tokens, _num_positions(self._model) or options.max_tokens)
        pad = self._tokenizer.pad_token_id
        self._pad = pad if pad is not None else 0  # masked, so any token works
        self._vocabulary = self._tokenizer.get_vocab()
        self._batch_tokens = options.batch_tokens
        if self._is_encoder:
            self.score(["a " * 2 * self._max_tokens])  # the longest text, before the first request
            # Some encoders, such as ConvBERT and FNet, read padding too: each of their texts is a pass by itself.
            alone, beside = self.score(["a"])[0], self.score(["a", "a " * 40])[0]
            if not math.isclose(alone, beside, rel_tol=_ROUNDING[options.dtype], abs_tol=_ROUNDING[options.dtype] / 10):
                self._batch_tokens = 1

    def score(self, texts: Sequence[str]) -> list[float]:
        """Return each text's reward; blocks during the forward passes."""
        return [reward for reward, _ in self.read(texts)]

    def read(self, texts: Sequence[str]) -> list[tuple[float, bool]]:
        """Return each text's reward, and whether the text is longer than the model reads."""
        encoded = self._encode(texts)
        rows = [self._cut(ids) or [self._pad] for ids in encoded]
        rewards = [0.0] * len(rows)
        for batch in _batches([len(row) for row in rows], self._batch_tokens):
            for index, value in zip(batch, self._forward([rows[i] for i in batch]), strict=True):
                rewards[index] = (value - self._mean) / self._std
        return [(reward, len(ids) > self._max_tokens) for reward, ids in zip(rewards, encoded, strict=True)]

    def has_foreign_marks(self, prompt: str) -> bool:
        """Return whether this model reads marks of a chat template as plain text, because its own has others."""
        return any(mark not in self._vocabulary for mark in _MARKS.findall(prompt))

    def _cut(self, ids: list[int]) -> list[int]:
        """Return the last tokens; of an encoder's text also the first, because its head reads that token."""
        if self._is_encoder and len(ids) > self._max_tokens:
            return [ids[0], *ids[1 - self._max_tokens :]]
        return ids[-self._max_tokens :]

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
    batcher: DynamicBatcher[str, tuple[float, bool]] = DynamicBatcher(model.read, _QUEUE_BATCH, "reward-model")

    async def score(samples: Sequence[Sample]) -> list[Score]:
        read = await batcher.run([sample.query for sample in samples])
        scores = []
        for sample, (reward, is_cut) in zip(samples, read, strict=True):
            facts = {FOREIGN_MARKS: model.has_foreign_marks(sample.prompt), CUT_TEXTS: is_cut}
            scores.append(Score(reward, logs={name: 1.0 for name, is_so in facts.items() if is_so}))
        return scores

    return score


def _num_positions(model: Any) -> int | None:
    """Return how many tokens a model can read; None: any number. RoBERTa's first positions stand for padding."""
    positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    embeddings = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    offset = getattr(embeddings, "padding_idx", None)
    if positions is None or positions < 0:  # XLNet says -1
        return None
    return positions if offset is None else positions - offset - 1


def _load(options: ModelOptions) -> tuple[Any, Any]:
    """Return tokenizer and model. Raises: OperatorError if it is not a reward model."""
    where = f"rewards: --model {options.model}"
    if not Path(options.model).is_dir() and Path(options.model).is_absolute():
        raise OperatorError(f"{where} is not a folder. Give a folder with config.json, weights and tokenizer.")
    try:
        folder = Path(options.model) if Path(options.model).is_dir() else Path(snapshot_download(options.model))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        config = AutoConfig.from_pretrained(folder)
        head, bias = _foreign_head(folder, config.get_text_config().hidden_size)
        if head is None and config.num_labels != 1:
            raise OperatorError(f"{where} has {config.num_labels} outputs (num_labels), expected a reward model's 1.")
        model, found = AutoModelForSequenceClassification.from_pretrained(
            folder,
            num_labels=1,
            dtype=getattr(torch, options.dtype),
            # transformers' other attentions leave a soft cap out.
            attn_implementation="eager" if getattr(config, "attn_logit_softcapping", None) else None,
            key_mapping=None if head is None else _key_mapping(config, head),
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise OperatorError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from None
    if found["missing_keys"]:
        # transformers fills them with random numbers, so every reward would be random.
        names = ", ".join(sorted(found["missing_keys"])[:3])
        raise OperatorError(
            f"{where} has no weights {names}: it is not a reward model. Expected a head named {', '.join(HEAD_NAMES)}."
        )
    shapes = _shapes(folder) if found["unexpected_keys"] else {}
    known = (name for name in found["unexpected_keys"] if is_constant(name, shapes.get(name)) or is_language_head(name))
    if unused := sorted(found["unexpected_keys"] - {"score.bias", *known}):
        raise OperatorError(
            f"{where} has weights that the model of its config.json does not use, such as {unused[0]}. Merge adapters "
            "into the model, keep one head, or correct config.json."
        )
    if bias is not None:
        model.score.bias = torch.nn.Parameter(bias.to(model.score.weight.dtype))
    return tokenizer, model


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shapes of the tensors in safetensors files."""
    shapes: dict[str, list[int]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    return shapes


def _foreign_head(folder: Path, hidden_size: int) -> tuple[str | None, torch.Tensor | None]:
    """Return name and bias of a head that transformers does not know; its own or no head has no name.

    Raises: ValueError for a head that is not one linear layer of one number.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    heads: dict[str, torch.Tensor] = {}
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                heads |= {name: opened.get_tensor(name) for name in opened.keys() if is_head(name)}  # noqa: SIM118
        else:
            tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            heads |= {name: tensor for name, tensor in tensors.items() if is_head(name)}
    if not heads or any(name.startswith(("score.", "classifier.")) for name in heads):
        return None, heads.get("score.bias")  # transformers' class reads no bias
    head = find_head({name: tensor.shape for name, tensor in heads.items()}, hidden_size)
    return head, heads.get(f"{head}.bias")


def _key_mapping(config: Any, head: str) -> dict[str, str]:
    """Return transformers' names for the tensors of another trainer, as regular expressions."""
    with torch.device("meta"):
        prefix = AutoModelForSequenceClassification.from_config(config).base_model_prefix
    deepspeed_chat, trl = WRAPPERS
    return {rf"^{re.escape(head)}\.": "score.", rf"^{deepspeed_chat}": f"{prefix}.", rf"^{trl}": ""}


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
