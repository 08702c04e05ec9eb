"""The status of a run. Its command writes it into the run folder, where pages and Prometheus read it."""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

STATUS = "status.json"
_FRESH_S = 30.0  # the command writes twice a second


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout server's last heartbeat."""

    policy_version: int | None  # version of its weights; None: not synced
    running: int  # requests inside its engine
    waiting: int  # samples in the environment, or being scored
    generated_tokens: int  # tokens since its attachment


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run."""

    step: int  # last finished
    policy_version: int  # the learner's
    window_used: int  # groups leased, ready or assigned
    window_size: int  # limit of these
    ready: int  # groups waiting for a step
    detail: str  # description of the next step's wait
    evaluation: str | None  # finished prompts of the evaluation, as 3/8; None: none runs
    servers: Mapping[str, ServerStatus | None]  # status by name; None before the first heartbeat
    give_up_reason: str | None = None  # reason of a settings rule to end the run, if any
    counts: Mapping[str, int]  # events since this start, as in `Accounts.counts`
    notices: tuple[str, ...] = ()  # sentences for the operator since this start


def write_status(folder: Path, status: RunStatus) -> None:
    """Replace the folder's status; without a place on the disk the earlier one stays."""
    aside = folder / f".{STATUS}"
    with contextlib.suppress(OSError):  # it is for readers alone: the run goes on
        aside.write_bytes(msgspec.json.encode(status))
        aside.replace(folder / STATUS)


def read_status(folder: Path) -> RunStatus | None:
    """Return the status that the run's command wrote within 30 s; None without one."""
    path = folder / STATUS
    try:
        is_fresh = time.time() - path.stat().st_mtime < _FRESH_S
        return msgspec.json.decode(path.read_bytes(), type=RunStatus) if is_fresh else None
    except (OSError, msgspec.DecodeError):  # none, or that of another version
        return None
