"""200 weight pushes under load, one in ten failing midway: no token is ever labelled with weights it is not of.

    python -m tests.chaos.bad_pushes [--seed N] [--short]

A plain model steps at random and is pushed by the real pusher over real gloo into a real vLLM engine of the same
model, while requests run all the time. Seeded pushes meet one of the faults of `tests.chaos.rig.faulty_pushes`.
--short: 12 pushes, four of them failing, into the receiving half alone (`rollout/engine/weights/receive.py`, without
vLLM's model: its start alone takes longer than the short form may).

holds: each version that any token carries was confirmed by the engine with the learner's own digest of that version,
and the tokens' logprobs are those of the learner's weights of it (wrong_tokens=0; compared where a request began, since
later tokens read a cache of mixed weights); from a digest that was refused until the next commit every request was
refused (served_unsynced=0), and what broke before the commit left the earlier version in use, whole; the pushes that
failed are those that were meant to (unexpected_failures=0), and those that follow bring the server back (synced).
"""

import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from learner.weights.push import WeightPusher
from protocol.errors import NeighbourError
from protocol.weights.digest import WeightDigest
from protocol.weights.wire import Bucket, TensorMeta, bucket_num_bytes, bucket_views
from rollout.engine.generation import Generation, Sampling
from tests.chaos.rig.faulty_pushes import FAULTS, Buckets, FaultyServer, FlippingGroup, breaking_off
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.planned_weights import plan_buckets, planned
from tests.fakes.tiny_models import engine_of, make_tiny_model

PROMPT = [20, 21, 14, 22, 23, 32] * 3
BUCKET_BYTES = 1 << 18
TOLERANCE = 1e-3
NUM_REQUESTS = 6
NUM_TOKENS = 60


@dataclass
class Rig:
    """The learner, the server, and what was seen of both. digests, weights: by version, as the learner knows them."""

    model: Qwen2ForCausalLM
    engine: Any
    server: FaultyServer
    pusher: WeightPusher
    deadline_s: float
    version: int = 0
    digests: dict[int, str] = field(default_factory=dict)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    generations: list[Generation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def metas(self) -> list[TensorMeta]:
        return [TensorMeta(name, "float32", tuple(p.shape)) for name, p in self.model.named_parameters()]

    def step(self) -> None:
        """Move every weight far enough that old ones cannot be mistaken for new, and note them."""
        self.version += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.03 * torch.randn_like(parameter))
        self.weights[self.version] = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.digests[self.version] = digest_of(self.weights[self.version], self.metas)

    def planned(self) -> tuple[Sequence[Bucket], Buckets]:
        return planned(self.model.named_parameters(), BUCKET_BYTES)


def main() -> int:
    arguments = options(__doc__ or "", pushes=200)
    num_pushes, num_faults = (12, 4) if arguments.short else (arguments.pushes, arguments.pushes // 10)
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    draw = random.Random(arguments.seed)
    faulty = dict(zip(draw.sample(range(1, num_pushes), num_faults), _faults(draw, num_faults), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder), tied=True)
        rig = asyncio.run(run(Path(folder), arguments.short, num_pushes, faulty))
    wrong = judged(rig, with_logprobs=not arguments.short)
    figures = {name: rig.counts[name] for name in ("synced", "failed", "unexpected_failures", "whole", "refused")}
    holds = not wrong and not rig.counts["served_unsynced"] and not rig.counts["unexpected_failures"]
    holds = holds and rig.counts["failed"] >= num_faults and len(rig.generations) > 0
    return conclude(
        "bad_pushes",
        holds,
        pushes=num_pushes,
        **figures,
        generations=len(rig.generations),
        wrong_tokens=wrong,
        served_unsynced=rig.counts["served_unsynced"],
    )


def _faults(draw: random.Random, number: int) -> list[str]:
    """Return each fault as often as any other, in a drawn order; the costly one (it waits a deadline) not first."""
    order = draw.sample(FAULTS, len(FAULTS))
    order.sort(key=lambda fault: fault == "prepare_hangs")
    return [order[i % len(order)] for i in range(number)]


async def run(folder: Path, is_short: bool, num_pushes: int, faulty: dict[int, str]) -> Rig:
    """Return what was seen in these pushes, the ones in `faulty` meeting their fault."""
    engine, deadline_s = await _start(folder, is_short), 6.0
    server = FaultyServer(engine)
    pusher = WeightPusher([server], "127.0.0.1", "gloo", deadline_s)
    rig = Rig(Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32), engine, server, pusher, deadline_s)
    rig.step()
    await _push(rig, None)
    requests = [asyncio.create_task(_ask_forever(rig, number)) for number in range(NUM_REQUESTS)]
    for number in range(num_pushes):
        rig.step()
        await _push(rig, faulty.get(number))
        await asyncio.sleep(0.1)  # some tokens between pushes
    while rig.engine.policy_version is None:
        await _push(rig, None)
    for task in requests:
        task.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    await asyncio.to_thread(pusher.close)
    engine.shutdown()
    return rig


async def _start(folder: Path, is_short: bool) -> Any:
    if is_short:
        from tests.chaos.rig.plain_engine import PlainEngine

        return PlainEngine()
    from rollout.engine.engine import Engine

    return await Engine.start(engine_of(folder))


async def _push(rig: Rig, fault: str | None) -> None:
    """Push the current weights; one that follows a failure is tried until the server has joined again."""
    await _joined(rig)
    rig.server.fault = fault
    link = rig.pusher._links[0]
    if fault == "byte_flipped" and link._group is not None:
        link._group = FlippingGroup(link._group)
    plan, gathered = rig.planned()
    if fault == "learner_breaks_off":
        gathered = breaking_off(gathered)
    why = "nothing"
    try:
        report = await asyncio.to_thread(rig.pusher.push, rig.version, plan, gathered)
        is_synced, why = bool(report.synced), str(report.failed)
    except RuntimeError as error:
        is_synced, why = False, str(error)
    rig.server.fault = None
    rig.counts["synced" if is_synced else "failed"] += 1
    if is_synced == (fault is not None):
        rig.counts["unexpected_failures"] += 1
    if not is_synced:
        print(f"push {rig.version}: {fault}: {why[:150]}", flush=True)
        await _try_to_be_served(rig)


async def _joined(rig: Rig) -> None:
    """Wait until the server that failed has joined its group again, as training does without noticing."""
    while not (rig.pusher._links[0].is_joined or rig.pusher._links[0].is_new):
        rig.pusher._run(rig.pusher._rejoin_failed())
        await asyncio.sleep(0.05)


async def _try_to_be_served(rig: Rig) -> None:
    """After a push whose digest was refused, ask: every request must be refused."""
    if rig.engine.policy_version is not None:
        # It broke before the commit, or after it: what is held is whole, and confirmed.
        rig.counts["whole"] += 1
        return
    for number in range(3):
        try:
            await asyncio.wait_for(_ask(rig, f"after-{rig.version}-{number}"), 5.0)
            rig.counts["served_unsynced"] += 1
        except NeighbourError:
            rig.counts["refused"] += 1


async def _ask_forever(rig: Rig, number: int) -> None:
    asked = 0
    while True:
        asked += 1
        try:
            rig.generations.append(await _ask(rig, f"{number}-{asked}"))
        except NeighbourError:
            await asyncio.sleep(0.02)


async def _ask(rig: Rig, name: str) -> Generation:
    generation: Generation = await rig.engine.generate(PROMPT, Sampling(NUM_TOKENS, 1.0), name)
    return generation


# -- afterwards -------------------------------------------------------------------------------------------------------


def judged(rig: Rig, with_logprobs: bool) -> int:
    """Return how many tokens carry a version whose weights are not the ones that wrote them."""
    wrong: int = 0
    for generation in rig.generations:
        for start, end, version in generation.version_spans:
            wrong += (end - start) * (rig.server.committed.get(version) != rig.digests.get(version))
        if with_logprobs:
            wrong += _num_off(rig, generation)
    seen: dict[int, set[str | None]] = getattr(rig.engine, "seen", {})
    return wrong + sum(digests != {rig.digests[version]} for version, digests in seen.items())


def _num_off(rig: Rig, generation: Generation) -> int:
    """Return how many tokens of the first span have other logprobs than the learner's weights of its version give."""
    start, end, version = generation.version_spans[0]
    rig.model.load_state_dict(rig.weights[version], strict=False)
    tokens = PROMPT + generation.tokens[:end]
    with torch.no_grad():
        logits = rig.model(torch.tensor([tokens])).logits[0, len(PROMPT) - 1 : -1].float()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(generation.tokens[:end])[:, None])[:, 0]
    return int(((torch.tensor(generation.logprobs[:end]) - expected).abs() > TOLERANCE)[start:].sum())


def digest_of(weights: dict[str, Tensor], metas: Sequence[TensorMeta]) -> str:
    """Return the digest of weights as they would travel, computed from the tensors alone."""
    plan = plan_buckets(metas, BUCKET_BYTES)
    digest = WeightDigest(plan)
    for bucket in plan:
        flat = torch.zeros(bucket_num_bytes(bucket), dtype=torch.uint8)
        for name, view in bucket_views(flat, bucket):
            view.copy_(weights[name])
        digest.add(flat)
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
