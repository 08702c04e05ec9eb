"""What the log-probabilities of a long trajectory over a large vocabulary cost of memory and time.

    python -m tests.benchmarks.logprob_memory [--seed N] [--short]

A tiny Qwen2 (hidden size 128, two layers, tied head) with a vocabulary of 152,064 takes forward, loss and backward of
one trajectory in a process of its own, as a learner rank does (gradient checkpointing on), and the plain way: all
logits in float32 and log_softmax. Memory: the process's largest resident size over what it had with the model loaded;
gradients are in it. Time: the median of three passes after one, both ways on as many tokens, in turns.

holds: 32,768 tokens take at most 2 GB; where the plain way fits (2,048 tokens), ours takes at most 1.3 times its time.
--short: 8,192 tokens and a vocabulary of 32,000.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.models import varlen_attention
from learner.models.gradient import add_gradient
from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from learner.models.scoring.scored_model import make_scored, scored_model
from learner.objectives.supervised import weighted_nll
from tests.benchmarks.packing_table import OneProcess
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.tiny_models import tiny_config

_LONG, _FITTING = 32_768, 2_048
_SHORT_LONG, _SHORT_VOCAB = 8_192, 32_000
_VOCAB = 152_064
_MAX_GB, _MAX_RATIO = 2.0, 1.3
_PASSES = 3


def main() -> int:
    arguments = options(__doc__ or "")
    long, vocab = (_SHORT_LONG, _SHORT_VOCAB) if arguments.short else (_LONG, _VOCAB)
    ours = measure("memory", long, vocab)
    plain = measure("plain_memory", _FITTING, vocab)
    times = measure("times", _FITTING, vocab)
    ratio = times["ours_s"] / times["plain_s"]
    return conclude(
        "logprob_memory",
        ours["gb"] <= _MAX_GB and ratio <= _MAX_RATIO,
        tokens=long,
        vocabulary=vocab,
        gb=round(ours["gb"], 2),
        pass_s=round(ours["s"], 1),
        plain_gb_of_fitting=round(plain["gb"], 2),
        fitting_tokens=_FITTING,
        ours_s=round(times["ours_s"], 2),
        plain_s=round(times["plain_s"], 2),
        time_ratio=round(ratio, 2),
    )


def measure(what: str, num_tokens: int, vocab: int) -> dict[str, float]:
    """Return what a fresh process found."""
    command = [sys.executable, "-m", "tests.benchmarks.logprob_memory", "child", what, str(num_tokens), str(vocab)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def child(what: str, num_tokens: int, vocab: int) -> dict[str, float]:
    model = tiny_model(vocab)
    batch = trajectory(num_tokens, vocab)
    if what != "times":
        step = ours if what == "memory" else plainly
        Path("/proc/self/clear_refs").write_text("5")  # the highest so far, of the imports and the model, is forgotten
        before, started = _status("VmRSS"), time.perf_counter()
        step(model, batch)
        return {"gb": (_status("VmHWM") - before) * 1024 / 1e9, "s": time.perf_counter() - started}
    times: dict[str, list[float]] = {"ours_s": [], "plain_s": []}
    for number in range(_PASSES + 1):
        for name, step in (("ours_s", ours), ("plain_s", plainly)):
            started = time.perf_counter()
            step(model, batch)
            if number:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(found) for name, found in times.items()}


def ours(model: Any, batch: MicroBatch) -> None:
    model.zero_grad()
    add_gradient(OneProcess(model), [batch], weighted_nll, 1.0, temperature=1.0, with_entropy=True)


def plainly(model: Any, batch: MicroBatch) -> None:
    """Forward and backward with all logits, log_softmax and the entropy that a step reports."""
    model.zero_grad()
    logits: Tensor = model(
        input_ids=batch.tokens,
        position_ids=batch.position_ids,
        segments=varlen_attention.Segments(batch.lengths, batch.tokens.device),
        logits_to_keep=batch.predict_at,
        use_cache=False,
    ).logits[0]
    of_all = logits.float().log_softmax(-1)
    with torch.no_grad():
        -(of_all.exp() * of_all).sum(-1).sum()
    (-(batch.weights * of_all.gather(1, batch.targets[:, None])[:, 0]).sum()).backward()


def tiny_model(vocab: int) -> Any:
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    varlen_attention.register()
    config = tiny_config(
        vocab_size=vocab,
        max_position_embeddings=_LONG,
        tie_word_embeddings=True,
        attn_implementation=varlen_attention.NAME,
    )
    model = Qwen2ForCausalLM(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    make_scored(model)
    assert scored_model(model).method == "head"
    return model


def trajectory(num_tokens: int, vocab: int) -> MicroBatch:
    tokens = np.random.default_rng(0).integers(0, vocab, num_tokens).astype(np.int32)
    return make_micro_batch([LearnerSample(tokens, np.arange(num_tokens) > 0, np.zeros(num_tokens, np.float32))])


def _status(key: str) -> int:
    """Return a figure of this process, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
        raise SystemExit(0)
    raise SystemExit(main())
