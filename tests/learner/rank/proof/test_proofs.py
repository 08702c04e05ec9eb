"""The queue of proofs beside the training, with a proof that the test itself decides."""

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from learner.checkpoint.folder import point_latest, rotate
from learner.checkpoint.proof import Proof, Verdict, is_proven, manifest_hash
from learner.checkpoint.told import Told
from learner.rank.proof.process import prove_in_a_process
from learner.rank.proof.proofs import Proofs
from learner.rank.proof.request import make_request
from protocol.settings.settings import Settings
from tests.learner.checkpoint.test_verdicts import latest, save

_LIMIT_S = 60.0


def told_of(step: int) -> Told:
    return Told(run_id="run", step=step, policy_version=step, pushed="", texts=[], models={}, random=[])


class Judge:
    """Proves when it is told to."""

    def __init__(self, verdict: Verdict = "proven") -> None:
        self.asked: list[int] = []
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        self._verdict = verdict

    def __call__(
        self, path: Path, told: Told, is_given_up: Callable[[], bool], is_awaited: Callable[[], bool]
    ) -> Proof | None:
        self.asked.append(told.step)
        self.has_begun.set()
        while not self.may_end.wait(0.01):
            if is_given_up():
                return None
        return Proof(verdict=self._verdict, problem="no", step=told.step, manifest=manifest_hash(path))


def test_latest_moves_when_the_proof_ends_and_nobody_waits_meanwhile(tmp_path: Path) -> None:
    judge = Judge()
    proofs = Proofs(tmp_path, judge)
    path = save(tmp_path, 2)
    proofs.add(path, told_of(2))
    assert judge.has_begun.wait(_LIMIT_S)
    assert latest(tmp_path) is None
    assert proofs.needed_steps() == {2}
    judge.may_end.set()
    proofs.finish(lambda phase: None)
    assert latest(tmp_path) == "step_000002"
    assert is_proven(path)
    assert proofs.problem == ""


def test_of_checkpoints_that_wait_the_newest_is_proven_and_all_that_is_needed_stays(tmp_path: Path) -> None:
    judge = Judge()
    proofs = Proofs(tmp_path, judge)
    proofs.add(save(tmp_path, 1), told_of(1))
    assert judge.has_begun.wait(_LIMIT_S)
    proofs.add(save(tmp_path, 2), told_of(2))
    proofs.add(save(tmp_path, 3), told_of(3))
    assert proofs.needed_steps() == {1, 3}
    judge.may_end.set()
    proofs.finish(lambda phase: None)
    assert judge.asked == [1, 3]
    assert proofs.needed_steps() == {3}
    assert latest(tmp_path) == "step_000003"


def test_what_latest_names_stays_until_another_is_proven(tmp_path: Path) -> None:
    """As in a run that proves its checkpoints from now on: `latest` moved to the one before without a proof."""
    proofs = Proofs(tmp_path, Judge("not made"))
    point_latest(tmp_path, save(tmp_path, 2))
    assert proofs.needed_steps() == {2}
    for step in (4, 6):
        save(tmp_path, step)
        rotate(tmp_path, 1, protected=proofs.needed_steps())
    assert (tmp_path / "latest").is_dir()
    assert latest(tmp_path) == "step_000002"


def test_latest_that_somebody_linked_elsewhere_is_in_nobodys_way(tmp_path: Path) -> None:
    judge = Judge()
    judge.may_end.set()
    proofs = Proofs(tmp_path, judge)
    (tmp_path / "latest").symlink_to("best")
    assert proofs.needed_steps() == set()
    proofs.add(save(tmp_path, 2), told_of(2))
    proofs.finish(lambda phase: None)
    assert (proofs.problem, latest(tmp_path)) == ("", "step_000002")


def test_a_refused_checkpoint_is_told_of(tmp_path: Path) -> None:
    judge = Judge("refused")
    judge.may_end.set()
    proofs = Proofs(tmp_path, judge)
    proofs.add(save(tmp_path, 2), told_of(2))
    proofs.finish(lambda phase: None)
    assert proofs.problem.startswith("The checkpoint of step 2 is refused: no. It is kept as ")
    assert latest(tmp_path) is None


def test_a_proof_that_fails_leaves_the_checkpoint_and_the_training_alone(tmp_path: Path) -> None:
    def fail(path: Path, told: Told, *_: object) -> Proof | None:
        raise OSError("no more processes")

    proofs = Proofs(tmp_path, fail)
    path = save(tmp_path, 2)
    proofs.add(path, told_of(2))
    proofs.finish(lambda phase: None)
    assert proofs.problem == "The checkpoint of step 2 could not be proven: no more processes."
    assert path.is_dir()


def test_close_gives_up_the_proof_under_way(tmp_path: Path) -> None:
    judge = Judge()
    proofs = Proofs(tmp_path, judge)
    proofs.add(save(tmp_path, 2), told_of(2))
    assert judge.has_begun.wait(_LIMIT_S)
    proofs.close()
    assert latest(tmp_path) is None


def test_finish_tells_what_it_waits_for(tmp_path: Path) -> None:
    judge, told = Judge(), []

    def tell(phase: str) -> None:
        told.append(phase)
        judge.may_end.set()

    proofs = Proofs(tmp_path, judge)
    proofs.add(save(tmp_path, 2), told_of(2))
    assert judge.has_begun.wait(_LIMIT_S)
    proofs.finish(tell)
    assert told[0].startswith("proving the checkpoint of step 2 for ")


def test_a_process_that_stands_still_from_its_birth_has_the_same_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*args: Any, **kwargs: Any) -> "subprocess.Popen[bytes]":
        process = start(*args, **kwargs)
        os.kill(process.pid, signal.SIGSTOP)
        return process

    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", stopped)
    # As much as is told of a large model: more than a pipe takes.
    told = msgspec.structs.replace(told_of(2), texts=[[1] * 200_000])
    request = make_request(save(tmp_path, 2), tmp_path, Settings(), told)
    found: list[Proof | None] = []
    proving = threading.Thread(target=lambda: found.append(prove_in_a_process(request, 0.5)), daemon=True)
    proving.start()
    proving.join(_LIMIT_S)
    assert [None if proof is None else proof.verdict for proof in found] == ["not made"]


def test_a_process_that_cannot_be_started_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*args: Any, **kwargs: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", none_left)
    proof = prove_in_a_process(make_request(save(tmp_path, 2), tmp_path, Settings(), told_of(2)), _LIMIT_S)
    assert proof is not None
    assert (proof.verdict, proof.problem) == (
        "not made",
        "its process could not be started: Resource temporarily unavailable",
    )


def test_a_process_whose_words_find_no_room_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    proof = prove_in_a_process(make_request(save(tmp_path, 2), tmp_path, Settings(), told_of(2)), _LIMIT_S)
    assert proof is not None
    assert proof.problem == "its process could not be started: No space left on device"


@pytest.mark.parametrize(("limit_s", "is_given_up", "verdict"), [(0.0, False, "not made"), (_LIMIT_S, True, None)])
def test_a_process_has_a_limit_and_can_be_given_up(
    tmp_path: Path, limit_s: float, is_given_up: bool, verdict: str | None
) -> None:
    path = save(tmp_path, 2)
    request = make_request(path, tmp_path, Settings(), told_of(2))
    found = prove_in_a_process(request, limit_s, lambda: is_given_up)
    assert (None if found is None else found.verdict) == verdict
    if found is not None:
        assert found.problem == "it had no verdict within 0 s (learner.proof_timeout_s)"
        assert found.manifest == manifest_hash(path)
