"""A model's own answers through the real commands: generated, selected and learnt in two rounds, after a kill too."""

import math

import pytest

from learner import audit
from tests.chaos.row_kills import check_answers, iteration, num_lines
from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import Bring, Left

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

_NUM_PROMPTS, _NUM_STEPS = 24, 2


def test_two_rounds_of_iterative_dpo_go_on_after_a_kill(cluster: FlowCluster, user: Bring) -> None:
    folder, arguments = iteration(user, "dpo", _NUM_PROMPTS, _NUM_STEPS)
    arguments = [*arguments, "--rounds", "2"]
    with cluster.running(*arguments, module="learner.generation.iterate") as first:
        first.wait_until(lambda: num_lines(folder / "round_1" / "answers.jsonl") > 0)
        first.process.kill()
        first.finished()
    again = cluster.command("learner.generation.iterate", *arguments)
    said = again.stdout + again.stderr
    assert again.returncode == 0, said
    assert "answers.jsonl has rows already: they are kept" in said
    assert "starts again from step 0" not in said
    assert again.stdout.splitlines()[-1] == f"Model: {folder / 'round_2' / 'train'}"
    for number in (1, 2):
        own = folder / f"round_{number}"
        check_answers(own / "answers.jsonl", _NUM_PROMPTS, 2)
        assert num_lines(own / "rows.jsonl") > 8
        metrics = Left(own / "train").metrics
        assert metrics[0]["policy/loss"] == pytest.approx(math.log(2), abs=1e-6)  # the reference is the round's start
        assert [line["step"] for line in metrics] == list(range(1, _NUM_STEPS + 1))
        assert audit.main([str(own / "train")]) == 0
    # The second round's answers are of the first one's model.
    weights = {
        (folder / f"round_{number}" / "answers.jsonl").read_text().split('"weights":"')[1][:16] for number in (1, 2)
    }
    assert len(weights) == 2
