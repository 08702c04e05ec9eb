"""Dynamic sampling in random runs whose coordinator dies: nothing filtered is trained or lost."""

import shutil
from pathlib import Path
from random import Random

import pytest

from protocol.settings.settings import Settings
from tests.learner.coordinator.coordinator_script import Script, settings_of
from tests.learner.coordinator.test_random_runs import Simulation

NUM_PROMPTS = 40


class _Solving(Simulation):
    """Samples that are right or wrong, so that half of all groups of two are filtered."""

    def draw_reward(self) -> float:
        return float(self.random.random() < 0.5)


def settings(max_staleness: int) -> Settings:
    return settings_of(
        run={"max_steps": 9},
        learner={"max_staleness": max_staleness},
        filter={"dynamic_sampling": True, "max_replaced": 0},
    )


def play(folder: Path, max_staleness: int, seed: int) -> Script:
    """Run to the end through six deaths; half of them take the run back to a checkpoint of its ledger."""
    draw, wanted = Random(seed), settings(max_staleness)
    script = Script(folder, wanted, num_prompts=NUM_PROMPTS)
    saved_step, saved = 0, folder / "saved.sqlite"
    script.ledger.snapshot(saved)
    for death in range(6):
        simulation = _Solving(script, seed + death, num_ranks=1)
        actions = [simulation.serve, simulation.finish, simulation.finish, simulation.learn]
        for _ in range(draw.randint(5, 80)):
            draw.choice(actions)()
        step = simulation.step
        if draw.random() < 0.5:
            script.advance()
            saved_step = step
            saved.unlink()
            script.ledger.snapshot(saved)
        script.ledger.close()
        if draw.random() < 0.5:
            step = saved_step
            for name in ("ledger.sqlite-wal", "ledger.sqlite-shm"):
                (folder / name).unlink(missing_ok=True)
            shutil.copy(saved, folder / "ledger.sqlite")
            (folder / "metrics.jsonl").unlink(missing_ok=True)
        script = Script(folder, wanted, num_prompts=NUM_PROMPTS, step=step)
    _Solving(script, seed + 99, num_ranks=1).run()
    return script


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_runs_through_deaths_filter_account_and_train_what_they_should(
    tmp_path: Path, max_staleness: int, seed: int
) -> None:
    script = play(tmp_path, max_staleness, seed)
    means = script.rows(
        "SELECT p.state, p.step, COUNT(*), AVG(t.reward) FROM prompts AS p "
        'JOIN trajectories AS t ON t."group" = p."group" '
        "WHERE p.state = 'trained' OR p.reason LIKE 'filtered: %' GROUP BY p.\"group\""
    )
    assert all(count == 2 for _, _, count, _ in means)
    assert all(0 < mean < 1 for state, _, _, mean in means if state == "trained")
    filtered = [mean for state, step, _, mean in means if state == "skipped" and step is None]
    assert filtered
    assert set(filtered) <= {0.0, 1.0}
    positions = [row[0] for row in script.rows("SELECT position FROM prompts ORDER BY position")]
    assert positions == list(range(int(script.rows("SELECT value FROM meta WHERE key = 'position'")[0][0])))
    assert script.rows("SELECT count(*) FROM prompts WHERE step IS NOT NULL") == [(18,)]
    assert set(script.states()) <= {"trained", "skipped"}
