"""Every message between coordinator, rollout servers and learner ranks.

A field may be added with a default; any other change raises SCHEMA_VERSION, and peers of another version are refused by
name. Arrays never travel in here: they are raw frames behind the header (see `protocol.wire.codec`).
"""

from typing import Annotated, Any, Literal

import msgspec

from protocol.wire.trajectory import Count, Name, TrajectoryFacts

# Not 3: one bit that flips would make it 1, the schema without a seal, and damage would be taken for an older peer.
SCHEMA_VERSION = 4

MAX_SAMPLES = 4096
MAX_GROUPS = 4096
_MAX_TRAJECTORIES = 1 << 20

Reason = Annotated[str, msgspec.Meta(max_length=2000)]
# What a data set's row may hold. Inside `Any`, `protocol.wire.header_shape` bounds depth and number of values.
_Key = Annotated[str, msgspec.Meta(max_length=1000)]
Text = Annotated[str, msgspec.Meta(max_length=1 << 20)]
Turns = Annotated[list[Annotated[dict[_Key, Any], msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=1024)]
Columns = Annotated[dict[_Key, Any], msgspec.Meta(max_length=1024)]

_SampleIndices = Annotated[list[Count], msgspec.Meta(max_length=MAX_SAMPLES)]
_TrajectoryIndices = Annotated[list[Count], msgspec.Meta(max_length=_MAX_TRAJECTORIES)]
_Metrics = Annotated[dict[Name, float], msgspec.Meta(max_length=1024)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """What every message carries: which run, and how many times its learner had started when it was written.

    request: a learner rank numbers its questions, and an answer carries its question's number; 0 elsewhere.
    """

    schema: int = SCHEMA_VERSION
    run_id: Name
    incarnation: Count
    request: Count = 0

    @property
    def num_buffers(self) -> int:
        """How many raw frames stand behind the header."""
        return 0


# -- rollout server to coordinator ------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """A server is here and holds this policy version (None: not synced yet). What it was leased before is lost."""

    server: Name
    policy_version: Count | None


class Demand(Message, frozen=True, kw_only=True, tag="demand"):
    """The server could take this many more groups now. Absolute, so that a repeated message changes nothing.

    heard_of_lease: the newest lease number that the coordinator told it. leases: the groups that it has here
    unfinished, each with its newest lease's attempt. A lease that it has heard of and does not name was lost.
    """

    num_groups: Count
    policy_version: Count | None
    heard_of_lease: Count
    leases: Annotated[dict[Name, Count], msgspec.Meta(max_length=MAX_GROUPS)]


class TrajectoryDone(Message, frozen=True, kw_only=True, tag="trajectory"):
    """A finished trajectory; its three arrays are the frames behind the header."""

    facts: TrajectoryFacts

    @property
    def num_buffers(self) -> int:
        return 3


class SampleFailed(Message, frozen=True, kw_only=True, tag="failed"):
    """A neighbour failed for good while this sample was made: its part of the lease goes back.

    num_model_tokens: what the policy had written of it by then, in turns that ended. They will not be trained.
    """

    group: Name
    sample_index: Count
    attempt: Count
    boundary: Name
    detail: Reason
    num_model_tokens: Count = 0


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """What the server is doing. Sent about once a second."""

    policy_version: Count | None
    num_groups: Count
    num_running: Count
    num_waiting: Count
    generated_tokens: Count
    failures: Annotated[dict[Name, Count], msgspec.Meta(max_length=256)]


# -- coordinator to rollout server ------------------------------------------------------------------------------------


class Lease(Message, frozen=True, kw_only=True, tag="lease"):
    """Make these samples of this prompt. `prompt` is text or chat messages. number: counts the coordinator's leases."""

    number: Count
    group: Name
    attempt: Count
    kind: Literal["train", "eval"]
    prompt: Text | Turns
    label: Any
    columns: Columns
    sample_indices: Annotated[list[Count], msgspec.Meta(min_length=1, max_length=MAX_SAMPLES)]
    greedy_indices: _SampleIndices
    seed: Count


class Ack(Message, frozen=True, kw_only=True, tag="ack"):
    """A trajectory or failure arrived and what became of it."""

    group: Name
    sample_index: Count
    outcome: Literal["accepted", "duplicate", "unknown", "rejected", "returned"]
    detail: Reason = ""


class Trained(Message, frozen=True, kw_only=True, tag="trained"):
    """These groups are inside an optimizer step: their trajectories need not be kept any longer."""

    groups: Annotated[list[Name], msgspec.Meta(max_length=MAX_GROUPS)]


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """The sender's message was not used. reason: the FrameError's ("checksum": send it again), or "incarnation"."""

    detail: Reason
    reason: Name = "incarnation"


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """Sent every second: which lease was the last for this server. That it can be sent shows a live connection."""

    newest_lease: Count


# -- learner rank to coordinator --------------------------------------------------------------------------------------


class NextBatch(Message, frozen=True, kw_only=True, tag="next"):
    """Rank asks for its share of a step. Asked again after a lost answer, it gets the same share."""

    step: Count
    rank: Count


class Stepped(Message, frozen=True, kw_only=True, tag="stepped"):
    """Rank 0: the step ended and the servers hold `policy_version`. Not applied: nothing was trained by it."""

    step: Count
    policy_version: Count
    is_applied: bool
    detail: Reason
    metrics: _Metrics


class SaveLedger(Message, frozen=True, kw_only=True, tag="save_ledger"):
    """Rank 0: write a snapshot of the ledger into a checkpoint that is being made."""

    path: Annotated[str, msgspec.Meta(max_length=4096)]
    step: Count


# -- coordinator to learner rank --------------------------------------------------------------------------------------


class Batch(Message, frozen=True, kw_only=True, tag="batch"):
    """One rank's share of a step.

    facts: of every trajectory of the step. groups: the indices that form each group. planned: the
    indices that take part in the loss, on any rank. micro_batches: this rank's indices. Behind the header come three
    frames for each of this rank's trajectories, in the order of micro_batches.
    """

    step: Count
    facts: Annotated[list[TrajectoryFacts], msgspec.Meta(max_length=_MAX_TRAJECTORIES)]
    groups: Annotated[list[_SampleIndices], msgspec.Meta(max_length=_MAX_TRAJECTORIES)]
    planned: _TrajectoryIndices
    micro_batches: Annotated[list[_TrajectoryIndices], msgspec.Meta(max_length=_MAX_TRAJECTORIES)]

    @property
    def num_buffers(self) -> int:
        return 3 * sum(len(part) for part in self.micro_batches)


class Wait(Message, frozen=True, kw_only=True, tag="wait"):
    """Not yet. The rank asks again; `detail` says what is missing, for its deadline's error."""

    detail: Reason


class PushAgain(Message, frozen=True, kw_only=True, tag="push_again"):
    """No server holds the weights that the step needs: every rank hears it, pushes them together, and asks again."""

    step: Count


class Ended(Message, frozen=True, kw_only=True, tag="ended"):
    """The run has no such step: every rank hears it for the same step, so that they leave together."""

    step: Count
    detail: Reason


class Done(Message, frozen=True, kw_only=True, tag="done"):
    """What rank 0 told was taken in."""

    detail: Reason = ""


ToCoordinator = Hello | Demand | TrajectoryDone | SampleFailed | Heartbeat | NextBatch | Stepped | SaveLedger
ToServer = Lease | Ack | Trained | Refused | Ping | Done
ToRank = Batch | Wait | PushAgain | Ended | Done | Refused
