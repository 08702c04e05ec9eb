"""Rewards from a service that fails nearly every second attempt, and is away for a minute: none invented, none lost.

    python -m tests.chaos.bad_rewards [--seed N] [--short]

A run with real coordinator, sockets, sessions and reward clients around a scripted engine
(`tests.chaos.rig.neighbours`) against `tests.chaos.rig.bad_http` in a process of its own: 30 % 5xx, 10 % without an
answer, 5 % nonsense, and an outage of 60 s in which connections are refused. One rollout server asks sample by sample,
the other in batches of four.

holds: every prompt is trained once, each sample with the reward of its own text (invented=0 misassigned=0 lost=0
trained_twice=0 dead_letters=0); attempts per second in the outage are at most 1.1 x those before it (calls_ratio); at
most 10 s after it samples are finished at 0.9 x the rate before it (back_s), and in the 10 s from then on too
(rate_after_ratio). --short: an outage of 3 s, a breaker that tries six times as often, 2.5 s in place of 10. Rates over
windows of seconds are the machine's matter, which may be busy: they are shown, and not judged.
"""

import asyncio
import random
import sys
import time
from contextlib import AsyncExitStack

from protocol.settings.rewards import RewardEndpoint
from rollout.environments.base import Resources, SingleTurn
from rollout.neighbours.http.endpoint import HttpPolicy
from rollout.neighbours.reward_client import RewardClient, Score, ScoreRequest
from tests.chaos.rig.bad_http import BadServer, bad_server, reward_of
from tests.chaos.rig.neighbours import GROUP_SIZE, GROUPS_PER_STEP, Outcome, Seat, play_run, under_way
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.http_servers import counted_posts

POLICY = HttpPolicy(min_backoff_s=0.05, max_backoff_s=2.0)
SHORT_POLICY = HttpPolicy(
    min_backoff_s=0.02,
    max_backoff_s=0.5,
    breaker_threshold=10,
    breaker_after_s=0.5,
    breaker_cooldown_s=0.15,
    breaker_max_cooldown_s=0.8,
)
PACE = 24.0
_ENOUGH = 0.9
# Longer than a busy machine keeps a request waiting that is answered at once.
TIMEOUT_S = 1.5


class CountedRewards:
    """A reward client, and how many samples it has scored."""

    def __init__(self, client: RewardClient) -> None:
        self.client = client
        self.num_scored = 0

    @property
    def is_accepting(self) -> bool:
        return self.client.is_accepting

    async def score(self, request: ScoreRequest) -> Score:
        score = await self.client.score(request)
        self.num_scored += 1
        return score


def main() -> int:
    arguments = options(__doc__ or "", **{"outage_s": 60.0})
    is_short = arguments.short
    outage_s, before_s, after_s = (3.0, 2.5, 2.5) if is_short else (arguments.outage_s, 30.0, 10.0)
    num_groups = int((3 + before_s + 1.6 * after_s) * 2 * PACE / GROUP_SIZE / GROUPS_PER_STEP) * GROUPS_PER_STEP
    with bad_server(arguments.seed) as server:
        outage: list[float] = []
        rewards: list[CountedRewards] = []
        policy = SHORT_POLICY if is_short else POLICY
        outcome = asyncio.run(
            run(server, policy, num_groups, arguments.seed, rewards, outage, (before_s, outage_s)),
        )
        met = server.counts()
    print(f"the service met {sum(met.values())} requests: {dict(sorted(met.items()))}")
    print(f"coordinator: {dict(sorted(outcome.counts.items()))}; prompts: {outcome.prompts}")
    for reasons in outcome.dead_letters:
        print(f"given up: {reasons}")
    began, ended = outage
    timeline = outcome.timeline
    healthy = timeline.rate(began - before_s, began)
    # A busy machine makes both lower: a period of health is as good after the outage as before it.
    calls = max(timeline.rate(began - before_s, began, 2), timeline.rate(ended, ended + after_s, 2))
    back_s = timeline.back_s(ended, _ENOUGH * healthy, window_s=1.0)
    figures = {
        **judged(outcome, num_groups),
        "handed_back": outcome.counts["retried"],
        "calls_ratio": timeline.rate(began, ended, column=2) / calls,
        "healthy_per_s": healthy,
        "back_s": back_s,
        "rate_after_ratio": timeline.rate(ended + min(back_s, after_s), ended + min(back_s, after_s) + after_s)
        / healthy,
    }
    is_lossless = not any(figures[key] for key in ("invented", "misassigned", "lost", "trained_twice", "dead_letters"))
    is_back = back_s <= after_s and figures["rate_after_ratio"] >= _ENOUGH
    holds = is_lossless and (is_short or (is_back and figures["calls_ratio"] <= 1.1))
    return conclude("bad_rewards", holds, samples=len(outcome.trained), outage_s=outage_s, **figures)


def judged(outcome: Outcome, num_groups: int) -> dict[str, float]:
    """Return how many rewards are nobody's, or another text's, and what became of the prompts."""
    right = {reward_of(text) for text, _, _ in outcome.trained.values()}
    wrong = [
        reward for text, reward, parts in outcome.trained.values() if {reward, *parts.values()} != {reward_of(text)}
    ]
    misassigned = sum(reward in right for reward in wrong)
    return {
        "invented": len(wrong) - misassigned,
        "misassigned": misassigned,
        "lost": num_groups * GROUP_SIZE - len(outcome.trained),
        "trained_twice": outcome.num_trained_twice,
        "dead_letters": len(outcome.dead_letters),
    }


async def run(
    server: BadServer,
    policy: HttpPolicy,
    num_groups: int,
    seed: int,
    rewards: list[CountedRewards],
    outage: list[float],
    times: tuple[float, float],
) -> Outcome:
    """Return what became of the run; `outage` gets the times of its begin and end, `rewards` the clients."""
    before_s, outage_s = times
    words = random.Random(seed)
    async with AsyncExitStack() as stack:
        posts = stack.enter_context(counted_posts())
        for batch_size in (1, 4):
            endpoint = RewardEndpoint.model_validate(
                {"name": "bad", "url": f"{server.address}/score", "timeout_s": TIMEOUT_S, "batch_size": batch_size}
            )
            rewards.append(
                CountedRewards(await stack.enter_async_context(RewardClient([endpoint], "sum", None, policy)))
            )
        seats = [Seat(each, Resources(1), each, SingleTurn) for each in rewards]

        def progress() -> tuple[int, int]:
            return sum(each.num_scored for each in rewards), posts.total()

        async def during() -> None:
            await under_way(progress)
            await asyncio.sleep(before_s)
            await asyncio.to_thread(server.outage, outage_s)
            outage.append(time.monotonic() + 0.05)
            await asyncio.sleep(outage_s)
            outage.append(outage[0] + outage_s)

        write = lambda context, number: f"{words.getrandbits(40):x} {number}"  # noqa: E731
        return await play_run(seats, write, num_groups, PACE, progress, during)


if __name__ == "__main__":
    sys.exit(main())
