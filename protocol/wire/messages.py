"""Every message between coordinator, rollout servers and learner ranks.

A field may be added with a default; any other change raises SCHEMA_VERSION, and peers of another version are refused by
name. Arrays never travel in here: they are raw frames behind the header (see `protocol.wire.codec`).
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
# What a data set's row may hold. Inside `Any`, `protocol.wire.header_shape` bounds depth and number of values.
_Key = Annotated[str, msgspec.Meta(max_length=1000)]
Text = Annotated[str, msgspec.Meta(max_length=1 << 20)]
Turns = Annotated[list[Annotated[dict[_Key, Any], msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=1024)]
Columns = Annotated[dict[_Key, Any], msgspec.Meta(max_length=1024)]

# What became of a sample. accepted: kept. duplicate: it was back already. unknown: of no open group or of lost weights.
# rejected: not what was leased, or not fit to train. refused: no valid message. returned: a failure, taken in.
Outcome = Literal["accepted", "duplicate", "unknown", "rejected", "refused", "returned"]

_SampleIndices = Annotated[list[Count], msgspec.Meta(max_length=MAX_SAMPLES)]
_TrajectoryIndices = Annotated[list[Count], msgspec.Meta(max_length=_MAX_TRAJECTORIES)]
_Metrics = Annotated[dict[Name, float], msgspec.Meta(max_length=1024)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """What every message carries: which run, and which start of it."""

    schema: int = SCHEMA_VERSION  # the sender's SCHEMA_VERSION; a peer of another one is refused
    run_id: Name  # a message of another run is refused
    incarnation: Count  # how many times the run's learner had started, from 1; of another start: refused
    request: Count = 0  # number of a learner rank's question, repeated in the answer to it; 0 elsewhere

    @property
    def num_buffers(self) -> int:
        """How many raw frames stand behind the header."""
        return 0


# -- rollout server to coordinator ------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """A server is here, for the first time or again. What it was leased before is lost."""

    server: Name  # the server's name, as in the fleet
    policy_version: Count | None  # of the weights it holds; None: not synced yet


class Demand(Message, frozen=True, kw_only=True, tag="demand"):
    """How many groups a server could take, and which it has. Absolute numbers: a repeated message changes nothing.

    A lease that it has heard of and does not name was lost.
    """

    num_groups: Count  # groups it could take now, besides those that it has; 0 when it could make nothing of them
    policy_version: Count | None  # of the weights it holds; None: not synced yet
    heard_of_lease: Count  # newest lease number that the coordinator told it, in a Lease or a Ping
    # group here whose samples the coordinator does not have all -> attempt of its newest lease
    leases: Annotated[dict[Name, Count], msgspec.Meta(max_length=MAX_GROUPS)]


class TrajectoryDone(Message, frozen=True, kw_only=True, tag="trajectory"):
    """A finished trajectory; its three arrays are the frames behind the header."""

    facts: TrajectoryFacts  # all but the arrays

    @property
    def num_buffers(self) -> int:
        return 3


class TurnsDone(Message, frozen=True, kw_only=True, tag="turns"):
    """Turns of samples that go on, to be kept for whoever goes on with them. Behind the header: all parts' arrays."""

    parts: Annotated[list[ConversationPart], msgspec.Meta(min_length=1, max_length=MAX_PARTS)]  # one for each sample

    @property
    def num_buffers(self) -> int:
        return 3


class SampleFailed(Message, frozen=True, kw_only=True, tag="failed"):
    """A neighbour failed for good while this sample was made: its part of the lease goes back."""

    group: Name  # as in the lease
    sample_index: Count  # as in the lease
    attempt: Count  # as in the lease
    # which neighbour: "engine", "retriever", "reward:NAME", "environment", "prompt", "trajectory", "lease"
    boundary: Name
    detail: Reason  # for people: what the neighbour said or did
    num_model_tokens: Count = 0  # written by the policy until then, in turns that ended; never trained


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """What the server is doing. Sent about once a second."""

    policy_version: Count | None  # of the weights it holds; None: not synced yet
    num_groups: Count  # groups here: with a sample in flight, or waiting for room
    num_running: Count  # requests inside the engine now
    num_waiting: Count  # samples in flight that are not in the engine: in the environment, or being scored
    generated_tokens: Count  # written by the policy since the run attached to this server
    # neighbour (as SampleFailed.boundary, or "coordinator") -> failures since the run attached
    failures: Annotated[dict[Name, Count], msgspec.Meta(max_length=256)]


# -- coordinator to rollout server ------------------------------------------------------------------------------------


class Lease(Message, frozen=True, kw_only=True, tag="lease"):
    """Make these samples of this prompt."""

    number: Count  # counts all leases of this start of the run, from 1
    group: Name  # name of the group; the same one when its missing samples are leased again
    attempt: Count  # leases of this group so far, this one included
    kind: Literal["train", "eval"]  # eval: held-out, to be scored and not trained
    prompt: Text | Turns  # text, or chat messages
    label: Any  # of the data set's row, as the reward services and the environment get it
    columns: Columns  # other columns of the row, for the environment and the reward services
    # samples of the group to make: those that are missing
    sample_indices: Annotated[list[Count], msgspec.Meta(min_length=1, max_length=MAX_SAMPLES)]
    greedy_indices: _SampleIndices  # those among them to make without randomness
    seed: Count  # the run's; together with group, sample, attempt and turn it decides a generation's seed
    # of the samples that are not greedy; absent: rollout.temperature
    temperature: Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)] | msgspec.UnsetType = msgspec.UNSET
    # samples to go on with where another server stopped, each as one part; absent: all begin with the prompt
    resumed: Annotated[list[ConversationPart], msgspec.Meta(max_length=MAX_SAMPLES)] | msgspec.UnsetType = msgspec.UNSET

    @property
    def num_buffers(self) -> int:
        return 3 if self.resumed else 0


class Kept(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How much of one sample is kept."""

    group: Name  # as in the part
    sample_index: Count  # as in the part
    attempt: Count  # as in the part
    num_tokens: Count  # the conversation's first tokens that are kept: what comes next begins behind them
    is_yours: bool  # False: the sample is another server's by now, or is done: stop making it


class TurnsKept(Message, frozen=True, kw_only=True, tag="turns_kept"):
    """Turns arrived, and what became of them."""

    samples: Annotated[list[Kept], msgspec.Meta(max_length=MAX_PARTS)]  # one for each part


class Ack(Message, frozen=True, kw_only=True, tag="ack"):
    """A trajectory or failure arrived and what became of it."""

    group: Name  # as in the trajectory or failure
    sample_index: Count  # as in the trajectory or failure
    outcome: Outcome  # accepted: the server keeps a trajectory until Trained; any other: it forgets the sample
    detail: Reason = ""  # for people: why it was rejected or refused


class Trained(Message, frozen=True, kw_only=True, tag="trained"):
    """These groups are accounted for, trained or skipped: their trajectories need not be kept any longer."""

    groups: Annotated[list[Name], msgspec.Meta(max_length=MAX_GROUPS)]  # names, as in their leases


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """The sender's message was not used."""

    detail: Reason  # for people: what was wrong and what was expected
    # for programs: the FrameError's, such as "checksum" (send it again); "incarnation": of another start of the run
    reason: Name = "incarnation"


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """Sent every second. That it can be sent shows a live connection."""

    newest_lease: Count  # number of the last lease that this server was sent


# -- learner rank to coordinator --------------------------------------------------------------------------------------


class NextBatch(Message, frozen=True, kw_only=True, tag="next"):
    """Rank asks for its share of a step. Asked again after a lost answer, it gets the same share."""

    step: Count  # the step it wants to take, from 1
    rank: Count  # whose share, from 0


class Stepped(Message, frozen=True, kw_only=True, tag="stepped"):
    """Rank 0: the step ended and the servers hold `policy_version`. Not applied: nothing was trained by it."""

    step: Count  # the step that ended, from 1
    policy_version: Count  # applied optimizer steps inside the weights after it
    is_applied: bool  # False: loss or gradient was not finite; the step's groups are skipped
    detail: Reason  # for people: why it was not applied
    metrics: _Metrics  # what the ranks measured: loss, norms, seconds; the coordinator adds the rest of the line


class SaveLedger(Message, frozen=True, kw_only=True, tag="save_ledger"):
    """Rank 0: write a snapshot of the ledger into a checkpoint that is being made."""

    path: Annotated[str, msgspec.Meta(max_length=4096)]  # the snapshot's file, inside the run's folder
    step: Count  # the checkpoint's


# -- coordinator to learner rank --------------------------------------------------------------------------------------


class MiniBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One optimizer update's part of a step: the next so many entries of the batch's two lists."""

    num_planned: Count  # entries of Batch.planned
    num_micro_batches: Count  # entries of Batch.micro_batches; the same on every rank


class Batch(Message, frozen=True, kw_only=True, tag="batch"):
    """One rank's share of a step. Behind the header: three frames for each index of micro_batches, in their order."""

    step: Count  # as in the question
    # of every trajectory of the step, in the order that indices count
    facts: Annotated[list[TrajectoryFacts], msgspec.Meta(max_length=_MAX_TRAJECTORIES)]
    groups: Annotated[list[_SampleIndices], msgspec.Meta(max_length=_MAX_TRAJECTORIES)]  # indices that form each group
    planned: _TrajectoryIndices  # indices that take part in the loss, on any rank
    # this rank's indices, one list for each micro-batch
    micro_batches: Annotated[list[_TrajectoryIndices], msgspec.Meta(max_length=_MAX_TRAJECTORIES)]
    # rollout servers that the coordinator has no connection to: a push that waited for them would hold all others up
    absent: Annotated[list[Name], msgspec.Meta(max_length=MAX_GROUPS)] = []
    # the step's updates in order; empty: one update of everything
    mini_batches: Annotated[list[MiniBatch], msgspec.Meta(max_length=MAX_MINI_BATCHES)] = []

    @property
    def num_buffers(self) -> int:
        return 3 * sum(len(part) for part in self.micro_batches)


class Wait(Message, frozen=True, kw_only=True, tag="wait"):
    """Not yet: the rank asks again."""

    detail: Reason  # for people: what is missing; part of the rank's error when its deadline passes
    # true: what is missing is an evaluation, whose leases have limits of their own. Left out of the message otherwise.
    is_for_evaluation: bool | msgspec.UnsetType = msgspec.UNSET


class PushAgain(Message, frozen=True, kw_only=True, tag="push_again"):
    """No server holds the weights that the step needs: every rank hears it, pushes them together, and asks again."""

    step: Count  # as in the question


class Ended(Message, frozen=True, kw_only=True, tag="ended"):
    """The run has no such step: every rank hears it for the same step, so that they leave together."""

    step: Count  # as in the question
    detail: Reason  # for people: all steps are done, or why the run stops early


class Done(Message, frozen=True, kw_only=True, tag="done"):
    """What rank 0 told was taken in."""

    detail: Reason = ""  # always empty today


FromServer = Hello | Demand | TrajectoryDone | TurnsDone | SampleFailed | Heartbeat
ToCoordinator = FromServer | NextBatch | Stepped | SaveLedger
ToServer = Lease | Ack | TurnsKept | Trained | Refused | Ping | Done
ToRank = Batch | Wait | PushAgain | Ended | Done | Refused
