"""The proofs of a run's checkpoints, one after the other beside the training; on rank 0."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from learner.checkpoint.folder import step_of
from learner.checkpoint.proof import Proof
from learner.checkpoint.sealed_files import Tell
from learner.checkpoint.told import Told
from learner.checkpoint.verdicts import complaint, latest_step, newest_proven, settle
from protocol.failpoints import failpoint

# (checkpoint's folder, what was told, whether to give up, whether all wait) -> verdict; None: it was given up
Prove = Callable[[Path, Told, Callable[[], bool], Callable[[], bool]], Proof | None]

_POLL_S = 0.1
_log = logging.getLogger(__name__)


class Proofs:
    """Of the checkpoints that wait, the newest is proven next; those before it stay unproven, until rotation.

    So checkpoints that come quicker than proofs hold nobody up. Whoever changes what lies in the folder holds `lock`.
    """

    def __init__(self, root: Path, prove: Prove) -> None:
        """root: the run's checkpoints."""
        self.lock = threading.RLock()
        self.problem = ""  # what people are told of the newest checkpoint that has a verdict; empty: it is proven
        self._root = root
        self._prove = prove
        self._waiting: tuple[Path, Told] | None = None
        self._under_proof: Path | None = None
        self._is_closed = self._is_awaited = False
        self._thread: threading.Thread | None = None

    def add(self, path: Path, told: Told) -> None:
        """Have this checkpoint proven; returns at once."""
        with self.lock:
            self._waiting = (path, told)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="proofs", daemon=True)
                self._thread.start()

    def needed_steps(self) -> set[int]:
        """Return the steps whose folders have to stay: what is under proof or waits for it, the newest proven, and what
        `latest` names: that one was never proven where the run has begun to prove its checkpoints since then."""
        with self.lock:
            waiting = None if self._waiting is None else self._waiting[0]
            needed = (waiting, self._under_proof, newest_proven(self._root))
            return {step_of(path) for path in needed if path is not None} | ({latest_step(self._root)} - {-1})

    def finish(self, tell: Tell) -> None:
        """Return when nothing waits for a proof. tell: takes what is waited for, and how long by now."""
        started = time.monotonic()
        self._is_awaited = True
        while (thread := self._thread) is not None:
            with self.lock:
                path = self._under_proof
            if path is not None:
                tell(f"proving the checkpoint of step {step_of(path)} for {time.monotonic() - started:.0f} s")
            thread.join(_POLL_S)
        self._is_awaited = False

    def close(self) -> None:
        """End the proof under way, if any; its checkpoint stays unproven."""
        self._is_closed = True
        self.finish(lambda phase: None)

    def _run(self) -> None:
        while True:
            with self.lock:
                if self._waiting is None or self._is_closed:
                    self._thread = self._waiting = None
                    return
                (path, told), self._waiting = self._waiting, None
                self._under_proof = path
            try:
                self._prove_one(path, told)
            except Exception as error:  # whatever it is, training goes on, and the checkpoint stays unproven
                self.problem = f"The checkpoint of step {told.step} could not be proven: {error}."
                _log.exception("checkpoint not proven  step=%d", told.step)
            with self.lock:
                self._under_proof = None

    def _prove_one(self, path: Path, told: Told) -> None:
        failpoint("proof.begun")
        proof = self._prove(path, told, lambda: self._is_closed, lambda: self._is_awaited)
        if proof is None:
            return
        with self.lock:
            path = settle(self._root, path, proof)
        if proof.verdict == "proven":
            self.problem = ""
            _log.info(
                "checkpoint proven  step=%d loss=%.6g seconds=%.1f cpu_s=%.1f peak_mib=%d",
                told.step, proof.loss, proof.seconds, proof.cpu_s, proof.peak_mib,
            )  # fmt: skip
        else:
            self.problem = complaint(proof, path)
            _log.error("checkpoint %s  step=%d why=%r", proof.verdict, told.step, proof.problem)
