"""Searches at retrievers that fail nearly every second attempt, and are away for a minute: no error is ever read.

    python -m tests.chaos.bad_retriever [--seed N] [--short]

A run as in `tests.chaos.bad_rewards`, of conversations that search once and then answer. Each rollout server has a
retriever of its own node and another node's, both `tests.chaos.rig.bad_http`: 30 % 5xx, 10 % without an answer, 5 %
nonsense. The node's own is away for 60 s; for 20 s of these the other one is away too.

holds: every observation of every trained trajectory is exactly the passages of its query, with no word of an error
(wrong_observations=0 error_texts=0); nothing is lost (lost=0 trained_twice=0 dead_letters=0); with the own retriever
away searches go on at the other at 0.9 x the rate before (other_ratio); attempts per second in the outage are at most
1.1 x those before (calls_ratio); at most 10 s after both are back samples are finished at 0.9 x the rate before
(back_s). --short: 4 s and 1.5 s of outage, a breaker that tries six times as often, 2 s in place of 10. Rates over
windows of seconds are the machine's matter, which may be busy: they are shown, and not judged.
"""

import asyncio
import random
import re
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

from rollout.environments.base import Resources
from rollout.environments.search import Search, render_passages
from rollout.neighbours.http.endpoint import HttpPolicy
from rollout.neighbours.retriever_client import RetrieverClient
from tests.chaos.bad_rewards import POLICY, SHORT_POLICY, TIMEOUT_S
from tests.chaos.rig.bad_http import MARKER, BadServer, bad_server, passages_of
from tests.chaos.rig.neighbours import GROUP_SIZE, GROUPS_PER_STEP, Outcome, Seat, play_run, search_at, under_way
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.http_servers import counted_posts
from tests.fakes.rollout_fakes import ScriptedScorer

PACE = 32.0
_TOPK = 2
_ENOUGH = 0.9
_TURNS = re.compile(r"<search>(.*?)</search><information>(.*?)</information>", flags=re.DOTALL)


@dataclass(frozen=True)
class Times:
    """Seconds of the run's parts: before the outage, the own retriever's, the other's inside it, after both."""

    before: float
    own: float
    both: float
    after: float


def main() -> int:
    arguments = options(__doc__ or "")
    times = Times(2.5, 4.0, 1.5, 2.0) if arguments.short else Times(30.0, 60.0, 20.0, 10.0)
    policy = SHORT_POLICY if arguments.short else POLICY
    busy_s = times.before + times.own - times.both + 1.5 * times.after
    num_groups = int((busy_s + 3.0) * PACE / GROUP_SIZE / GROUPS_PER_STEP) * GROUPS_PER_STEP
    marks: dict[str, float] = {}
    with bad_server(arguments.seed) as own, bad_server(arguments.seed + 1) as other:
        outcome = asyncio.run(run(own, other, policy, num_groups, arguments.seed, marks, times))
        for name, server in (("own", own), ("other", other)):
            print(f"the {name} retriever met {dict(sorted(server.counts().items()))}")
    print(f"coordinator: {dict(sorted(outcome.counts.items()))}; prompts: {outcome.prompts}")
    for reasons in outcome.dead_letters:
        print(f"given up: {reasons}")
    timeline = outcome.timeline
    since = marks["own"] - times.before
    healthy = timeline.rate(since, marks["own"])
    calls = max(timeline.rate(since, marks["own"], 2), timeline.rate(marks["back"], marks["back"] + times.after, 2))
    figures = {
        **judged(outcome, num_groups),
        "other_ratio": timeline.rate(marks["own"], marks["both"]) / healthy,
        "calls_ratio": timeline.rate(marks["own"], marks["back"], column=2) / calls,
        "healthy_per_s": healthy,
        "back_s": timeline.back_s(marks["back"], _ENOUGH * healthy, window_s=1.0),
    }
    counted = ("wrong_observations", "error_texts", "lost", "trained_twice", "dead_letters")
    is_lossless = not any(figures[name] for name in counted)
    goes_on = figures["other_ratio"] >= _ENOUGH and figures["calls_ratio"] <= 1.1
    holds = is_lossless and (arguments.short or (goes_on and figures["back_s"] <= times.after))
    return conclude("bad_retriever", holds, samples=len(outcome.trained), outage_s=times.own, **figures)


def judged(outcome: Outcome, num_groups: int) -> dict[str, float]:
    """Return how many trajectories hold other passages than their query's, or an error's text, or are missing."""
    wrong = errors = 0
    for text, _, _ in outcome.trained.values():
        turns = _TURNS.findall(text)
        errors += MARKER in text or "NeighbourError" in text
        wrong += len(turns) != 1 or turns[0][1] != render_passages(passages_of(turns[0][0], _TOPK))
    return {
        "wrong_observations": wrong,
        "error_texts": errors,
        "lost": num_groups * GROUP_SIZE - len(outcome.trained),
        "trained_twice": outcome.num_trained_twice,
        "dead_letters": len(outcome.dead_letters),
    }


async def run(
    own: BadServer,
    other: BadServer,
    policy: HttpPolicy,
    num_groups: int,
    seed: int,
    marks: dict[str, float],
    times: Times,
) -> Outcome:
    """Return what became of the run; `marks` gets when the own retriever, then both were away, and both were back."""
    words = random.Random(seed)
    policy = HttpPolicy(**{**vars(policy), "attempt_timeout_s": TIMEOUT_S})
    urls = [f"{server.address}/retrieve" for server in (own, other)]
    async with AsyncExitStack() as stack:
        posts = stack.enter_context(counted_posts())
        clients = [await stack.enter_async_context(RetrieverClient(urls, _TOPK, None, policy)) for _ in range(2)]
        scorers = [ScriptedScorer() for _ in clients]
        seats = [
            Seat(scorer, Resources(2, {"search": search_at(client)}), client, Search)
            for scorer, client in zip(scorers, clients, strict=True)
        ]

        def progress() -> tuple[int, int]:
            return sum(len(scorer.requests) for scorer in scorers), posts.total()

        async def during() -> None:
            await under_way(progress)
            await asyncio.sleep(times.before)
            await asyncio.to_thread(own.outage, times.own)
            marks["own"] = time.monotonic() + 0.05
            await asyncio.sleep(times.own - times.both)
            await asyncio.to_thread(other.outage, times.both)
            marks["both"] = time.monotonic() + 0.05
            marks["back"] = max(marks["own"] + times.own, marks["both"] + times.both)

        def write(context: str, number: int) -> str:
            if "</information>" in context:
                return "<answer>it is so</answer>"
            return f"<search>word {words.getrandbits(40):x} {number}</search>"

        return await play_run(seats, write, num_groups, PACE, progress, during)


if __name__ == "__main__":
    sys.exit(main())
