"""The status of a run."""

from collections.abc import Mapping

import msgspec


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
