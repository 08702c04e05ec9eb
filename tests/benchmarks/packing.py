"""What packing gives: padding, and tokens per second of learner compute against a padded loop on the same trajectories.

    python -m tests.benchmarks.packing [--seed N] [--short]

128 trajectories of long-tailed lengths (log-normal, median 100 tokens, cut at 1,024; the first quarter is the prompt)
take forward, loss and backward with a Qwen2 of 7M parameters, as a learner rank does (micro-batches of 4,096 tokens),
and as a plain loop does: in the order they came, as many rows as fill 4,096 places with the longest, padded, with
transformers' own attention and all logits. Both ways in turns, medians of three passes after one. --short: 32.

holds: padding is under 5 % of what ours computes, in linear layers and in attention's rows; tokens per second are at
least 1.8 times the padded loop's.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from learner.data.packing import plan_step
from learner.models import varlen_attention
from learner.models.gradient import add_gradient
from learner.models.micro_batch import LearnerSample, make_micro_batch
from learner.models.scoring.scored_model import make_scored
from learner.objectives.supervised import weighted_nll
from tests.benchmarks.packing_table import OneProcess
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.tiny_models import tiny_config

_VOCAB = 8_192
_MEDIAN, _SPREAD, _LONGEST = 100, 1.0, 1_024
_MICRO_BATCH_TOKENS = 4_096
_PASSES = 3
_MAX_PADDING, _MIN_RATIO = 0.05, 1.8


def main() -> int:
    arguments = options(__doc__ or "")
    samples = trajectories(32 if arguments.short else 128, arguments.seed)
    num_tokens = sum(len(sample.tokens) for sample in samples)
    packed, padded = tiny_model(varlen_attention.NAME), tiny_model("sdpa")
    make_scored(packed)
    ways: dict[str, Callable[[], None]] = {
        "packed": lambda: pass_packed(packed, samples),
        "padded": lambda: pass_padded(padded, samples),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(_PASSES + 1):
        for name, take in ways.items():
            started = time.perf_counter()
            take()
            if number:
                times[name].append(time.perf_counter() - started)
    assert_same_gradient(packed, padded)
    rates = {name: num_tokens / statistics.median(found) for name, found in times.items()}
    linear, rows = padding_shares(samples)
    ratio = rates["packed"] / rates["padded"]
    return conclude(
        "packing",
        max(linear, rows) < _MAX_PADDING and ratio >= _MIN_RATIO,
        trajectories=len(samples),
        tokens=num_tokens,
        padding_in_linear_layers=round(linear, 3),
        padding_in_attention=round(rows, 3),
        padding_of_the_loop=round(1.0 - num_tokens / places_of_loop(samples), 3),
        packed_tokens_per_s=round(rates["packed"]),
        padded_tokens_per_s=round(rates["padded"]),
        ratio=round(ratio, 2),
    )


def trajectories(number: int, seed: int) -> list[LearnerSample]:
    rng = np.random.default_rng(seed)
    samples = []
    for drawn in rng.lognormal(np.log(_MEDIAN), _SPREAD, number):
        length = int(np.clip(drawn, 8, _LONGEST))
        tokens = rng.integers(0, _VOCAB, length).astype(np.int32)
        samples.append(LearnerSample(tokens, np.arange(length) >= max(1, length // 4), np.zeros(length, np.float32)))
    return samples


def pass_packed(model: Any, samples: Sequence[LearnerSample]) -> None:
    model.zero_grad()
    (plan,) = plan_step([len(sample.tokens) for sample in samples], 1, _MICRO_BATCH_TOKENS)
    parts = [make_micro_batch([samples[i] for i in part]) for part in plan]
    add_gradient(OneProcess(model), parts, weighted_nll, 1.0, temperature=1.0, with_entropy=False)


def pass_padded(model: Any, samples: Sequence[LearnerSample]) -> None:
    model.zero_grad()
    for rows in loop_rows(samples):
        longest = max(len(sample.tokens) for sample in rows)
        tokens = torch.zeros(len(rows), longest, dtype=torch.long)
        is_there, is_written = torch.zeros_like(tokens), torch.zeros(len(rows), longest)
        for row, sample in enumerate(rows):
            tokens[row, : len(sample.tokens)] = torch.from_numpy(sample.tokens)
            is_there[row, : len(sample.tokens)] = 1
            is_written[row, : len(sample.tokens)] = torch.from_numpy(sample.loss_mask)
        logits = model(input_ids=tokens, attention_mask=is_there, use_cache=False).logits[:, :-1]
        logprobs = logits.float().log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
        (-(logprobs * is_written[:, 1:]).sum()).backward()


def loop_rows(samples: Sequence[LearnerSample]) -> list[Sequence[LearnerSample]]:
    """Return the samples in their order, as many in one batch as fit when all are as long as the longest."""
    size = _MICRO_BATCH_TOKENS // _LONGEST
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def places_of_loop(samples: Sequence[LearnerSample]) -> int:
    return sum(len(rows) * max(len(sample.tokens) for sample in rows) for rows in loop_rows(samples))


def padding_shares(samples: Sequence[LearnerSample]) -> tuple[float, float]:
    """Return the shares of places without a token in linear layers, and in the rows of attention."""
    lengths = [len(sample.tokens) for sample in samples]
    (plan,) = plan_step(lengths, 1, _MICRO_BATCH_TOKENS)
    parts = [make_micro_batch([samples[i] for i in part]) for part in plan]
    in_layers = sum(part.tokens.numel() for part in parts)
    in_rows = sum(
        block.num_rows * block.longest
        for part in parts
        for block in varlen_attention.Segments(part.lengths, torch.device("cpu")).blocks
    )
    return 1.0 - sum(lengths) / in_layers, 1.0 - sum(lengths) / in_rows


def assert_same_gradient(packed: Any, padded: Any) -> None:
    """Raise unless both ways computed the same: otherwise their times say nothing."""
    pairs = zip(packed.parameters(), padded.parameters(), strict=True)
    difference = max(float((a.grad - b.grad).norm() / b.grad.norm()) for a, b in pairs)
    if difference > 1e-3:
        raise AssertionError(f"the two gradients differ by {difference:.2g}")


def tiny_model(attention: str) -> Any:
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    varlen_attention.register()
    config = tiny_config(
        vocab_size=_VOCAB,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=_LONGEST,
        attn_implementation=attention,
    )
    return Qwen2ForCausalLM(config).train()


if __name__ == "__main__":
    raise SystemExit(main())
