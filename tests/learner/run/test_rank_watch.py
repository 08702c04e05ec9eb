"""A rank that stands still is named in time; one that takes long and answers is left alone."""

from typing import Any

import pytest

from learner.run.rank_watch import RankWatch
from protocol.errors import NeighbourError


class Rank:
    """A rank that answers at once, until it is stopped."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.phase = "loading the policy"
        self.is_stopped = False
        self.num_asked = 0

    def ask(self, method: str, *arguments: Any) -> "Rank":
        assert method == "progress"
        self.num_asked += 1
        return self


class Watched:
    """Two ranks under a watch, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ranks = [Rank("learner rank 0"), Rank("learner rank 1")]
        self.watch = RankWatch(
            self.ranks,
            is_done=lambda rank: not rank.is_stopped,
            result=lambda rank, name: (rank.phase, False),
            silence_s=60.0,
            clock=lambda: self.now,
        )

    def poll_for(self, seconds: float) -> None:
        """Poll every two seconds."""
        end = self.now + seconds
        while self.now < end:
            self.now += 2.0
            self.watch.poll()


def test_ranks_that_answer_are_left_alone_however_long_a_step_takes() -> None:
    watched = Watched()
    watched.poll_for(3600.0)
    assert [rank.num_asked for rank in watched.ranks] == [900, 900]


def test_rank_that_stands_still_is_named_with_what_it_was_at() -> None:
    watched = Watched()
    watched.poll_for(10.0)
    watched.ranks[1].phase = "training"
    watched.poll_for(10.0)
    watched.ranks[1].is_stopped = True
    with pytest.raises(NeighbourError) as caught:
        watched.poll_for(100.0)
    assert str(caught.value) == (
        "learner rank 1: did not answer the run's command for 60 s while it trained; last: training"
    )
    assert 78.0 <= watched.now <= 84.0


def test_rank_that_never_answers_is_named_too() -> None:
    watched = Watched()
    watched.ranks[0].is_stopped = True
    with pytest.raises(NeighbourError, match=r"^learner rank 0: .* last: it has not answered yet$"):
        watched.poll_for(100.0)
    assert watched.now == 62.0


def test_rank_that_answers_again_has_its_whole_time_again() -> None:
    watched = Watched()
    watched.poll_for(10.0)
    for _ in range(5):
        watched.ranks[0].is_stopped = True
        watched.poll_for(50.0)
        watched.ranks[0].is_stopped = False
        watched.poll_for(6.0)


def test_collective_that_timed_out_is_told_with_what_each_rank_was_at() -> None:
    watched = Watched()
    watched.ranks[1].phase = "saving step 4"
    watched.poll_for(10.0)
    watched.now += 5.0
    error = NeighbourError("learner rank 0", "failed: RuntimeError: Timed out waiting 4000ms for recv operation")
    assert str(watched.watch.explain(error)) == (
        "learner rank 0: waited for another rank longer than learner.rank_timeout_s; last heard: "
        "learner rank 0: loading the policy, 7 s ago; learner rank 1: saving step 4, 7 s ago "
        "(failed: RuntimeError: Timed out waiting 4000ms for recv operation)"
    )


def test_other_errors_of_a_rank_are_told_as_they_are() -> None:
    error = NeighbourError("learner rank 0", "died: worker exited")
    assert Watched().watch.explain(error) is error
