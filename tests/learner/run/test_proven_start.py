"""Which checkpoint a start takes by what is proven."""

from pathlib import Path

import pytest

from learner.checkpoint.folder import begin, commit, open_checkpoint
from learner.checkpoint.manifest import Checkpoint
from learner.checkpoint.proof import Proof, Verdict, is_proven, manifest_hash, write_proof
from learner.checkpoint.told import Told, write_told
from learner.run import proven_start as proven_start_file
from learner.run.proven_start import proven_start
from learner.run.start import RunStart
from protocol.errors import OperatorError
from tests.learner.rank.proof.test_proofs import told_of


def save(folder: Path, step: int, *, has_told: bool = True) -> Checkpoint:
    aside = begin(folder / "checkpoints", step)
    (aside / "weights").write_text(f"weights of step {step}")
    if has_told:
        write_told(aside, told_of(step))
    return commit(aside, Checkpoint(aside, step, step, "run", "model"), is_proven_later=True)


class Start:
    """A start with a judge that knows each step's verdict."""

    def __init__(self, verdicts: dict[int, Verdict]) -> None:
        self.asked: list[int] = []
        self.said: list[str] = []
        self._verdicts = verdicts

    def from_(self, start: RunStart) -> RunStart:
        return proven_start(start, self._prove, lambda: False, self.said.append, self.said.append)

    def _prove(self, path: Path, told: Told, *_: object) -> Proof | None:
        self.asked.append(told.step)
        verdict = self._verdicts[told.step]
        return Proof(verdict=verdict, problem="so", step=told.step, manifest=manifest_hash(path))


def test_an_unproven_checkpoint_is_proven_before_the_run_goes_on_from_it(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 2)
    start = Start({2: "proven"})
    assert start.from_(RunStart(tmp_path, checkpoint)).step == 2
    assert is_proven(checkpoint.path)
    assert start.said == ["proving the checkpoint of step 2"]
    assert start.from_(RunStart(tmp_path, checkpoint)).step == 2
    assert start.asked == [2]


def test_a_start_takes_the_newest_checkpoint_that_is_not_refused(tmp_path: Path) -> None:
    save(tmp_path, 2)
    newest = save(tmp_path, 4)
    start = Start({4: "refused", 2: "proven"})
    assert start.from_(RunStart(tmp_path, newest, seen=("kept",))).seen == ("kept",)
    assert start.asked == [4, 2]
    assert "The checkpoint of step 4 is refused: so." in start.said[1]
    assert start.said[1].endswith("The run starts from step 2.")
    assert [path.name for path in sorted((tmp_path / "checkpoints").glob("*step*"))] == [
        "refused_step_000004",
        "step_000002",
    ]


def test_a_run_whose_only_checkpoint_is_refused_starts_from_step_0(tmp_path: Path) -> None:
    start = Start({2: "refused"})
    assert start.from_(RunStart(tmp_path, save(tmp_path, 2))).checkpoint is None


def test_a_checkpoint_of_a_version_that_told_nothing_is_taken_as_it_is(tmp_path: Path) -> None:
    start = Start({})
    assert start.from_(RunStart(tmp_path, save(tmp_path, 2, has_told=False))).step == 2
    assert start.asked == []


def test_a_checkpoint_whose_proof_cannot_be_made_is_taken_and_the_start_says_so(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 2)
    start = Start({2: "not made"})
    assert start.from_(RunStart(tmp_path, checkpoint)).step == 2
    assert "could not be proven: so." in start.said[1]
    assert start.said[1].endswith("The run goes on from it.")
    start.from_(RunStart(tmp_path, checkpoint))
    assert start.asked == [2, 2]


def test_a_refused_checkpoint_that_the_operator_brought_from_elsewhere_ends_the_start(tmp_path: Path) -> None:
    elsewhere = save(tmp_path / "elsewhere", 2)
    with pytest.raises(OperatorError, match=r"is refused: so\. Name another one by run\.resume"):
        Start({2: "refused"}).from_(RunStart(tmp_path / "run", elsewhere))
    assert elsewhere.path.is_dir()


def test_what_was_refused_before_is_refused_by_a_start_that_wants_no_proofs(tmp_path: Path) -> None:
    """The run died before the folder could be set aside."""
    good, bad = save(tmp_path, 2), save(tmp_path, 4)
    write_proof(bad.path, Proof(verdict="refused", problem="so", step=4, manifest=manifest_hash(bad.path)))
    said: list[str] = []
    start = proven_start(RunStart(tmp_path, bad), None, lambda: False, said.append, said.append)
    assert start.checkpoint is not None
    assert start.checkpoint.path == good.path
    assert len(said) == 1
    assert said[0].endswith("The run starts from step 2.")
    assert not is_proven(good.path)


@pytest.mark.parametrize(("verdict", "is_taken"), [("proven", True), ("not made", True), ("refused", False)])
def test_a_folder_that_was_set_aside_and_that_the_operator_names_keeps_its_name(
    tmp_path: Path, verdict: Verdict, is_taken: bool
) -> None:
    path = save(tmp_path, 2).path
    aside = path.rename(path.with_name("set_aside_step_000002"))
    start, named = Start({2: verdict}), RunStart(tmp_path, open_checkpoint(aside))
    if is_taken:
        assert start.from_(named) == named
    else:
        with pytest.raises(OperatorError, match=r"is refused: so\. Name another one by run\.resume"):
            start.from_(named)
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["set_aside_step_000002"]


def test_a_verdict_that_cannot_be_written_ends_the_start_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(proven_start_file, "settle", full)
    checkpoint = save(tmp_path, 2)
    with pytest.raises(OperatorError) as refused:
        Start({2: "proven"}).from_(RunStart(tmp_path, checkpoint))
    assert str(refused.value) == (
        f"The verdict on the checkpoint {checkpoint.path} cannot be written: No space left on device. Free the disk, "
        "or make the folder writable, then run the same command again."
    )


def test_told_that_cannot_be_read_refuses_the_checkpoint(tmp_path: Path) -> None:
    aside = begin(tmp_path / "checkpoints", 2)
    (aside / "told.json").write_text("{}")
    checkpoint = commit(aside, Checkpoint(aside, 2, 2, "run", "model"), is_proven_later=True)
    assert Start({}).from_(RunStart(tmp_path, checkpoint)).checkpoint is None
