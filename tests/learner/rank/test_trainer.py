"""The learner's loop on one rank: what is pushed, reported and saved when; models and peers are scripted."""

from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest

from learner.objectives.policy_gradient import StepOutcome
from learner.rank.device_switch import OwnDevice
from learner.rank.process import RankPlace
from learner.rank.rank import Trainer
from learner.rank.start import Models, World
from learner.weights.push import PushReport
from protocol.settings.learner import LearnerSettings
from protocol.settings.run import RunSettings
from protocol.settings.settings import Settings
from protocol.wire.messages import Batch

PUSHED = PushReport(
    push_s=0.5, wait_s=0.1, transfer_s=0.2, pause_s=0.1, num_bytes=1, digest="d", synced=("s1",), failed={}
)


@dataclass
class Peers:
    """Objective, coordinator, pusher and checkpoints in one, which note what was done with them, in order.

    answers: of the coordinator, after which it ends the run: the servers that a push leaves out, None to push again, or
    whether a part is the last. bad_steps: those that are not applied.
    """

    answers: list[Any]
    bad_steps: tuple[int, ...] = ()
    done: list[Any] = field(default_factory=list)
    num_steps: int = 0
    device: Any = field(default_factory=OwnDevice)
    trained_on: list[int] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)  # parts; unset where the rank takes whole steps

    def take_step(self, batch: Batch, trajectories: Any, policy_version: int) -> StepOutcome:
        self.num_steps += 1
        self.trained_on.append(policy_version)
        is_bad = self.num_steps in self.bad_steps
        return StepOutcome(not is_bad, "not finite" if is_bad else "", {"policy/loss": 1.0, "policy/kl_sampler": 0.0})

    def take_part(self, batch: Batch, trajectories: Any, policy_version: int) -> None:
        self.done.append(("part", batch.part))

    def next_batch(self, step: int, rank: int, timeout_s: float, waited_s: float, part: Any) -> Any:
        self.asked.append(part)
        answer = self.answers.pop(0) if self.answers else "the run is over"
        if isinstance(answer, bool):
            return msgspec.structs.replace(_batch(step, []), part=part, is_last=answer), {}
        return (_batch(step, answer), {}) if isinstance(answer, list) else answer

    def report_step(self, step: int, version: int, applied: bool, detail: str, metrics: dict[str, float]) -> None:
        self.done.append(("stepped", step, version, applied))
        self.detail, self.metrics = detail, metrics

    def push(self, version: int) -> PushReport:
        self.done.append(("push", version))
        return PUSHED

    def set_absent(self, absent: list[str]) -> None:
        self.done.append(("leave out", *absent))

    def save(self, step: int, version: int) -> None:
        self.done.append(("save", step, version))


def _batch(step: int, absent: list[str]) -> Batch:
    return Batch(run_id="r", incarnation=1, step=step, facts=[], groups=[], planned=[], micro_batches=[], absent=absent)


def _trainer(
    peers: Peers, rank: int = 0, step: int = 0, every: int = 2, are_saved: bool = False, in_parts: bool = False
) -> Trainer:
    anything = cast(Any, peers)
    settings = Settings(
        learner=LearnerSettings(checkpoint_every_steps=every, groups_per_step=2), run=RunSettings(max_steps=4)
    )
    world = World(RankPlace(rank, 2, "127.0.0.1", 1), cast(Any, None))
    return Trainer(
        world,
        Models(anything, step, step, are_saved),
        anything,
        settings,
        anything,
        anything,
        anything,
        peers.told.append,
        parts=anything if in_parts else None,
    )


def test_each_step_is_pushed_before_it_is_reported_and_saved_when_due() -> None:
    peers = Peers([[], [], [], []])

    assert _trainer(peers).train() == "Ended at step 4: the run is over."
    assert [act for act in peers.done if act[0] != "leave out"] == [
        ("push", 0),
        ("push", 1),
        ("stepped", 1, 1, True),
        ("push", 2),
        ("stepped", 2, 2, True),
        ("save", 2, 2),
        ("push", 3),
        ("stepped", 3, 3, True),
        ("push", 4),
        ("stepped", 4, 4, True),
        ("save", 4, 4),  # once: after the last step's evaluation, when the coordinator ends the run
    ]
    assert peers.trained_on == [0, 1, 2, 3]
    assert peers.told[-2:] == ["waiting for the batch of step 5", "saving step 4"]


def test_step_that_was_not_applied_is_reported_and_neither_pushed_nor_counted_as_a_version() -> None:
    peers = Peers([[]], bad_steps=(1,))
    _trainer(peers, every=0).train()

    assert peers.done == [("push", 0), ("leave out",), ("stepped", 1, 0, False), ("save", 1, 0)]
    assert peers.detail == "not finite"
    assert "time/push_s" not in peers.metrics


def test_metrics_hold_the_pushs_times() -> None:
    peers = Peers([[]])
    _trainer(peers).train()

    assert (peers.metrics["time/push_s"], peers.metrics["time/push_pause_s"]) == (0.5, 0.1)
    assert {"time/wait_s", "time/train_s", "policy/loss", "policy/kl_sampler"} <= set(peers.metrics)


@pytest.mark.parametrize(
    ("answers", "done"),
    [
        ([None, []], [("leave out",), ("push", 0)]),  # no server holds the weights: they are pushed again to all
        ([["s2"]], [("leave out", "s2"), ("push", 1)]),  # the coordinator cannot reach s2
    ],
)
def test_push_leaves_out_servers_out_of_reach_and_is_repeated_when_none_has_it(
    answers: list[list[str] | None], done: list[tuple[Any, ...]]
) -> None:
    peers = Peers(answers)
    _trainer(peers, every=0).train()

    assert peers.done[:3] == [("push", 0), *done]


def test_rank_reports_its_phases() -> None:
    peers = Peers([[]])
    _trainer(peers, every=0).train()

    assert peers.told == [
        "pushing version 0",
        "waiting for the batch of step 1",
        "training step 1",
        "pushing version 1",
        "waiting for the batch of step 2",
        "saving step 1",
    ]


def test_rank_0_alone_reports() -> None:
    peers = Peers([[], []])
    _trainer(peers, rank=1).train()

    assert [act[0] for act in peers.done if act[0] != "leave out"] == ["push", "push", "push", "save"]


@pytest.mark.parametrize(("step", "are_saved", "saved"), [(3, True, []), (0, True, []), (0, False, [("save", 0, 0)])])
def test_a_loaded_checkpoint_is_not_saved_again(step: int, are_saved: bool, saved: list[Any]) -> None:
    peers = Peers([])
    _trainer(peers, step=step, are_saved=are_saved).train()

    assert peers.done == [("push", step), *saved]


class NotedSwitch:
    """A switch that notes each change among the peers' acts."""

    def __init__(self, done: list[Any]) -> None:
        self._done = done
        self._now = "learn"

    def learn(self) -> float:
        self._note("learn")
        return 0.5

    def generate(self) -> None:
        self._note("generate")

    def _note(self, turn: str) -> None:
        if turn != self._now:
            self._now = turn
            self._done.append(turn)


def test_a_rank_that_shares_its_device_waits_in_the_servers_turn_and_steps_pushes_and_saves_in_its_own() -> None:
    peers = Peers([[], []], bad_steps=(1,))
    peers.device = NotedSwitch(peers.done)
    peers.device.generate()  # as after the first push, which is the pusher's affair
    _trainer(peers).train()

    assert [act for act in peers.done if act[0] != "leave out"] == [
        "generate",
        ("push", 0),
        "learn",
        "generate",
        ("stepped", 1, 0, False),
        "learn",
        ("push", 1),
        "generate",
        ("stepped", 2, 1, True),
        "learn",
        ("save", 2, 1),
        "generate",
    ]
    assert peers.metrics["time/switch_s"] == 0.5


def test_rank_waits_for_its_batch_also_after_a_push_that_no_server_took() -> None:
    peers = Peers([None, None, []])
    _trainer(peers, every=0).train()
    # On a shared device the run's command starts a server that died while a rank says that it waits, and only then.
    pushing, waiting = "pushing version 0", "waiting for the batch of step 1"
    assert peers.told[:7] == [pushing, waiting, pushing, waiting, pushing, waiting, "training step 1"]


def test_parts_of_a_step_are_taken_as_they_come_and_the_last_one_takes_the_step() -> None:
    peers = Peers([False, None, False, True, True])
    _trainer(peers, every=0, in_parts=True).train()
    assert [act for act in peers.done if act[0] not in ("leave out", "save")] == [
        ("push", 0),
        ("part", 0),
        ("push", 0),  # no server held the weights
        ("part", 1),
        ("push", 1),
        ("stepped", 1, 1, True),
        ("push", 2),
        ("stepped", 2, 2, True),
    ]
    assert peers.asked == [0, 1, 1, 2, 0, 0]
    assert peers.num_steps == 2


def test_run_that_ends_in_the_middle_of_a_step_saves_the_step_before() -> None:
    peers = Peers([True, False])
    _trainer(peers, every=0, in_parts=True).train()
    assert peers.done[-1] == ("save", 1, 1)
    assert peers.num_steps == 1


def test_trainer_that_takes_whole_steps_asks_for_no_part() -> None:
    peers = Peers([[]])
    _trainer(peers).train()
    assert peers.asked == [msgspec.UNSET, msgspec.UNSET]
