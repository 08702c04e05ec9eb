"""Runs in random orders whose reward endpoints change again and again: no prompt is lost, no group is of two sets."""

from pathlib import Path
from random import Random

import pytest

from protocol.settings.reward_sets import changing_sets, new_set, read_sets, write_sets
from protocol.settings.rewards import RewardsSettings
from protocol.wire import messages as m
from tests.learner.coordinator.coordinator_script import Script, settings_of

_NUM_SETS = 12


class ChangingRun:
    """Three servers that take a new set up when they come to it; what they were scoring ends on the earlier one."""

    def __init__(self, script: Script, seed: int) -> None:
        self.script, self.random = script, Random(seed)
        self.uses = dict.fromkeys(("s1", "s2", "s3"), 1)
        self.under_way: list[tuple[str, m.Lease, int, int]] = []  # server, lease, sample, set at its lease
        self.step = self.num_changes = 0

    def change(self) -> None:
        if self.num_changes < _NUM_SETS and self.random.random() < 0.1:
            self.num_changes += 1
            url = f"http://127.0.0.1:1/{self.num_changes}"
            wanted = RewardsSettings.model_validate({"endpoints": [{"name": "math", "url": url}]})
            with changing_sets(self.script.folder):
                sets = read_sets(self.script.folder)
                write_sets(self.script.folder, [*sets, new_set(wanted, len(sets) + 1, "command")])
            self.script.advance(1.1)

    def serve(self) -> None:
        server = self.random.choice(list(self.uses))
        if told := self.script.take(server, m.Rewards):
            self.uses[server] = told[-1].reward_set
        leases = self.script.demand(server, self.random.randint(0, 3), self.step, reward_set=self.uses[server])
        for lease in leases:
            self.under_way += [(server, lease, index, self.uses[server]) for index in lease.sample_indices]

    def finish(self) -> None:
        if self.under_way:
            server, lease, index, number = self.under_way.pop(self.random.randrange(len(self.under_way)))
            if self.random.random() < 0.5:  # the policy wrote until now: it is scored by what its server uses by now
                number = self.uses[server]
            made = self.script.trajectory(server, lease, index, self.step, self.random.random(), reward_set=number)
            self.script.tell(server, m.TrajectoryDone(**self.script.stamp, facts=made.facts), made.to_buffers())
            self.script.advance()

    def learn(self) -> None:
        if [answer for answer in self.script.ask(self.step + 1) if isinstance(answer, m.Batch)]:
            self.step += 1
            self.script.step(self.step, self.step)

    def run(self, num_steps: int) -> None:
        actions = [self.change, self.serve, self.finish, self.finish, self.finish, self.learn]
        for _ in range(10_000):
            if self.step == num_steps:
                return
            self.random.choice(actions)()
        raise AssertionError(f"the run stands still: {self.script.coordinator.status()}")


@pytest.mark.parametrize("seed", range(3))
def test_run_whose_endpoints_change_trains_every_prompt_once_in_groups_of_one_set(tmp_path: Path, seed: int) -> None:
    script = Script(tmp_path, settings_of(run={"max_steps": 24}, rollout={"group_size": 4}), num_prompts=6)
    run = ChangingRun(script, seed)
    run.run(24)
    assert script.states() == {"trained": 48}
    assert script.rows("SELECT COUNT(DISTINCT epoch || uid) FROM prompts") == [(48,)]
    sets = script.rows('SELECT COUNT(*), COUNT(DISTINCT reward_set) FROM trajectories GROUP BY "group"')
    assert set(sets) == {(4, 1)}
    assert script.rows("SELECT COUNT(*) FROM failures") == [(0,)]
    assert run.num_changes > 3
    made_again = script.rows("SELECT COUNT(*) FROM waste WHERE reason = 'reward_set'")[0][0]
    assert made_again == script.rows("SELECT COUNT(*) FROM waste")[0][0] > 0
