"""Which checkpoint is the best one, and which are kept until their evaluation is known."""

import json
from pathlib import Path

import pytest

from learner.checkpoint.best import BEST, find_best, keep_best
from learner.checkpoint.folder import begin, rotate
from learner.checkpoint.manifest import Checkpoint
from protocol.settings.evaluation import EvalSettings
from tests.fakes.checkpoints import commit


def run_of(folder: Path, saved: list[int], scores: dict[int, float]) -> Path:
    """Write checkpoints of these steps, and evaluations of these scores; returns the folder of the checkpoints."""
    root = folder / "checkpoints"
    for step in saved:
        aside = begin(root, step)
        (aside / "weights").write_text(str(step))
        commit(aside, Checkpoint(aside, step, step, "run", "digest"))
    lines = ({"step": step + 1, "eval/step": step, "eval/held_out/reward": score} for step, score in scores.items())
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def kept(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("step_*"))


BY = EvalSettings(every_steps=10, best="eval/held_out/reward")


def test_best_checkpoint_outlives_the_newest_ones_and_has_a_name(tmp_path: Path) -> None:
    root = run_of(tmp_path, [10, 20, 30, 40], {0: 0.9, 10: 0.25, 20: 0.75, 30: 0.5, 40: 0.5})
    rotate(root, 1, protected=keep_best(root, tmp_path, BY))
    assert kept(root) == [20, 40]
    assert (root / BEST / "weights").read_text() == "20"


def test_checkpoint_whose_evaluation_is_under_way_stays(tmp_path: Path) -> None:
    root = run_of(tmp_path, [10, 15, 20, 25, 30], {10: 0.5})
    rotate(root, 1, protected=keep_best(root, tmp_path, BY))
    assert kept(root) == [10, 20, 30]


def test_lowest_may_be_the_best_and_the_earliest_of_equals_is(tmp_path: Path) -> None:
    assert find_best({10: 0.5, 20: 0.25, 30: 0.25}, is_highest=False) == 20
    assert find_best({10: 0.5, 20: 0.5}, is_highest=True) == 10
    assert find_best({}, is_highest=True) is None


@pytest.mark.parametrize("since", ["eval/rewards_since", "eval/held_out/since"])
def test_scores_of_earlier_reward_endpoints_or_sets_do_not_count(tmp_path: Path, since: str) -> None:
    root = run_of(tmp_path, [10, 20, 30], {10: 0.9})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for step, score in {20: 0.3, 30: 0.2}.items():
            line = {"step": step + 1, "eval/step": step, "eval/held_out/reward": score, since: 11}
            file.write(json.dumps(line) + "\n")
    assert keep_best(root, tmp_path, BY) == {20}


def test_best_moves_on_when_a_later_one_is_better(tmp_path: Path) -> None:
    root = run_of(tmp_path, [10, 20], {10: 0.5})
    keep_best(root, tmp_path, BY)
    assert (root / BEST).readlink().name == "step_000010"
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 25, "eval/step": 20, "eval/held_out/reward": 0.75}) + "\n")
    assert keep_best(root, tmp_path, BY) == {20}
    assert (root / BEST).readlink().name == "step_000020"


def test_best_is_chosen_as_the_settings_say(tmp_path: Path) -> None:
    root = run_of(tmp_path, [10, 20], {10: 0.5, 20: 0.75})
    assert keep_best(root, tmp_path, EvalSettings(every_steps=10)) == set()
    assert keep_best(root, tmp_path, BY.model_copy(update={"best_is": "lowest"})) == {10}
