"""A thousand conversations of agents over HTTP, a third of which go wrong: no sample lost, none trained twice.

    python -m tests.chaos.agents [--seed N] [--short]

A run with real coordinator, sockets, sessions and OpenAI-compatible endpoints around a scripted engine. Every agent is
a process of its own (`tests.chaos.rig.forked_agents`) that asks for a sample, has three turns written and reports a
reward. At first attempts a third of them are killed while they ask, fall silent and report late, or report twice;
others ask twice for each turn and wait for the second answer alone.

holds: every sample is trained once, with the reward that its own texts give, or its prompt is skipped with its reasons
(lost=0 trained_twice=0 wrong_rewards=0); what is trained are the tokens that the engine wrote (wrong_tokens=0); no
turn was written twice (duplicates=0). --short: 64 conversations in place of 1,024.
"""

import asyncio
import itertools
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

from protocol.settings.rollout import AgentsSettings
from protocol.settings.run_spec import run_spec
from protocol.wire.channel import AsyncDealerChannel
from protocol.wire.trajectory import Trajectory
from rollout.endpoint.player import AgentPlayer
from rollout.engine.generation import Generation, Sampling
from rollout.engine.version_gate import VersionGate
from rollout.neighbours.reward_client import NoRewards
from rollout.session.outbox import Outbox
from rollout.session.session import RolloutSession
from tests.chaos.rig.forked_agents import reward_of
from tests.chaos.rig.neighbours import GROUP_SIZE, GROUPS_PER_STEP, Opened, Outcome, Place, coordinated, run_settings
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.engines import TokenizingEngine
from tests.fakes.tool_models import FAMILIES

TOKEN = "the-token-of-these-agents"
END = "<|im_end|>"


class AgentsEngine(TokenizingEngine):
    """Takes its time, and keeps which turn of which sample was asked for, and what was written."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        numbers = itertools.count()
        words = self._random
        super().__init__(
            lambda context: f"{words.getrandbits(40):x} {next(numbers)}{END}", FAMILIES["hermes"].tokenizer()
        )
        self.turns: Counter[str] = Counter()
        self.written: set[tuple[int, ...]] = set()

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        self.turns[request_id.rpartition("-")[0]] += 1
        await asyncio.sleep(self._random.uniform(0.0, 0.05))
        generation = await super().generate(prompt_tokens, sampling, request_id)
        self.requests.clear()
        self.written.add(tuple(generation.tokens))
        return generation


class Noted:
    """What the rank was given."""

    def __init__(self, engines: Sequence[AgentsEngine]) -> None:
        self._engines = engines
        self.places: Counter[tuple[str, int]] = Counter()
        self.wrong_rewards = 0
        self.wrong_tokens = 0

    def __call__(self, trajectory: Trajectory) -> None:
        facts = trajectory.facts
        self.places[facts.group, facts.sample_index] += 1
        texts = []
        for is_own, part in itertools.groupby(
            zip(trajectory.tokens.tolist(), trajectory.loss_mask.tolist(), strict=True), key=lambda each: each[1]
        ):
            if is_own:
                tokens = [token for token, _ in part]
                self.wrong_tokens += not any(tuple(tokens) in engine.written for engine in self._engines)
                texts.append(self._engines[0].decode(tokens).removesuffix(END))
        self.wrong_rewards += facts.reward != reward_of(texts)


async def run(num_groups: int, seed: int, idle_timeout_s: float, engines: list[AgentsEngine], noted: Noted) -> Outcome:
    """Return what became of the run."""
    settings = run_settings(num_groups, environment="agents", max_response_tokens=64, max_context_tokens=2048)
    settings = settings.model_copy(update={"agents": AgentsSettings(idle_timeout_s=idle_timeout_s)})
    players: list[AgentPlayer] = []
    outcome = Outcome()
    drivers: list[subprocess.Popen[str]] = []

    async def open_sessions(place: Place) -> list[Opened]:
        opened: list[Opened] = []
        for number, engine in enumerate(engines):
            spec, gate, name = run_spec(settings, "chaos", 1, place.address), VersionGate(), f"s{number}"
            gate.open()
            player = await AgentPlayer.open(engine, gate, None, NoRewards(), spec, name, TOKEN)
            channel = AsyncDealerChannel(place.address, name, place.keys.peer, place.keys.coordinator.public)
            session = RolloutSession(name, spec, channel, player, engine, player, Outbox())
            opened.append((asyncio.create_task(session.run()), channel))
            players.append(player)
            url = player.base_url.removesuffix("/v1")
            command = [sys.executable, "-m", "tests.chaos.rig.forked_agents", url, TOKEN, str(seed), "16"]
            drivers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return opened

    async def nothing() -> None:
        """Nothing else goes on beside the run."""

    try:
        await coordinated(settings, num_groups, engines, open_sessions, nothing, noted, outcome)
        return outcome
    finally:
        for driver in drivers:
            driver.terminate()
            print(f"agents: {(await asyncio.to_thread(driver.communicate, timeout=120))[0].strip()}")
        for player in players:
            await player.close()


def main() -> int:
    arguments = options(__doc__ or "")
    num_groups = 64 // GROUP_SIZE if arguments.short else 1024 // GROUP_SIZE
    assert num_groups % GROUPS_PER_STEP == 0
    engines = [AgentsEngine(arguments.seed + number) for number in range(2)]
    noted = Noted(engines)
    outcome = asyncio.run(run(num_groups, arguments.seed, 4.0, engines, noted))
    print(f"coordinator: {dict(sorted(outcome.counts.items()))}; prompts: {outcome.prompts}")
    for reasons in outcome.dead_letters:
        print(f"given up: {reasons}")
    figures = {
        "lost": num_groups * GROUP_SIZE - len(noted.places),
        "trained_twice": sum(number > 1 for number in noted.places.values()),
        "wrong_rewards": noted.wrong_rewards,
        "wrong_tokens": noted.wrong_tokens,
        "duplicates": sum(number > 1 for engine in engines for number in engine.turns.values()),
    }
    return conclude(
        "agents",
        not any(figures.values()),
        samples=len(noted.places),
        skipped_prompts=len(outcome.dead_letters),
        handed_back=outcome.counts["retried"],
        **figures,
    )


if __name__ == "__main__":
    sys.exit(main())
