"""Every message between coordinator, rollout servers and learner ranks.

A field may be added with a default. Any other change raises SCHEMA_VERSION. Arrays are raw frames after the header.
A field without a comment is named for its content, or means the same as in an earlier message or a Lease.
"""

from typing import Annotated, Any, Literal

import msgspec

from protocol.wire.conversation import ConversationPart
from protocol.wire.trajectory import Count, Name, TrajectoryFacts

# Never one bit from 1, the schema without a seal (0, 3, 5, 9 ...): damage would look like an older peer.
SCHEMA_VERSION = 7

MAX_SAMPLES = 4096
MAX_GROUPS = 4096
MAX_MINI_BATCHES = 1 << 16
MAX_PARTS = 32
MAX_TOKEN_COUNTS = 1024
_MAX_TRAJECTORIES = 1 << 20

Reason = Annotated[str, msgspec.Meta(max_length=2000)]
# Values of a data set's row.
_Key = Annotated[str, msgspec.Meta(max_length=1000)]
Text = Annotated[str, msgspec.Meta(max_length=1 << 20)]
Turns = Annotated[list[Annotated[dict[_Key, Any], msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=1024)]
Columns = Annotated[dict[_Key, Any], msgspec.Meta(max_length=1024)]

# accepted: kept. duplicate: already back. unknown: no open group, or lost weights. rejected: not leased, or unfit to
# train. refused: no valid message. returned: a failure was recorded.
Outcome = Literal["accepted", "duplicate", "unknown", "rejected", "refused", "returned"]

Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_SampleIndices = Annotated[list[Count], msgspec.Meta(max_length=MAX_SAMPLES)]
_TrajectoryIndices = Annotated[list[Count], msgspec.Meta(max_length=_MAX_TRAJECTORIES)]
_Metrics = Annotated[dict[Name, float], msgspec.Meta(max_length=1024)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """The fields of every message. A peer of another schema, run or start is refused."""

    schema: int = SCHEMA_VERSION
    run_id: Name
    incarnation: Count  # number of the run's start, from 1
    # number of a rank's question, or of a server's counts, repeated in its answer; else 0
    request: Count = 0

    @property
    def num_buffers(self) -> int:
        """Number of raw frames after the header."""
        return 0


# -- rollout server to coordinator ------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """A server has started or restarted: its earlier leases are lost."""

    server: Name
    policy_version: Count | None  # version of its weights; None: not synced yet


class Demand(Message, frozen=True, kw_only=True, tag="demand"):
    """A server's room for groups, and its leases. A repeated message changes nothing.

    A lease up to `heard_of_lease` that is not in `leases` was lost.
    """

    num_groups: Count  # further groups that it can finish
    policy_version: Count | None
    heard_of_lease: Count  # newest lease number in a received Lease or Ping
    # unfinished group -> attempt of its newest lease
    leases: Annotated[dict[Name, Count], msgspec.Meta(max_length=MAX_GROUPS)]


class TrajectoryDone(Message, frozen=True, kw_only=True, tag="trajectory"):
    """A finished trajectory. After the header: its three arrays."""

    facts: TrajectoryFacts

    @property
    def num_buffers(self) -> int:
        return 3


class TurnsDone(Message, frozen=True, kw_only=True, tag="turns"):
    """Finished turns of running samples, kept for the next server. After the header: all parts' arrays."""

    parts: Annotated[list[ConversationPart], msgspec.Meta(min_length=1, max_length=MAX_PARTS)]  # one for each sample

    @property
    def num_buffers(self) -> int:
        return 3


class SampleFailed(Message, frozen=True, kw_only=True, tag="failed"):
    """A neighbour failed while this sample was made: its part of the lease goes back."""

    group: Name
    sample_index: Count
    attempt: Count
    boundary: Name  # "engine", "retriever", "reward:NAME", "environment", "prompt", "trajectory" or "lease"
    detail: Reason
    num_model_tokens: Count = 0  # model tokens of its finished turns; never trained
    place: Reason | msgspec.UnsetType = msgspec.UNSET  # file and line of the user's code that raised


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """The state of a server, about once a second."""

    policy_version: Count | None
    num_groups: Count  # groups with a running sample, or waiting for room
    num_running: Count  # requests inside the engine
    num_waiting: Count  # running samples in the environment, or being scored
    generated_tokens: Count  # model tokens since the run attached
    # SampleFailed.boundary or "coordinator" -> failures since the run attached
    failures: Annotated[dict[Name, Count], msgspec.Meta(max_length=256)]


class TokenCount(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The tokens that one server generated for an attempt at a sample."""

    group: Name  # "-": tokens of no sample
    sample_index: Count
    incarnation: Count  # start of the run that leased it
    attempt: Count
    num_tokens: Tokens = 0
    how: Literal["", "done", "failed", "stopped", "died"] = ""  # how it ended; "": it goes on
    num_resumed: Count = 0  # model tokens of earlier attempts from which it continues
    resumed_from: Count = 0  # the attempt that these tokens were kept of


class TokensCounted(Message, frozen=True, kw_only=True, tag="tokens"):
    """Generated tokens of a server's session: totals, so that a repeated message changes nothing. Answered by Done."""

    session: Name  # one server's work for one start of the run
    num_generated: Tokens  # sum over all its attempts, as they were sent last
    rows: Annotated[list[TokenCount], msgspec.Meta(max_length=MAX_TOKEN_COUNTS)]


# -- coordinator to rollout server ------------------------------------------------------------------------------------


class Lease(Message, frozen=True, kw_only=True, tag="lease"):
    """Make these samples of this prompt."""

    number: Count  # number among all leases of this start, from 1
    group: Name
    attempt: Count  # number among the group's leases, from 1
    kind: Literal["train", "eval"]  # eval: scored, never trained
    prompt: Text | Turns  # text, or chat messages
    label: Any
    columns: Columns  # other columns of the row
    # missing samples of the group
    sample_indices: Annotated[list[Count], msgspec.Meta(min_length=1, max_length=MAX_SAMPLES)]
    greedy_indices: _SampleIndices  # samples without randomness
    seed: Count  # run.seed; a generation's seed adds group, sample, attempt and turn
    # temperature of samples that are not greedy; absent: rollout.temperature
    temperature: Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)] | msgspec.UnsetType = msgspec.UNSET
    # samples to continue, each as one part; absent: none
    resumed: Annotated[list[ConversationPart], msgspec.Meta(max_length=MAX_SAMPLES)] | msgspec.UnsetType = msgspec.UNSET

    @property
    def num_buffers(self) -> int:
        return 3 if self.resumed else 0


class KeptSample(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The kept tokens of one running sample."""

    group: Name
    sample_index: Count
    attempt: Count
    num_tokens: Count  # kept tokens of the conversation; the next part begins after them
    is_yours: bool  # False: the sample is done or another server's


class TurnsKept(Message, frozen=True, kw_only=True, tag="turns_kept"):
    """The answer to TurnsDone: one sample for each part."""

    samples: Annotated[list[KeptSample], msgspec.Meta(max_length=MAX_PARTS)]


class Ack(Message, frozen=True, kw_only=True, tag="ack"):
    """The answer to a trajectory or failure."""

    group: Name
    sample_index: Count
    outcome: Outcome  # accepted: the server keeps the trajectory until GroupsTrained; else it drops it
    detail: Reason = ""


class GroupsTrained(Message, frozen=True, kw_only=True, tag="trained"):
    """These groups were trained or skipped: the server drops their trajectories."""

    groups: Annotated[list[Name], msgspec.Meta(max_length=MAX_GROUPS)]


class Refusal(Message, frozen=True, kw_only=True, tag="refused"):
    """A message of the receiver was not used."""

    detail: Reason
    # FrameError.reason, such as "checksum" (send it again); "incarnation": another start of the run
    reason: Name = "incarnation"


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """A test of the connection, every second."""

    newest_lease: Count


# -- learner rank to coordinator --------------------------------------------------------------------------------------


class NextBatch(Message, frozen=True, kw_only=True, tag="next"):
    """A rank's question for its share of a step. A repeated question gets the same share."""

    step: Count  # from 1
    rank: Count  # from 0
    part: Count | msgspec.UnsetType = msgspec.UNSET  # from 0, of a step that may come in parts; unset: whole


class StepEnd(Message, frozen=True, kw_only=True, tag="stepped"):
    """Rank 0: the step has ended and the servers have the weights of `policy_version`."""

    step: Count
    policy_version: Count  # number of applied steps after it
    is_applied: bool  # False: loss or gradient was not finite; the step's groups are skipped
    detail: Reason
    metrics: _Metrics  # measurements of the ranks


class SaveLedger(Message, frozen=True, kw_only=True, tag="save_ledger"):
    """Rank 0: copy the ledger into a new checkpoint."""

    path: Annotated[str, msgspec.Meta(max_length=4096)]  # path of the copy, inside the run folder
    step: Count


# -- coordinator to learner rank --------------------------------------------------------------------------------------


class MiniBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One optimizer update: the next entries of the batch's two lists."""

    num_planned: Count  # entries of Batch.planned
    num_micro_batches: Count  # entries of Batch.micro_batches; the same on every rank


class Batch(Message, frozen=True, kw_only=True, tag="batch"):
    """One rank's share of a step. After the header: three frames for each index of micro_batches, in order.

    With is_joined: one frame with the facts, then three frames for each micro-batch that is not empty, the
    concatenated arrays of its trajectories.
    """

    step: Count
    # facts of all trajectories of the step; indices count in this order
    facts: Annotated[list[TrajectoryFacts], msgspec.Meta(max_length=_MAX_TRAJECTORIES)]
    groups: Annotated[list[_SampleIndices], msgspec.Meta(max_length=_MAX_TRAJECTORIES)]  # indices of each group
    planned: _TrajectoryIndices  # indices in the loss, on any rank
    # this rank's indices, one list for each micro-batch
    micro_batches: Annotated[list[_TrajectoryIndices], msgspec.Meta(max_length=_MAX_TRAJECTORIES)]
    # rollout servers without a connection, which the push skips
    absent: Annotated[list[Name], msgspec.Meta(max_length=MAX_GROUPS)] = []
    # updates in order; empty: one update of everything
    mini_batches: Annotated[list[MiniBatch], msgspec.Meta(max_length=MAX_MINI_BATCHES)] = []
    # number of this part of the step, from 0; its facts and groups are the part's. Unset: the step is whole
    part: Count | msgspec.UnsetType = msgspec.UNSET
    is_last: bool | msgspec.UnsetType = msgspec.UNSET  # False: another part follows
    is_joined: bool | msgspec.UnsetType = msgspec.UNSET  # True: `facts` is empty on the way, the first frame has them

    @property
    def pieces(self) -> list[list[int]]:
        """The indices whose arrays share three frames, in the order of the frames."""
        if self.is_joined is True:
            return [part for part in self.micro_batches if part]
        return [[index] for part in self.micro_batches for index in part]

    @property
    def num_buffers(self) -> int:
        return 3 * len(self.pieces) + (self.is_joined is True)


class Wait(Message, frozen=True, kw_only=True, tag="wait"):
    """The batch is not ready: the rank asks again."""

    detail: Reason  # missing thing, named in the rank's error at its deadline
    # True: wait for an evaluation, which has its own limits
    is_for_evaluation: bool | msgspec.UnsetType = msgspec.UNSET


class PushAgain(Message, frozen=True, kw_only=True, tag="push_again"):
    """No server has the step's weights: all ranks push them together, and ask again."""

    step: Count


class RunEnd(Message, frozen=True, kw_only=True, tag="ended"):
    """The run has no such step. All ranks get this for the same step and leave together."""

    step: Count
    detail: Reason


class Done(Message, frozen=True, kw_only=True, tag="done"):
    """The message was received."""

    detail: Reason = ""  # always empty


FromServer = Hello | Demand | TrajectoryDone | TurnsDone | SampleFailed | Heartbeat | TokensCounted
ToCoordinator = FromServer | NextBatch | StepEnd | SaveLedger
ToServer = Lease | Ack | TurnsKept | GroupsTrained | Refusal | Ping | Done
ToRank = Batch | Wait | PushAgain | RunEnd | Done | Refusal
