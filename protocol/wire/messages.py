"""Every message between coordinator, rollout servers and learner ranks.

A field may be added with a default. Any other change raises SCHEMA_VERSION, and peers of another version are refused by
name. Arrays are raw frames after the header (see `protocol.wire.codec`).
"""

from typing import Annotated, Any, Literal

import msgspec

from protocol.wire.conversation import ConversationPart
from protocol.wire.trajectory import Count, Name, TrajectoryFacts

# Never 0, 3, 5, 9 and so on: one flipped bit would make it 1, the schema without a seal, and damage would look like an
# older peer.
SCHEMA_VERSION = 6

MAX_SAMPLES = 4096
MAX_GROUPS = 4096
MAX_MINI_BATCHES = 1 << 16
MAX_PARTS = 32
_MAX_TRAJECTORIES = 1 << 20

Reason = Annotated[str, msgspec.Meta(max_length=2000)]
# Values of a data set's row. Inside `Any`, `protocol.wire.header_shape` bounds depth and number of values.
_Key = Annotated[str, msgspec.Meta(max_length=1000)]
Text = Annotated[str, msgspec.Meta(max_length=1 << 20)]
Turns = Annotated[list[Annotated[dict[_Key, Any], msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=1024)]
Columns = Annotated[dict[_Key, Any], msgspec.Meta(max_length=1024)]

# Outcomes of a sample. accepted: kept. duplicate: its sample is back already. unknown: no open group, or lost weights.
# rejected: not what was leased, or unfit to train. refused: no valid message. returned: a failure was recorded.
Outcome = Literal["accepted", "duplicate", "unknown", "rejected", "refused", "returned"]

_SampleIndices = Annotated[list[Count], msgspec.Meta(max_length=MAX_SAMPLES)]
_TrajectoryIndices = Annotated[list[Count], msgspec.Meta(max_length=_MAX_TRAJECTORIES)]
_Metrics = Annotated[dict[Name, float], msgspec.Meta(max_length=1024)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """The fields of every message: the run, and its start."""

    schema: int = SCHEMA_VERSION  # SCHEMA_VERSION of the sender; a peer with another one is refused
    run_id: Name  # name of the run; messages of another run are refused
    incarnation: Count  # number of the run's start, from 1; messages of another start are refused
    request: Count = 0  # number of a learner rank's question, repeated in its answer; 0 elsewhere

    @property
    def num_buffers(self) -> int:
        """Number of raw frames after the header."""
        return 0


# -- rollout server to coordinator ------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """A server has started or restarted: its earlier leases are lost."""

    server: Name  # name of the server in the fleet
    policy_version: Count | None  # version of its weights; None: not synced yet


class Demand(Message, frozen=True, kw_only=True, tag="demand"):
    """A server's room for groups, and its leases. The numbers are absolute: a repeated message changes nothing.

    A lease up to `heard_of_lease` that is not in `leases` was lost.
    """

    num_groups: Count  # more groups that it has room for; 0 while it could not finish them
    policy_version: Count | None  # version of its weights; None: not synced yet
    heard_of_lease: Count  # newest lease number that it received, in a Lease or a Ping
    # unfinished group -> attempt of its newest lease
    leases: Annotated[dict[Name, Count], msgspec.Meta(max_length=MAX_GROUPS)]


class TrajectoryDone(Message, frozen=True, kw_only=True, tag="trajectory"):
    """A finished trajectory; its three arrays are the frames after the header."""

    facts: TrajectoryFacts  # everything but the arrays

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

    group: Name  # as in the lease
    sample_index: Count  # as in the lease
    attempt: Count  # as in the lease
    # neighbour that failed: "engine", "retriever", "reward:NAME", "environment", "prompt", "trajectory", "lease"
    boundary: Name
    detail: Reason  # cause, for people
    num_model_tokens: Count = 0  # model tokens of its finished turns; never trained


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """The state of a server, about once a second."""

    policy_version: Count | None  # version of its weights; None: not synced yet
    num_groups: Count  # groups with a running sample, or waiting for room
    num_running: Count  # requests inside the engine now
    num_waiting: Count  # running samples outside the engine: in the environment, or being scored
    generated_tokens: Count  # model tokens since the run attached to this server
    # neighbour (as SampleFailed.boundary, or "coordinator") -> failures since the run attached
    failures: Annotated[dict[Name, Count], msgspec.Meta(max_length=256)]


# -- coordinator to rollout server ------------------------------------------------------------------------------------


class Lease(Message, frozen=True, kw_only=True, tag="lease"):
    """Make these samples of this prompt."""

    number: Count  # number among all leases of this start, from 1
    group: Name  # name of the group, the same in every lease of it
    attempt: Count  # number among the leases of the group, from 1
    kind: Literal["train", "eval"]  # eval: held out, scored and not trained
    prompt: Text | Turns  # text, or chat messages
    label: Any  # label of the data set's row, for reward services and environment
    columns: Columns  # other columns of the row, for reward services and environment
    # missing samples of the group
    sample_indices: Annotated[list[Count], msgspec.Meta(min_length=1, max_length=MAX_SAMPLES)]
    greedy_indices: _SampleIndices  # samples without randomness
    seed: Count  # run.seed; with group, sample, attempt and turn it decides a generation's seed
    # sampling temperature of samples that are not greedy; absent: rollout.temperature
    temperature: Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)] | msgspec.UnsetType = msgspec.UNSET
    # finished turns of samples to continue, each as one part; absent: all samples begin with the prompt
    resumed: Annotated[list[ConversationPart], msgspec.Meta(max_length=MAX_SAMPLES)] | msgspec.UnsetType = msgspec.UNSET

    @property
    def num_buffers(self) -> int:
        return 3 if self.resumed else 0


class KeptSample(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The kept tokens of one running sample."""

    group: Name  # as in the part
    sample_index: Count  # as in the part
    attempt: Count  # as in the part
    num_tokens: Count  # first tokens of the conversation that are kept; the next part begins after them
    is_yours: bool  # False: the sample is done or another server's: stop making it


class TurnsKept(Message, frozen=True, kw_only=True, tag="turns_kept"):
    """The answer to TurnsDone."""

    samples: Annotated[list[KeptSample], msgspec.Meta(max_length=MAX_PARTS)]  # one sample for each part


class Ack(Message, frozen=True, kw_only=True, tag="ack"):
    """The answer to a trajectory or failure."""

    group: Name  # as in the trajectory or failure
    sample_index: Count  # as in the trajectory or failure
    outcome: Outcome  # accepted: the server keeps the trajectory until GroupsTrained; else it drops it
    detail: Reason = ""  # cause of a rejection or refusal, for people


class GroupsTrained(Message, frozen=True, kw_only=True, tag="trained"):
    """These groups were trained or skipped: the server drops their trajectories."""

    groups: Annotated[list[Name], msgspec.Meta(max_length=MAX_GROUPS)]  # names, as in their leases


class Refusal(Message, frozen=True, kw_only=True, tag="refused"):
    """A message of the receiver was not used."""

    detail: Reason  # fault and expectation, for people
    # FrameError.reason, for programs, such as "checksum" (send it again); "incarnation": another start of the run
    reason: Name = "incarnation"


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """Sent every second: it finds out whether there is a connection."""

    newest_lease: Count  # number of this server's newest lease


# -- learner rank to coordinator --------------------------------------------------------------------------------------


class NextBatch(Message, frozen=True, kw_only=True, tag="next"):
    """A rank's question for its share of a step. Repeated after a lost answer, it gets the same share."""

    step: Count  # number of the step, from 1
    rank: Count  # number of the rank, from 0


class StepEnd(Message, frozen=True, kw_only=True, tag="stepped"):
    """Rank 0: the step has ended and the servers have the weights of `policy_version`."""

    step: Count  # number of the step, from 1
    policy_version: Count  # number of applied steps after it
    is_applied: bool  # False: loss or gradient was not finite; the step's groups are skipped
    detail: Reason  # cause when it was not applied, for people
    metrics: _Metrics  # measurements of the ranks; the coordinator adds the rest of the line


class SaveLedger(Message, frozen=True, kw_only=True, tag="save_ledger"):
    """Rank 0: copy the ledger into a checkpoint that is being made."""

    path: Annotated[str, msgspec.Meta(max_length=4096)]  # path of the copy, inside the run folder
    step: Count  # step of the checkpoint


# -- coordinator to learner rank --------------------------------------------------------------------------------------


class MiniBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The part of one optimizer update: the next entries of the batch's two lists."""

    num_planned: Count  # entries of Batch.planned
    num_micro_batches: Count  # entries of Batch.micro_batches; the same on every rank


class Batch(Message, frozen=True, kw_only=True, tag="batch"):
    """One rank's share of a step. After the header: three frames for each index of micro_batches, in order."""

    step: Count  # as in the question
    # facts of every trajectory of the step; indices count in this order
    facts: Annotated[list[TrajectoryFacts], msgspec.Meta(max_length=_MAX_TRAJECTORIES)]
    groups: Annotated[list[_SampleIndices], msgspec.Meta(max_length=_MAX_TRAJECTORIES)]  # indices of each group
    planned: _TrajectoryIndices  # indices that are in the loss, on any rank
    # this rank's indices, one list for each micro-batch
    micro_batches: Annotated[list[_TrajectoryIndices], msgspec.Meta(max_length=_MAX_TRAJECTORIES)]
    # rollout servers without a connection: the push leaves them out instead of waiting for them
    absent: Annotated[list[Name], msgspec.Meta(max_length=MAX_GROUPS)] = []
    # updates of the step in order; empty: one update of everything
    mini_batches: Annotated[list[MiniBatch], msgspec.Meta(max_length=MAX_MINI_BATCHES)] = []

    @property
    def num_buffers(self) -> int:
        return 3 * sum(len(part) for part in self.micro_batches)


class Wait(Message, frozen=True, kw_only=True, tag="wait"):
    """The batch is not ready: the rank asks again."""

    detail: Reason  # missing thing, for people; part of the rank's error when its deadline passes
    # True: the rank waits for an evaluation, whose leases have limits of their own. Absent otherwise.
    is_for_evaluation: bool | msgspec.UnsetType = msgspec.UNSET


class PushAgain(Message, frozen=True, kw_only=True, tag="push_again"):
    """No server has the weights that the step needs: all ranks push them together, and ask again."""

    step: Count  # as in the question


class RunEnd(Message, frozen=True, kw_only=True, tag="ended"):
    """The run has no such step. All ranks get it for the same step, so that they leave together."""

    step: Count  # as in the question
    detail: Reason  # reason of the end, for people


class Done(Message, frozen=True, kw_only=True, tag="done"):
    """The message was received."""

    detail: Reason = ""  # always empty


FromServer = Hello | Demand | TrajectoryDone | TurnsDone | SampleFailed | Heartbeat
ToCoordinator = FromServer | NextBatch | StepEnd | SaveLedger
ToServer = Lease | Ack | TurnsKept | GroupsTrained | Refusal | Ping | Done
ToRank = Batch | Wait | PushAgain | RunEnd | Done | Refusal
