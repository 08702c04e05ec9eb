"""Whole runs in random orders, with deaths and failures: every prompt is accounted for once."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from protocol.wire import messages as m
from tests.learner.coordinator.coordinator_script import Script, settings_of


class Simulation:
    """Servers and ranks that do anything they may, in random order, until the run ends."""

    def __init__(self, script: Script, seed: int, num_ranks: int) -> None:
        self.script, self.random, self.num_ranks = script, Random(seed), num_ranks
        self.version = script.coordinator.policy_version
        self.step = script.coordinator.step
        self.held: list[tuple[str, m.Lease, int]] = []
        self.ended: dict[int, int] = {}

    def serve(self) -> None:
        server = f"s{self.random.randint(1, 3)}"
        for lease in self.script.demand(server, self.random.randint(0, 3), self.version):
            self.held += [(server, lease, index) for index in lease.sample_indices]

    def finish(self) -> None:
        if self.held:
            server, lease, index = self.held.pop(self.random.randrange(len(self.held)))
            what = self.random.random()
            if what < 0.05:
                self.script.fail(server, lease, index)
            elif what < 0.1:
                self.script.deliver(server, lease, index, self.version, reward=float("nan"))
            else:
                oldest = max(0, self.version - self.random.randint(0, 1))
                self.script.deliver(server, lease, index, oldest, reward=self.random.random())

    def lose(self) -> None:
        if self.random.random() < 0.1:
            server = f"s{self.random.randint(1, 3)}"
            self.held = [entry for entry in self.held if entry[0] != server]
            self.script.tell(server, m.Hello(**self.script.stamp, server=server, policy_version=self.version))

    def learn(self) -> None:
        answers = [self.script.ask(self.step + 1, rank) for rank in range(self.num_ranks)]
        if all(answer and isinstance(answer[0], m.Batch) for answer in answers):
            self.step += 1
            is_applied = self.random.random() > 0.05
            self.version += is_applied
            self.script.step(self.step, self.version, is_applied)
        for rank, answer in enumerate(answers):
            if answer and isinstance(answer[0], m.RunEnd):
                self.ended[rank] = answer[0].step

    def run(self, max_turns: int = 5000) -> None:
        actions = [self.serve, self.finish, self.finish, self.finish, self.learn, self.lose]
        for _ in range(max_turns):
            if len(self.ended) == self.num_ranks:
                return
            self.random.choice(actions)()
        raise AssertionError(f"the run stands still: {self.script.coordinator.status()}")


@pytest.mark.parametrize("policy", ["wait", "drop"])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@hypothesis_settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(seed=st.integers(0, 2**32))
def test_random_run_accounts_for_every_prompt_and_keeps_its_bounds(
    tmp_path_factory: pytest.TempPathFactory, max_staleness: int, policy: str, seed: int
) -> None:
    settings = settings_of(
        run={"max_steps": 8},
        learner={"num_ranks": 2, "max_staleness": max_staleness, "stale_policy": policy},
    )
    script = Script(tmp_path_factory.mktemp("run"), settings, num_prompts=6)
    simulation = Simulation(script, seed, num_ranks=2)
    simulation.run()
    assert simulation.ended == {0: 9, 1: 9}
    states = script.states()
    assert set(states) <= {"trained", "skipped"}
    num_in_steps = script.rows("SELECT count(*) FROM prompts WHERE step IS NOT NULL")[0][0]
    assert num_in_steps == 8 * 2
    staleness = [row[0] for row in script.rows("SELECT staleness FROM trajectories WHERE staleness IS NOT NULL")]
    assert all(0 <= value <= max_staleness for value in staleness)
    assert script.rows("SELECT count(*) FROM prompts WHERE state = 'skipped' AND reason IS NULL") == [(0,)]
    per_group = script.rows('SELECT "group", count(*) FROM trajectories WHERE step IS NOT NULL GROUP BY "group"')
    assert {count for _, count in per_group} == {2}
    script.ledger.close()


def test_every_prompt_is_trained_once_in_every_epoch(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(run={"max_steps": 9}), num_prompts=6)
    for step in range(1, 10):
        script.train(step)
    trained = script.rows("SELECT epoch, uid FROM prompts WHERE state = 'trained'")
    assert Counter(trained) == {(epoch, f"p{i}"): 1 for epoch in range(3) for i in range(6)}
    assert script.states() == {"trained": 18}
