"""What a verdict does to a checkpoint's folder."""

from pathlib import Path

import pytest

from learner.checkpoint.folder import begin, commit, newest_valid
from learner.checkpoint.manifest import Checkpoint, CorruptCheckpointError, verify
from learner.checkpoint.proof import Proof, Verdict, is_proven, manifest_hash, read_proof, write_proof
from learner.checkpoint.verdicts import complaints, newest_proven, settle


def save(root: Path, step: int, content: str = "weights") -> Path:
    """Return the folder of a checkpoint that is not proven yet."""
    aside = begin(root, step)
    (aside / "weights").write_text(f"{content} of step {step}")
    return commit(aside, Checkpoint(aside, step, step, "run", "model"), is_proven_later=True).path


def proof_of(path: Path, verdict: Verdict, problem: str = "") -> Proof:
    return Proof(verdict=verdict, problem=problem, step=int(path.name[-6:]), manifest=manifest_hash(path))


def latest(root: Path) -> str | None:
    return str((root / "latest").readlink()) if (root / "latest").is_symlink() else None


def test_latest_stays_until_a_checkpoint_is_proven(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    assert latest(tmp_path) is None
    settle(tmp_path, path, proof_of(path, "proven"))
    assert latest(tmp_path) == "step_000002"
    save(tmp_path, 4)
    assert latest(tmp_path) == "step_000002"
    assert newest_proven(tmp_path) == path


def test_a_proven_checkpoint_still_verifies(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    settle(tmp_path, path, proof_of(path, "proven"))
    assert verify(path).step == 2
    (path / "another").write_text("surplus")
    with pytest.raises(CorruptCheckpointError, match="another is not in the manifest"):
        verify(path)


def test_latest_never_goes_back_to_an_older_one_that_was_proven_later(tmp_path: Path) -> None:
    old, new = save(tmp_path, 2), save(tmp_path, 4)
    settle(tmp_path, new, proof_of(new, "proven"))
    settle(tmp_path, old, proof_of(old, "proven"))
    assert latest(tmp_path) == "step_000004"


def test_a_refused_checkpoint_loses_its_name_and_the_one_before_it_is_latest(tmp_path: Path) -> None:
    good, bad = save(tmp_path, 2), save(tmp_path, 4)
    settle(tmp_path, good, proof_of(good, "proven"))
    where = settle(tmp_path, bad, proof_of(bad, "refused", "its weights are another's"))
    assert where == tmp_path / "refused_step_000004"
    assert latest(tmp_path) == "step_000002"
    found = newest_valid(tmp_path)
    assert found is not None
    assert found.step == 2
    assert [*complaints(tmp_path).values()] == [
        f"The checkpoint of step 4 is refused: its weights are another's. It is kept as {where}, for nobody to go on "
        "from; the checkpoints before it are as they were."
    ]


def test_of_refused_checkpoints_the_newest_is_kept(tmp_path: Path) -> None:
    for step in (2, 4):
        path = save(tmp_path, step)
        settle(tmp_path, path, proof_of(path, "refused"))
    assert [path.name for path in tmp_path.glob("refused_*")] == ["refused_step_000004"]


def test_best_never_names_a_refused_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    (tmp_path / "best").symlink_to(path.name)
    settle(tmp_path, path, proof_of(path, "refused"))
    assert not (tmp_path / "best").is_symlink()


def test_a_checkpoint_whose_proof_was_not_made_stays_and_is_not_latest(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    settle(tmp_path, path, proof_of(path, "not made", "no memory"))
    assert latest(tmp_path) is None
    assert path.is_dir()
    (said,) = complaints(tmp_path).values()
    assert said.startswith("The checkpoint of step 2 could not be proven: no memory. Nothing is shown against it")


def test_a_verdict_on_files_that_were_replaced_meanwhile_does_nothing(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    old = proof_of(path, "refused")
    save(tmp_path, 2, "other weights")
    assert settle(tmp_path, path, old) == path
    assert read_proof(path) is None
    assert path.is_dir()


def test_a_proof_is_of_its_own_manifest_alone(tmp_path: Path) -> None:
    one, other = save(tmp_path, 2), save(tmp_path, 4)
    write_proof(one, proof_of(one, "proven"))
    (other / "PROOF.json").write_bytes((one / "PROOF.json").read_bytes())
    assert is_proven(one)
    assert not is_proven(other)


@pytest.mark.parametrize("content", [b"", b"null", b'{"verdict": "fine"}'])
def test_a_proof_that_cannot_be_read_proves_nothing(tmp_path: Path, content: bytes) -> None:
    path = save(tmp_path, 2)
    (path / "PROOF.json").write_bytes(content)
    assert read_proof(path) is None
    assert verify(path).step == 2
