"""20 pushes into an engine with 64 requests in flight: none is aborted, and each token is of the weights it claims.

    python -m tests.benchmarks.push_in_flight [--pushes 20] [--requests 64] [--tokens 150] [--size 3] [--seed N]

A real vLLM engine in a process of its own, and a model of 0.5M or 3M parameters that moves by a random step before
each push, by the real pusher over gloo. Three kinds of windows take turns, two of each: in one nothing else happens, in
one the bytes of a push go to the server's process once a second for nothing (the plain transfer), in one there is a
push a second.

holds: every request ends with all its tokens (aborted=0); every token's logprob is the one that the weights of its
version give after what stands before it, with a cache that the versions of earlier tokens have written, to 1e-4 nats
(wrong_tokens=0), and differs under the version before by more than that for nine tokens in ten (told_apart); there are
as many versions among the tokens as there were pushes; and while pushes go on the engine writes at least 95 % of what
it writes while plain transfers do (apart_from_transfer). throughput: of what it writes while nothing else happens.
--short: five pushes, 16 requests, and no throughput is asked for.
"""

import copy
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen2ForCausalLM

from learner.weights.push import WeightPusher
from protocol.weights.group import open_store
from protocol.weights.wire import bucket_num_bytes
from tests.benchmarks.push_load import Answered, read_answers
from tests.benchmarks.push_plain import pass_on
from tests.benchmarks.push_server import MeasuredLine, served
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.planned_weights import planned
from tests.fakes.tiny_models import make_tiny_model

_FORMS = {
    1: {"hidden_size": 128, "num_layers": 2, "vocab_size": 272},
    3: {"hidden_size": 256, "num_layers": 3, "vocab_size": 2048},
}
_BUCKET_BYTES = 4 << 20
_HOST = "127.0.0.1"
_DEADLINE_S = 60.0
_TOLERANCE = 1e-4
_STEP = 0.01  # deviation of what a step adds to each weight, whose own deviation is 0.1
_EVERY_S = 1.0
Kind = Literal["alone", "plain", "pushes"]
_KINDS: tuple[Kind, ...] = ("alone", "plain", "pushes")
_NUM_ROUNDS = 2  # of windows of all kinds
_MIN_THROUGHPUT = 0.95
_MIN_TOLD_APART = 0.9


@dataclass(frozen=True)
class Window:
    """A stretch of time in which requests were in flight."""

    begin: float  # time.monotonic
    end: float
    kind: Kind


@dataclass(frozen=True)
class Judged:
    """What the tokens say, against the learner's weights of each version."""

    num_tokens: int
    num_wrong: int  # tokens with another logprob than the weights of their version give
    largest: float  # difference among those that are right, nats
    told_apart: float  # share of tokens that the version before would have given another logprob
    versions: frozenset[int]  # that tokens claim


class Learner:
    """A model that moves at random, and what it was at each version."""

    def __init__(self, folder: Path, lines: Sequence[MeasuredLine]) -> None:
        self.models: dict[int, Qwen2ForCausalLM] = {}
        self.pauses_s: list[float] = []
        self.pushes_s: list[float] = []
        self._model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._pusher = WeightPusher(lines, _HOST, "gloo", _DEADLINE_S)
        self.plain_s: list[float] = []
        self._lines = lines
        self._store, self._port = open_store(_HOST, _DEADLINE_S)  # for the plain transfers

    def push(self) -> None:
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.add_(_STEP * torch.randn_like(parameter))
        version = len(self.models) + 1
        self.models[version] = copy.deepcopy(self._model)
        report = self._pusher.push(version, *planned(self._model.named_parameters(), _BUCKET_BYTES))
        if report.failed:
            raise RuntimeError(f"push {version}: {report.failed}")
        self.pauses_s.append(report.pause_s)
        self.pushes_s.append(report.push_s)

    def pass_on(self) -> None:
        """Send the bytes of a push for nothing."""
        plan, _ = planned(self._model.named_parameters(), _BUCKET_BYTES)
        sizes = [bucket_num_bytes(bucket) for bucket in plan]
        self.plain_s.append(self._pusher._run(pass_on([self._lines], _HOST, self._port, sizes, _DEADLINE_S)))

    def close(self) -> None:
        self._pusher.close()

    def call(self, on_line: Coroutine[Any, Any, None]) -> None:
        """Make a call on a line in the pusher's loop, whose connections its lines have."""
        self._pusher._run(on_line)


def main() -> int:
    asked = options(__doc__ or "", pushes=20, requests=64, tokens=150, size=3)
    num_pushes, num_requests = (5, 16) if asked.short else (asked.pushes, asked.requests)
    torch.manual_seed(asked.seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        model, answers = make_tiny_model(Path(name) / "model", tied=True, **_FORMS[asked.size]), Path(name) / "answers"
        with served(model, 1, "second_copy") as servers:
            line = MeasuredLine(servers[0][0], _HOST, servers[0][1])
            learner = Learner(model, [line])
            learner.push()
            learner.call(line.begin_requests(num_requests, asked.tokens))
            windows = _windows(learner, num_pushes)
            learner.call(line.end_requests(str(answers)))
            learner.close()
        answered = read_answers(answers)
    judged = judge(answered, learner.models)
    aborted = sum(not answer.tokens or answer.finish not in ("length", "stop") for answer in answered)
    rates = {kind: _rate(answered, windows, kind) for kind in _KINDS}
    apart_from_transfer = rates["pushes"] / rates["plain"]
    holds = aborted == 0 and judged.num_wrong == 0 and judged.told_apart >= _MIN_TOLD_APART
    holds = holds and judged.versions >= set(range(1, num_pushes + 2))
    pauses_ms = sorted(1e3 * pause_s for pause_s in learner.pauses_s[1:])
    return conclude(
        "push_in_flight",
        holds and (asked.short or apart_from_transfer >= _MIN_THROUGHPUT),
        pushes=num_pushes,
        requests=len(answered),
        aborted=aborted,
        tokens=judged.num_tokens,
        wrong_tokens=judged.num_wrong,
        largest_difference=judged.largest,
        told_apart=judged.told_apart,
        tokens_per_s=rates["alone"],
        throughput=rates["pushes"] / rates["alone"],
        apart_from_transfer=apart_from_transfer,
        median_pause_ms=pauses_ms[len(pauses_ms) // 2],
        longest_pause_ms=pauses_ms[-1],
        median_push_ms=1e3 * median(learner.pushes_s[1:]),
        median_plain_ms=1e3 * median(learner.plain_s),
    )


def _windows(learner: Learner, num_pushes: int) -> list[Window]:
    """Let time pass in windows of each kind in turn; returns when what was."""
    time.sleep(3 * _EVERY_S)  # until requests end as evenly as they will later
    windows = []
    for round_number in range(_NUM_ROUNDS):
        in_window = num_pushes * (round_number + 1) // _NUM_ROUNDS - num_pushes * round_number // _NUM_ROUNDS
        for kind in _KINDS:
            begin = time.monotonic()
            for each in range(in_window):
                if kind == "pushes":
                    learner.push()
                elif kind == "plain":
                    learner.pass_on()
                time.sleep(max(0.0, begin + (each + 1) * _EVERY_S - time.monotonic()))
            windows.append(Window(begin, time.monotonic(), kind))
    return windows


def _rate(answered: Sequence[Answered], windows: Sequence[Window], kind: Kind) -> float:
    """Return the tokens a second in windows of one kind."""
    of_kind = [window for window in windows if window.kind == kind]
    seconds = sum(window.end - window.begin for window in of_kind)
    return sum(answer.tokens_between(window.begin, window.end) for answer in answered for window in of_kind) / seconds


def judge(answered: Sequence[Answered], models: dict[int, Qwen2ForCausalLM]) -> Judged:
    """Compute every token anew as the engine did: each version goes on with the cache that earlier ones wrote."""
    num_wrong = num_told = num_tokens = 0
    largest = 0.0
    for answer in answered:
        cache, tokens = DynamicCache(), answer.prompt + answer.tokens
        begin = 0
        for start, end, version in answer.spans:
            inputs = torch.tensor([tokens[begin : len(answer.prompt) + end - 1]])
            written = torch.tensor(answer.tokens[start:end])
            said = torch.tensor(answer.logprobs[start:end])
            before = models.get(version - 1)
            if before is not None:
                other = _logprobs(before, inputs, copy.deepcopy(cache), written)
                num_told += int(((other - said).abs() > 10 * _TOLERANCE).sum())
            else:
                num_told += len(written)
            differences = (_logprobs(models[version], inputs, cache, written) - said).abs()
            is_wrong = ~(differences <= _TOLERANCE)
            num_wrong += int(is_wrong.sum())
            largest = max([largest, *differences[~is_wrong].tolist()])
            num_tokens += end - start
            begin = len(answer.prompt) + end - 1
    versions = frozenset(version for answer in answered for _, _, version in answer.spans)
    return Judged(num_tokens, num_wrong, largest, num_told / max(1, num_tokens), versions)


@torch.no_grad()
def _logprobs(model: Qwen2ForCausalLM, inputs: Tensor, cache: DynamicCache, written: Tensor) -> Tensor:
    """Return the logprobs of the tokens that follow the last of these inputs; the cache has them all afterwards."""
    logits = model(inputs, past_key_values=cache, use_cache=True).logits[0, -len(written) :].float()
    logprobs: Tensor = logits.log_softmax(-1).gather(1, written[:, None])[:, 0]
    return logprobs


if __name__ == "__main__":
    sys.exit(main())
