"""Points where tests crash a process, to check the state that a crash leaves.

`failpoint(NAME)` is called at every point of saving, committing, restoring and pushing where a crash matters. It does
nothing unless SLUICE_FAILPOINT is set at the first call. `sluice run` passes the variable to the
coordinator and the learner ranks:

    SLUICE_FAILPOINT=checkpoint.commit.renamed:kill      SIGKILL at the first pass
    SLUICE_FAILPOINT=...:raise@2 or ...:stop@2           FailpointError, or SIGSTOP, at the 2nd pass
    SLUICE_FAILPOINT=...:stop@every                      SIGSTOP at each pass; the test continues the process
"""

import functools
import os
import signal
import threading

VARIABLE = "SLUICE_FAILPOINT"

# In the order of a checkpoint, a resume, a step's accounts, a weight push, a switch of a shared device.
FAILPOINTS: tuple[str, ...] = (
    "checkpoint.begin.before",
    "checkpoint.begin.leftovers_removed",
    "checkpoint.begin.made",
    "rank_checkpoint.after_state",
    "rank_checkpoint.after_model",
    "ledger.snapshot.begun",
    "ledger.snapshot.copied",
    "ledger.snapshot.after",
    "rank_checkpoint.after_ledger",
    "checkpoint.commit.begun",
    "checkpoint.commit.files_sealed",
    "checkpoint.commit.manifest_written",
    "checkpoint.commit.manifest_synced",
    "checkpoint.commit.folders_synced",
    "rank_checkpoint.read_back",
    "checkpoint.commit.latest_taken_off",
    "checkpoint.commit.displaced",
    "checkpoint.commit.renamed",
    "checkpoint.commit.root_synced",
    "checkpoint.commit.verified",
    "checkpoint.latest.linked_aside",
    "checkpoint.latest.replaced",
    "checkpoint.latest.synced",
    "checkpoint.commit.displaced_removed",
    "checkpoint.rotate.before_removal",
    "checkpoint.rotate.renamed",
    "checkpoint.rotate.after_removal",
    "rank_checkpoint.before_barrier",
    "run_folder.begun",
    "run_folder.newer_set_aside",
    "run_folder.ledger_copied_aside",
    "run_folder.old_log_removed",
    "run_folder.ledger_replaced",
    "run_folder.record_set_aside",
    "run_folder.record_cut",
    "run_folder.before_settings",
    "run_folder.after_settings",
    "rank_checkpoint.state_loaded",
    "ledger.incarnation.committed",
    "ledger.incarnation.replaced",
    "ledger.commit.before",
    "ledger.commit.after",
    "step_book.before_account",
    "step_book.after_account",
    "run_record.before_append",
    "run_record.after_append",
    "step_book.after_record",
    "weight_push.after_prepare",
    "weight_push.after_bucket",
    "weight_push.after_receive",
    "weight_push.after_commit",
    "device_turn.learn_begun",
    "device_turn.servers_asleep",
    "device_turn.models_restored",
    "device_turn.models_parked",
    "device_turn.servers_awake",
)
_EVERY = "every"


class FailpointError(RuntimeError):
    """The error of the action `raise`."""


def failpoint(name: str) -> None:
    """Act as SLUICE_FAILPOINT sets for this name.

    Raises: FailpointError for the action `raise`; ValueError for a name that is not in FAILPOINTS, if one is set.
    """
    if (active := _active()) is not None:
        active.pass_by(name)


class _ActiveFailpoint:
    """The process's failpoint, its action, and the pass at which it acts. Threads may share it."""

    def __init__(self, setting: str) -> None:
        self._name, _, action = setting.partition(":")
        self._action, _, number = action.partition("@")
        if self._name not in FAILPOINTS:
            raise ValueError(
                f"{VARIABLE} = {setting}: there is no failpoint {self._name!r}; see {__name__}.FAILPOINTS."
            )
        if self._action not in ("kill", "raise", "stop"):
            raise ValueError(
                f"{VARIABLE} = {setting}: {self._action!r} is not kill, raise or stop, with @NUMBER or not."
            )
        self._is_repeated = number == _EVERY
        if number and not self._is_repeated and not (number.isdecimal() and int(number)):
            raise ValueError(f"{VARIABLE} = {setting}: {number!r} is not the number of a pass, counted from 1.")
        self._num_left = 1 if self._is_repeated else int(number or 1)
        self._lock = threading.Lock()

    def pass_by(self, name: str) -> None:
        if name not in FAILPOINTS:
            raise ValueError(f"failpoint({name!r}) is not in {__name__}.FAILPOINTS.")
        if name != self._name:
            return
        with self._lock:
            self._num_left -= 1
            is_due = self._num_left == 0
        if is_due or self._is_repeated:
            self._act()

    def _act(self) -> None:
        if self._action == "raise":
            raise FailpointError(f"failpoint {self._name}")
        os.kill(os.getpid(), signal.SIGKILL if self._action == "kill" else signal.SIGSTOP)


@functools.cache
def _active() -> _ActiveFailpoint | None:
    """Return the environment's failpoint at the first call: a learner rank gets its environment after its imports."""
    return _ActiveFailpoint(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None
