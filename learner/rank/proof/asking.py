"""How a run has a checkpoint proven in a fresh process. Imports no torch."""

from collections.abc import Callable
from pathlib import Path

from learner.checkpoint.proof import Proof
from learner.checkpoint.told import Told
from learner.rank.proof.process import ProofProcess, prove_in_a_process
from learner.rank.proof.proofs import Prove
from learner.rank.proof.request import make_request
from protocol.settings.settings import Settings


def asking_a_process(model: Path, settings: Settings, process: ProofProcess | None = None) -> Prove:
    """Return what proves one checkpoint of a run.

    model: the folder that its policy was first loaded from. process: that is asked; None: each proof has its own.
    """

    def prove(path: Path, told: Told, is_given_up: Callable[[], bool], is_awaited: Callable[[], bool]) -> Proof | None:
        request = make_request(path, model, settings, told)
        ask = prove_in_a_process if process is None else process.prove
        return ask(request, settings.learner.proof_timeout_s, is_given_up, is_awaited)

    return prove
