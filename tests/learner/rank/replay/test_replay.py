"""`sluice replay` repeats a kept step bit for bit, refuses changed files, and shows the batch under another loss."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.command import run_verb
from learner.disk.model_folder import weights_digest
from learner.rank.replay import command
from learner.rank.replay.command import Figure, show
from learner.rank.replay.kept_steps import kept_steps
from protocol.errors import SettingsError
from tests.fakes.warm_process import run_warm
from tests.learner.rank.replay.kept_runs import CASES, NUM_STEPS, SAVED

pytestmark = [pytest.mark.stack, pytest.mark.ranks]
Found = dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the runs."""
    made = tmp_path_factory.mktemp("kept")
    ended = run_warm("tests.learner.rank.replay.kept_runs", str(made), timeout=280)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return made


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Path:
    """Return a copy of the run with one rank."""
    return Path(shutil.copytree(folder / "grpo", tmp_path / "grpo", symlinks=True))


def replayed(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Return the command's exit status and its JSON."""
    status = run_verb(["replay", *arguments, "--json"])
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    found["figures"] = {figure["name"]: figure for figure in found["figures"]}
    return status, found


@pytest.mark.parametrize("name", CASES)
def test_replay_of_a_step_has_the_recorded_bits(folder: Path, name: str) -> None:
    found: Found = torch.load(folder / f"{name}.pt")
    ended = {step: of_step for step, of_step in found.items() if step <= NUM_STEPS}
    assert [of_step["from"] for of_step in ended.values()] == [0, SAVED, SAVED][-len(ended) :]
    for of_step in ended.values():
        assert {figure["name"]: figure["replayed"] for figure in of_step["figures"]} == of_step["recorded"]
        assert of_step["is_equal"]
        assert of_step["has_served_weights"] is True
    losses = {of_step["recorded"]["policy/loss"] for of_step in ended.values()}
    assert len(losses) == len(ended) >= 1


@pytest.mark.parametrize("name", CASES)
def test_a_step_that_crashed_is_replayed_too(folder: Path, name: str) -> None:
    crashed: dict[str, Any] = torch.load(folder / f"{name}.pt")[NUM_STEPS + 1]
    assert (crashed["recorded"], crashed["is_equal"]) == (None, False)
    assert "policy/loss" in {figure["name"] for figure in crashed["figures"]}


def test_the_newest_steps_are_kept(folder: Path) -> None:
    assert list(kept_steps(folder / "noisy" / "batches")) == [2, 3, 4]
    assert list(kept_steps(folder / "grpo" / "batches")) == [1, 2, 3, 4]


def test_a_disk_that_refuses_is_named(folder: Path) -> None:
    refusal = torch.load(folder / "trained grpo.pt")["refusal"]
    assert "Free the disk, or set learner.keep_batches to 0" in refusal


def test_command_starts_as_many_ranks_as_the_run_had(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, found = replayed([str(folder / "two ranks"), "3"], capfd)
    assert (status, found["is_equal"], found["has_served_weights"]) == (0, True, True)
    recorded = torch.load(folder / "two ranks.pt")[3]["recorded"]
    assert found["figures"]["policy/grad_norm"]["replayed"] == recorded["policy/grad_norm"]


def test_command_shows_the_batch_under_another_loss(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    changes = ["--with", "learner.loss=gspo", "--with", "kl.coefficient=0.5"]
    status, found = replayed([str(run), "3", *changes], capfd)
    assert (status, found["is_equal"]) == (0, True)
    loss = found["figures"]["policy/loss"]
    assert loss["replayed"] == loss["recorded"] != loss["changed"]
    assert found["figures"]["policy/kl_reference"]["replayed"] is None
    assert found["figures"]["policy/kl_reference"]["changed"] > 0.0


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("raise KeyError('mask')", "replay, rank 0: failed: KeyError: 'mask' ({own}:4)"),
        ("os._exit(3)", "replay: its ranks ended without a result"),
    ],
)
def test_loss_that_fails_is_named_in_a_sentence(
    line: str, sentence: str, run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.py"
    body = f"    if len(logprobs) > 3:\n        {line}\n    return advantages * (old - logprobs), logprobs > 0\n"
    own.write_text(f"import os\ndef failing(logprobs, old, advantages, counts, clip):\n{body}")
    assert run_verb(["replay", str(run), "3", "--with", f"learner.loss={own}:failing"]) == 1
    assert capfd.readouterr().err.splitlines()[-1].startswith(sentence.format(own=own))


def test_the_checkpoint_is_enough_on_another_machine(
    run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    moved = (folder / "model").rename(folder / "moved")
    try:
        status, found = replayed([str(run), "2"], capfd)
    finally:
        moved.rename(folder / "model")
    assert (status, found["is_equal"]) == (0, True)


@pytest.mark.parametrize("change", ["kl.coefficient=0.5", "learner.recipe=ppo"])
def test_a_reference_or_critic_from_another_model_than_the_runs_first_is_refused(
    change: str, run: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    moved = (folder / "model").rename(folder / "moved")
    try:
        assert run_verb(["replay", str(run), "3", "--with", change]) == 2
        assert f"settings: policy.model = {folder / 'model'} is not a folder" in capfd.readouterr().err
    finally:
        moved.rename(folder / "model")
    (run / "models.json").write_text('{"policy.model, its weights": "another"}')
    assert run_verb(["replay", str(run), "3", "--with", change]) == 1
    assert "has other weights now than the run began with" in capfd.readouterr().err
    assert replayed([str(run), "3"], capfd)[0] == 0  # from the checkpoint alone
    (run / "models.json").write_text(json.dumps({"policy.model, its weights": weights_digest(folder / "model")}))
    assert replayed([str(run), "3", "--with", change], capfd)[0] == 0


def test_a_changed_byte_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("rank_0", "outcome"):
        file = run / "batches" / "step_000003" / name
        whole = file.read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 1):
            changed = bytearray(whole)
            changed[place] ^= 1
            file.write_bytes(changed)
            assert run_verb(["replay", str(run), "3"]) == 1
            assert "was changed after it was written" in capsys.readouterr().err
        file.write_bytes(whole)


def test_a_missing_step_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["replay", str(run), "9"]) == 1
    assert "has no kept step 9: it has steps 1 to 4" in capsys.readouterr().err
    shutil.rmtree(run / "batches" / "step_000002")
    assert run_verb(["replay", str(run), "3"]) == 1
    assert "step_000001 is the newest valid checkpoint before it, and step 2 was not kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("learner.loss", "--with learner.loss has no value"),
        ("learner.loss=ppo", "--with changes nothing"),
        ("learner.loss=pppo", "settings: learner.loss = 'pppo' is wrong"),
        ("learner.num_mini_batches=2", "learner.num_mini_batches=2 does not change the loss of a batch"),
        ("learner.lss=ppo", "learner.lss"),
    ],
)
def test_a_change_that_cannot_be_shown_is_refused(
    run: Path, change: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_verb(["replay", str(run), "3", "--with", change]) == 2
    assert sentence in capsys.readouterr().err


def test_a_kl_term_can_be_shown_of_a_run_that_skips_equal_groups(tmp_path: Path) -> None:
    given = tmp_path / "given.yaml"
    given.write_text("learner: {equal_groups: skip}\n")
    with pytest.raises(SettingsError, match=r"equal_groups = skip .* Set it to keep"):
        command._change_settings(given, ["kl.coefficient=0.01"])
    changed, _ = command._change_settings(given, ["kl.coefficient=0.01", "learner.equal_groups=keep"])
    assert (changed.kl.coefficient, changed.learner.equal_groups) == (0.01, "keep")


@pytest.mark.parametrize("replayed", [-1.2345678901234567e-05, -1.2345678901234569e-05])
@pytest.mark.parametrize("differences", [{}, {"learner.loss": "gspo"}])
def test_table_has_every_digit_in_80_columns(
    replayed: float, differences: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    recorded, changed = -1.2345678901234567e-05, -9.876543210987654e-05
    figure = Figure("policy/effective_sample_share", recorded, replayed, changed if differences else None)
    show([figure], differences)
    lines = capsys.readouterr().out.splitlines()
    row = lines[1].split()
    values = [replayed, changed] if differences else [recorded, replayed]
    if differences and replayed != recorded:
        values.insert(0, recorded)
    assert row == [figure.name, *map(repr, values)]
    if replayed == recorded:
        assert max(map(len, lines)) <= 80
