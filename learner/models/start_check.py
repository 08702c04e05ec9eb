"""The check of every start: a rank computes what the model's own code computes, for any layout of a micro-batch.

Each role is compared with its own eager code: in float32, on one text as long as the run's beside two
short ones, with the model's own widths and its first layers (`own_code`). So no list of models is needed.

Why the first layers and random weights: 70 billion weights in float32 and all scores of a long text fit on no device.
The code and the configuration decide what a rank computes. Each push compares the trained weights.
"""

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import nan
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from learner.disk.model_folder import read_max_positions
from learner.models import own_code, varlen_attention
from learner.models.critic import ValueModel
from learner.models.gradient import score_tokens
from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from learner.models.model_loading import fix_positions, prepare_for_training, turn_off_dropout
from learner.models.own_code import make_own, shallow_config, share_weights
from learner.models.scoring.scored_model import Method, make_scored, scored_model
from learner.models.settings import PolicySettings
from learner.models.world import own_device, share_object
from protocol.errors import OperatorError
from protocol.settings.learner import MIN_SHARED_TOKENS

Kind = Literal["language model", "critic"]
_log = logging.getLogger(__name__)

_LIMIT = 1e-3  # nats, or a critic's value. Rounding in float32 stays 100 times below, a leak is 100 times above.
_NUM_SCORED = 512  # last tokens of each text that are compared: they depend on every window and chunk
_SHORT = (24, 16)  # tokens of short texts
_ALONE = "Set learner.micro_batch_tokens to 1: every trajectory is then computed by itself."
_NO_PAIRS = "Use another model: both answers of a pair are in one micro-batch (docs/look_up/models.md)."
_UNSHARED = "Set learner.share_prompts to false: every trajectory then computes its own prompt."
_OTHER_MODEL = (
    "Use another model, or a rollout.max_context_tokens below its window or chunk; of rows, shorter ones "
    "(docs/look_up/models.md)."
)


@dataclass(frozen=True)
class Comparison:
    """Largest differences from the model's own code, in nats; NaN: it cannot be computed."""

    causal: float  # the own code: a text, and the same text with more tokens after it
    alone: float  # a text by itself
    packed: float  # several texts in one micro-batch
    shared: float  # two of them with one prompt, computed once
    method: Method  # method of logprobs that gives the smallest difference
    error: str = ""  # first error of the rank's way to compute, or of the own code

    def find_fault(self, *, is_packed: bool, is_shared: bool) -> tuple[str, str] | None:
        """Return (fault, remedy), or None. is_packed: trajectories share a micro-batch; is_shared: prompts, too."""
        if self.causal > _LIMIT:
            return f"lets a token see later ones (by {self.causal:.2g})", _OTHER_MODEL
        if not self.alone <= _LIMIT:
            why = self.error or f"computes other numbers than its own code (by {self.alone:.2g})"
            return why, _OTHER_MODEL
        if is_packed and not self.packed <= _LIMIT:
            return f"mixes trajectories of one micro-batch (by {self.packed:.2g})", _ALONE
        if is_packed and is_shared and not self.shared <= _LIMIT:
            return f"computes other numbers after a prompt that trajectories share (by {self.shared:.2g})", _UNSHARED
        return None


def check_model(settings: PolicySettings, kind: Kind, *, name: str) -> Method:
    """Return the method of a role's logprobs, after the comparison on rank 0. Collective.

    name: the operator's name of the model. Raises: OperatorError on every rank, with the setting to change.
    """
    result: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        result = _check(settings, kind, name)
    if dist.is_initialized():
        result = share_object(result)
    problem, method = result
    if problem is not None:
        raise OperatorError(problem)
    chosen: Method = method
    return chosen


def _check(settings: PolicySettings, kind: Kind, name: str) -> list[str | None]:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings.model_dir, trust_remote_code=settings.trust_remote_code)
    fix_positions(config, settings.longest_text)
    longest = settings.max_tokens
    if settings.role == "policy":  # no trajectory is longer than its positions
        longest = min(longest, read_max_positions(settings.model_dir) or longest)
    found = compare(config, kind, longest, trust_remote_code=settings.trust_remote_code)
    is_packed = settings.micro_batch_tokens > 1 or settings.are_pairs
    fault = found.find_fault(is_packed=is_packed, is_shared=settings.share_prompts)
    if fault is not None:
        cure = _NO_PAIRS if fault[1] == _ALONE and settings.are_pairs else fault[1]
        return [f"The model {name} cannot be used as the {settings.role} like this: it {fault[0]}. {cure}", None]
    if kind == "language model" and found.method == "logits":
        _log.warning('logprobs by logits  model=%s consequence="more memory per micro-batch"', name)
    return [None, found.method]


@torch.no_grad()
def compare(config: Any, kind: Kind, num_tokens: int, **options: Any) -> Comparison:
    """Return how a rank's numbers differ from those of the model's own code. num_tokens: length of the longest text.

    options: of `from_config`.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    own_code.register()
    varlen_attention.register()
    auto_class = AutoModel if kind == "critic" else AutoModelForCausalLM
    texts = _texts(config, num_tokens)
    device = own_device()
    try:
        shallow = shallow_config(auto_class, config, **options)
        own = make_own(auto_class, shallow, device, attn_implementation=own_code.NAME, **options)
        score = torch.randn(1, own.get_input_embeddings().embedding_dim, device=device) if kind == "critic" else None
        expected = [_own_numbers(own, text, score) for text in texts]
    except Exception as error:
        return _failed(f"cannot be computed by its own code ({_words(error)})")
    causal = _difference(expected[-2][: len(expected[-1])], expected[-1])
    try:
        ranks = _RanksModel(auto_class, shallow, own, score, device, options)
    except Exception as error:
        return _failed(f"cannot take packed texts ({_words(error)})")
    best = Comparison(causal, nan, nan, nan, "head")
    for method in ranks.methods:
        ranks.use(method)
        if not best.alone <= _LIMIT:
            best = _compare(ranks.compute, texts, expected, causal, method)
    return best


class _RanksModel:
    """The shallow model as a rank computes it, with the weights of `own`."""

    device: Any

    def __init__(
        self, auto_class: Any, config: Any, own: Any, score: Tensor | None, device: torch.device, options: Any
    ) -> None:
        config = copy.deepcopy(config)
        turn_off_dropout(config)
        with device:
            body = auto_class.from_config(
                config, dtype=torch.float32, attn_implementation=varlen_attention.NAME, **options
            )
        share_weights(own, body)
        prepare_for_training(body, gradient_checkpointing=False)
        self.device = device
        self.methods: tuple[Method, ...] = ("head",)
        if score is not None:
            self._model: Any = ValueModel(body).to(device)
            self._model.score.weight.copy_(score)
        else:
            make_scored(body)
            self._model = body
            scored = scored_model(body)
            self.methods = ("head", "logits") if scored.method == "head" else ("logits",)

    def use(self, method: Method) -> None:
        if not isinstance(self._model, ValueModel):
            scored_model(self._model).method = method

    def compute(self, *texts: LearnerSample, share_prompts: bool = False) -> Tensor:
        """Return the numbers of all texts, one text after the other, from one micro-batch."""
        numbered = [replace(text, number=number) for number, text in enumerate(texts)]
        micro_batch = make_micro_batch(numbered, share_prompts=share_prompts).to(self.device)
        if isinstance(self._model, ValueModel):
            found: Tensor = self._model(micro_batch)
        else:
            found = score_tokens(self, micro_batch, 1.0, with_entropy=False)[0]
        parts = dict(zip(micro_batch.numbers, torch.split(found, list(micro_batch.counts)), strict=True))
        return torch.cat([parts[number] for number in range(len(texts))])

    def __call__(self, **inputs: Any) -> Any:
        return self._model(**inputs)

    def backward(self, loss: Tensor) -> None:
        raise RuntimeError("the check trains nothing")


def _compare(
    compute: Callable[..., Tensor], texts: list[LearnerSample], expected: list[Tensor], causal: float, method: Method
) -> Comparison:
    try:
        alone = packed = shared = _difference(compute(*texts, share_prompts=True), torch.cat(expected))
        if not shared <= _LIMIT:
            alone = packed = _difference(compute(*texts), torch.cat(expected))
        if not packed <= _LIMIT:
            alone = max(_difference(compute(text), wanted) for text, wanted in zip(texts, expected, strict=True))
    except Exception as error:
        return Comparison(causal, nan, nan, nan, method, f"cannot take packed texts ({_words(error)})")
    return Comparison(causal, alone, packed, shared, method)


def _own_numbers(own: Any, text: LearnerSample, score: Tensor | None) -> Tensor:
    """Return the logprobs of the written tokens, or the values before them, by the model's own code."""
    micro_batch: MicroBatch = make_micro_batch([text]).to(own_device())
    num = micro_batch.num_model_tokens
    if score is not None:
        hidden = own(input_ids=micro_batch.tokens, use_cache=False).last_hidden_state[0, micro_batch.predict_at]
        return torch.nn.functional.linear(hidden, score)[:, 0]
    output = own(input_ids=micro_batch.tokens, use_cache=False, logits_to_keep=num + 1)
    logits = output.logits[0, -(num + 1) : -1].float()
    logprobs: Tensor = logits.log_softmax(-1).gather(1, micro_batch.targets[:, None])[:, 0]
    return logprobs


def _texts(config: Any, num_tokens: int) -> list[LearnerSample]:
    """Return random texts: a long one, its prompt with a shorter end, a short one, and its beginning. Longest first."""
    rng = np.random.default_rng(0)
    named = vars(config) | vars(config.get_text_config())
    special = [value for name, value in named.items() if name.endswith(("token_id", "token_index"))]
    ordinary = np.array([i for i in range(config.get_text_config().vocab_size) if i not in special], np.int32)
    long, end, short = (rng.choice(ordinary, number) for number in (max(num_tokens, _SHORT[0]), *_SHORT[:1] * 2))
    is_shared = len(long) > MIN_SHARED_TOKENS + 1  # also an answer that is shorter than the other's end
    prompt = max(1, len(long) - _NUM_SCORED, MIN_SHARED_TOKENS * is_shared)
    other = np.concatenate([long[:prompt], end])[: len(long) - 1]
    texts = ((long, prompt), (other, prompt), (short, 1), (short[: _SHORT[1]], 1))
    return [
        LearnerSample(text, np.arange(len(text)) >= first, np.zeros(len(text), np.float32)) for text, first in texts
    ]


def _failed(why: str) -> Comparison:
    return Comparison(0.0, nan, nan, nan, "head", why)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())
