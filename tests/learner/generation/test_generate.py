"""What the command asks of a run, and what it reads back. A real one is in tests/flow."""

from argparse import Namespace
from pathlib import Path

import pytest

from learner.data.answers import Answers, Sample, append_answers
from learner.generation.generate import count_answers, is_whole, options_of
from learner.plan.needs import needs_prompts, needs_rollouts
from protocol.errors import SettingsError
from protocol.settings.loader import load_settings


def test_generation_is_a_run_of_no_steps_whose_folder_is_beside_its_file(tmp_path: Path) -> None:
    out = tmp_path / "my answers.jsonl"
    given = Namespace(model="m", prompts="a.jsonl", out=out, samples=4, num_prompts=9)
    config = tmp_path / "trained.yaml"
    config.write_text("objective: sft\nrun: {max_epochs: 2}\neval: {before: false, sets: [{name: a, data: b}]}\n")
    settings = load_settings(config, options_of(given))
    assert (settings.run.name, settings.run.dir) == ("my-answers.jsonl.run", str(tmp_path))
    assert (settings.data.eval, settings.eval.answers, settings.eval.samples) == ("a.jsonl", str(out), 4)
    assert (needs_prompts(settings), needs_rollouts(settings)) == (False, True)


def test_answers_are_refused_in_a_run_that_trains() -> None:
    with pytest.raises(SettingsError, match=r"eval\.answers = out is for a run of no steps on data\.eval alone"):
        load_settings(None, ["--eval.answers", "out", "--data.eval", "a.jsonl"])


def test_generation_is_whole_when_its_run_has_the_line_of_its_evaluation(tmp_path: Path) -> None:
    out, record = tmp_path / "a.jsonl", tmp_path / "a.jsonl.run" / "metrics.jsonl"
    assert not is_whole(out)
    record.parent.mkdir()
    record.write_text('{"step": 0, "eval/step": 0}\n')
    assert is_whole(out)


def test_counts_have_the_mean_reward_of_all_samples_and_of_each_rows_best(tmp_path: Path) -> None:
    for row, rewards in enumerate(([0.0, 1.0, 0.5], [0.25], [])):
        samples = [Sample(text="", reward=each, parts={}, finish="stop", tokens=[1], learnt=[]) for each in rewards]
        failed = None if samples else "why"
        line = Answers(row=row, uid="u", prompt="p", samples=samples, failed=failed, weights="w", sampled_by="s")
        append_answers(tmp_path / "out", line)
    counts = {"rows": 3, "samples": 4, "failed": 1, "reward": 0.4375, "best_reward": 0.625}
    assert count_answers(tmp_path / "out") == counts
