"""The folder of rounds belongs to one command. `python -m tests.flow.openrlhf_examples` plays its rounds, by hand."""

from pathlib import Path

import pytest

from learner.data.answers import Answers, append_answers
from learner.generation import iterate
from protocol.errors import SettingsError


def _options(folder: Path, objective: str = "sft", seed: int = 1) -> list[str]:
    (folder / "generate.yaml").write_text(f"run: {{seed: {seed}}}\n")
    (folder / "train.yaml").write_text(f"objective: {objective}\n")
    files = ["--generate", str(folder / "generate.yaml"), "--train", str(folder / "train.yaml")]
    return ["model", "prompts.jsonl", str(folder / "rounds"), "--rounds", "0", *files]


def test_folder_of_another_command_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert iterate.main(_options(tmp_path)) == iterate.main(_options(tmp_path)) == 0
    assert capsys.readouterr().out == "Model: model\n" * 2
    for changed in ([*_options(tmp_path), "--samples", "3"], _options(tmp_path, seed=2)):
        with pytest.raises(SettingsError, match=r"rounds holds rounds of another command, or of other settings"):
            iterate.main(changed)


def test_folder_of_other_prompts_in_the_same_file_is_refused(tmp_path: Path) -> None:
    options = _options(tmp_path)
    options[1] = str(tmp_path / "prompts.jsonl")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    assert iterate.main(options) == iterate.main(options) == 0
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "b"}\n')
    with pytest.raises(SettingsError, match=r"rounds holds rounds of another command, or of other settings or prompts"):
        iterate.main(options)


def test_rounds_begin_with_the_checkpoint_that_a_run_had_at_the_first_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, latest = _options(tmp_path), tmp_path / "run" / "checkpoints" / "latest"
    options[0] = str(tmp_path / "run")
    for step in ("step_000001", "step_000002"):
        (latest.parent / step / "model").mkdir(parents=True)
        latest.unlink(missing_ok=True)
        latest.symlink_to(step)
        assert iterate.main(options) == 0
    assert capsys.readouterr().out == f"Model: {latest.parent / 'step_000001' / 'model'}\n" * 2


def test_round_whose_answers_were_scored_otherwise_than_the_first_rounds_is_refused(tmp_path: Path) -> None:
    for number, sampled_by in enumerate(("s 1", "s 2", "s2 3"), 1):
        line = Answers(row=0, uid="u", prompt="p", samples=[], failed="why", weights="w", sampled_by=sampled_by)
        append_answers(tmp_path / f"{number}", line)
    iterate.check_same(tmp_path / "2", tmp_path / "1")
    with pytest.raises(SettingsError, match=r"/3 was made with other settings, scorers or tools than .*/1: the rounds"):
        iterate.check_same(tmp_path / "3", tmp_path / "1")


def test_selection_that_the_training_cannot_learn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--select best makes rows for sft, not for dpo"):
        iterate.main(_options(tmp_path, "dpo"))
    assert not (tmp_path / "rounds").exists()
