"""What a proof says when something other than the checkpoint is wrong: nothing is shown against it."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from learner.checkpoint.proof import Proof
from learner.models.settings import policy_settings
from learner.rank.proof import models
from learner.rank.proof import verdict as verdict_file
from learner.rank.proof.process import ProofProcess, prove_in_a_process
from learner.rank.proof.refused import NotProvableError, RefusedError
from learner.rank.proof.request import ProofRequest, make_request
from learner.rank.proof.verdict import verdict
from protocol.settings.settings import Settings
from tests.fakes.waiting import wait_until
from tests.learner.checkpoint.test_verdicts import save
from tests.learner.rank.proof.test_proofs import told_of

_LIMIT_S = 240.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def request_of(root: Path, model: Path) -> ProofRequest:
    return make_request(save(root / "checkpoints", 2), model, Settings(), told_of(2))


def what(proof: Proof | None) -> tuple[str, str] | None:
    return None if proof is None else (proof.verdict, proof.problem)


class Started:
    """Takes subprocess.Popen's place, and notes what it started."""

    def __init__(self, then: signal.Signals | None = None, command: list[str] | None = None) -> None:
        """then: what each process gets at once. command: in place of the given one."""
        self._command = command
        self.processes: list[subprocess.Popen[bytes]] = []
        self._start = subprocess.Popen
        self._then = then

    def __call__(self, command: list[str], **kwargs: Any) -> "subprocess.Popen[bytes]":
        process = self._start(self._command or command, **kwargs)
        if self._then is not None:
            process.send_signal(self._then)
        self.processes.append(process)
        return process


# The process that proves, whose copies do one of these after the other in place of a proof; it imports no torch.
_JUDGE = """
import os, sys, time, types
from pathlib import Path

def verdict(request):
    begun = Path(request.model) / "begun"
    begun.mkdir(exist_ok=True)
    kind = sys.argv[1 + len(os.listdir(begun))]
    (begun / kind).touch()
    if kind == "wait":
        (Path(request.model) / "waiting").write_text(str(os.getpid()))
        (Path(request.model) / "waiting").rename(Path(request.model) / "waits")
        while not (Path(request.model) / "go").exists():
            time.sleep(0.01)
    elif kind == "kill":
        os.kill(os.getpid(), 9)
    elif kind == "end":
        os._exit(3)
    elif kind == "no memory":
        raise MemoryError("9 GiB")
    return Proof(verdict="proven", step=request.told.step)

stand_in = types.ModuleType("learner.rank.proof.verdict")
stand_in.verdict = verdict
sys.modules["learner.rank.proof.verdict"] = stand_in
from learner.checkpoint.proof import Proof
from learner.rank.proof import __main__ as process
process._import_models = lambda: None
process.main()
"""


def judge(*kinds: str) -> list[str]:
    return [sys.executable, "-c", _JUDGE, *kinds]


def _oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def test_what_a_terminal_or_a_job_sends_to_all_its_processes_does_not_end_a_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is short, its process goes before the rank."""
    started = Started(command=judge("wait"))
    monkeypatch.setattr(subprocess, "Popen", started)
    sent: set[int] = set()

    def is_given_up() -> bool:
        group = started.processes[0].pid
        if not sent and (tmp_path / "waits").exists():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.killpg(group, number)
            sent.add(_oom_score(group))
            (tmp_path / "go").touch()
        return False

    with closing(ProofProcess()) as asked:
        proof = asked.prove(request_of(tmp_path, tmp_path), _LIMIT_S, is_given_up, lambda: False)
    assert what(proof) == ("proven", "")
    assert sent == {1000}
    assert os.getpgid(0) != started.processes[0].pid


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("kill", "its process was ended by SIGKILL, as for a lack of memory"),
        ("no memory", "its process failed: MemoryError: 9 GiB"),
        ("end", "its process ended with status 3"),
    ],
)
def test_a_copy_that_ends_without_a_verdict_shows_nothing_and_the_next_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, problem: str
) -> None:
    started = Started(command=judge(kind, "prove"))
    monkeypatch.setattr(subprocess, "Popen", started)
    request = request_of(tmp_path, tmp_path)
    with closing(ProofProcess()) as asked:
        found = [asked.prove(request, _LIMIT_S, lambda: False, lambda: True) for _ in range(2)]
    assert [what(proof) for proof in found] == [("not made", problem), ("proven", "")]
    (process,) = started.processes
    assert process.poll() is not None


def test_the_process_ends_with_whoever_asked_it_and_so_does_its_copy(tmp_path: Path) -> None:
    request = msgspec.json.encode(request_of(tmp_path, tmp_path)) + b"\n"
    process = subprocess.Popen(judge("wait"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(request)
    process.stdin.flush()
    wait_until((tmp_path / "waits").exists)
    process.stdin.close()
    assert process.wait(_LIMIT_S) == 0
    process.stdout.close()
    wait_until(lambda: not _is_there(int((tmp_path / "waits").read_text())))


def _is_there(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_a_process_that_has_ended_since_is_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that answers once, and ends."""
    once = "import sys; sys.stdin.readline(); print(sys.argv[1], flush=True)"
    said = msgspec.json.encode(Proof(verdict="proven", step=2)).decode()
    started = Started(command=[sys.executable, "-c", once, said])
    monkeypatch.setattr(subprocess, "Popen", started)
    request = request_of(tmp_path, tmp_path)
    with closing(ProofProcess()) as asked:
        for number in (1, 2):
            proof = asked.prove(request, _LIMIT_S, lambda: False, lambda: True)
            assert what(proof) == ("proven", "")
            assert len(started.processes) == number
            wait_until(lambda: started.processes[-1].poll() is not None)


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (signal.SIGKILL, "its process was ended by SIGKILL, as for a lack of memory"),
        (signal.SIGBUS, "its process was ended by SIGBUS"),
    ],
)
def test_a_process_that_a_signal_ends_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, problem: str
) -> None:
    monkeypatch.setattr(subprocess, "Popen", Started(then=number))
    assert what(prove_in_a_process(request_of(tmp_path, tmp_path), _LIMIT_S)) == ("not made", problem)


def test_a_file_that_cannot_be_opened_is_not_taken_for_one_that_is_missing(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(tmp_path, model)
    opened = Path.open

    def none_left(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "weights":
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", none_left)
    where = Path(request.folder) / "weights"
    assert what(verdict(request)) == ("not made", f"{where} cannot be opened: Too many open files in system")


def test_a_folder_that_is_moved_while_it_is_proven_is_not_refused(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(tmp_path, model)
    folder = Path(request.folder)

    def move(*_: object) -> float:
        folder.rename(tmp_path / "elsewhere")
        raise RefusedError("it cannot be read as a resume would: no such file")

    monkeypatch.setattr(verdict_file, "prove", move)
    assert what(verdict(request)) == ("not made", f"{folder} is gone, or other files took its place")


def test_a_model_beside_the_checkpoint_that_cannot_be_loaded_is_not_held_against_it(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("Unrecognized model.\nShould have a model_type")

    monkeypatch.setattr(models, "load_model", fail)
    monkeypatch.setattr(models, "load_value_model", fail)
    settings = policy_settings(Settings(), model)
    for check in (models.check_policy, models.check_critic):
        with pytest.raises(NotProvableError) as found:
            check(save(tmp_path / "checkpoints", 2), told_of(2), settings)
        assert str(found.value) == (
            f"the model in {model}, which the run began with, cannot be loaded: Unrecognized model. Should have a "
            "model_type"
        )
