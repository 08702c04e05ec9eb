"""Places where a process can be made to die, for tests of what a death there leaves behind.

`failpoint(NAME)` stands at every point of saving, committing, restoring and pushing where a death matters. It does
nothing unless SLUICE_FAILPOINT was set when the process started (`tests/chaos/crash_points.py` and
`tests/learner/checkpoint/test_crash_points.py` set it); set for `python -m learner.run`, it holds in the run's
coordinator and learner ranks as well:

    SLUICE_FAILPOINT=checkpoint.commit.renamed:kill      SIGKILL at the first pass
    SLUICE_FAILPOINT=ledger.commit.after:kill@40         SIGKILL at the 40th pass
    SLUICE_FAILPOINT=...:raise@2 or ...:stop@2           FailpointError, or SIGSTOP, at the 2nd pass
    SLUICE_FAILPOINT=...:stop@every                      SIGSTOP at each pass: somebody lets the process go on
"""

import functools
import os
import signal
import threading

VARIABLE = "SLUICE_FAILPOINT"

_EVERY = "every"
# In the order in which a checkpoint passes them; then a start from one, the books of a step, a weight push, and the
# turns on a shared device.
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


class FailpointError(RuntimeError):
    """What a failpoint told to `raise` raises."""


class _Armed:
    """The one failpoint of this process that is set, and at which pass it acts."""

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
            raise ValueError(f"{VARIABLE} = {setting}: {number!r} is no number of a pass, counted from 1.")
        self._left = 1 if self._is_repeated else int(number or 1)
        self._lock = threading.Lock()

    def passed(self, name: str) -> None:
        if name not in FAILPOINTS:
            raise ValueError(f"failpoint({name!r}) is not in {__name__}.FAILPOINTS.")
        if name != self._name:
            return
        with self._lock:
            self._left -= 1
            is_due = self._left == 0
        if is_due or self._is_repeated:
            self._act()

    def _act(self) -> None:
        if self._action == "raise":
            raise FailpointError(f"failpoint {self._name}")
        os.kill(os.getpid(), signal.SIGKILL if self._action == "kill" else signal.SIGSTOP)


@functools.cache
def _armed() -> _Armed | None:
    """Return what the variable says when a failpoint is first passed: a learner rank is told it after its imports."""
    return _Armed(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


def failpoint(name: str) -> None:
    """Do what SLUICE_FAILPOINT says of this name; nothing when it is not set.

    Raises: FailpointError when told to; ValueError for a name that is not in FAILPOINTS, while any is set.
    """
    if (armed := _armed()) is not None:
        armed.passed(name)
