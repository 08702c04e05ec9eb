"""What a run is at, as one value: its coordinator publishes it, whatever shows the run reads it."""

from collections.abc import Mapping

import msgspec


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout server by its last heartbeat."""

    policy_version: int | None  # weights that it serves; None: not synced
    running: int  # requests inside its engine
    waiting: int  # samples in flight outside the engine: in the environment, or being scored
    generated_tokens: int  # since the run attached to it
    failures: Mapping[str, int]  # by boundary


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run."""

    step: int  # the last step that ended
    policy_version: int  # of the learner
    window_used: int  # groups that are leased, ready or assigned
    window_size: int  # groups that may be
    ready: int  # groups that wait for a step
    skipped: int  # prompts given up
    retried: int  # times that samples of a group went back to be leased again
    detail: str  # what the next step waits for
    evaluation: str | None  # prompts of it that are back, as 3/8; None: none is under way
    servers: Mapping[str, ServerStatus | None]  # by name; None before the first heartbeat
    gave_up: str | None = None  # why the run ends by a rule of its settings; None: it does not
    counts: Mapping[str, int]  # of what was refused, rejected, dropped or failed, by reason
    news: tuple[str, ...] = ()  # sentences for the operator, in order, of this start of the run
