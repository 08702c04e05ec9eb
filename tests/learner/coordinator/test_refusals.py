"""What a server brings back that is not trained: its tokens are counted, its sample goes out again."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.audit.counts import Tokens, count_tokens
from learner.audit.run import AuditedRun
from learner.coordinator.coordinator import Coordinator
from learner.coordinator.steps.record import RunRecord
from learner.data.prompts import Prompt
from learner.ledger.ledger import Ledger
from protocol.settings.settings import Settings
from protocol.wire import messages as m
from tests.protocol.wire.examples import make_trajectory

STAMP: dict[str, Any] = {"run_id": "r1", "incarnation": 1}


class Servers:
    """Rollout servers that talk with a coordinator, one message at a time."""

    def __init__(self, folder: Path, vocab_size: int | None = 4) -> None:
        self.folder = folder
        self.ledger = Ledger(folder / "ledger.sqlite")
        settings = Settings.model_validate({"rollout": {"group_size": 2}, "learner": {"groups_per_step": 2}})
        prompts = [Prompt(f"p{i}", f"question {i}", f"answer {i}", {}) for i in range(4)]
        record = RunRecord(folder, 0)
        self.coordinator = Coordinator(
            settings, "r1", self.ledger, prompts, [], record, last_step=0, vocab_size=vocab_size
        )

    def tell(self, server: str, message: m.Message, buffers: list[bytes] | None = None) -> list[m.Message]:
        """Return what the coordinator says to this server then, pings left out."""
        self.coordinator.receive(server, message, buffers or [], 1000.0)
        self.coordinator.advance(1000.0)
        outgoing = self.coordinator.take_outgoing()
        return [answer for to, answer, _ in outgoing if to == server and not isinstance(answer, m.Ping)]

    def lease(self, server: str = "s1") -> m.Lease:
        demand = m.Demand(**STAMP, num_groups=1, policy_version=0, heard_of_lease=0, leases={})
        (lease,) = self.tell(server, demand)
        assert isinstance(lease, m.Lease)
        return lease

    def fail(self, server: str, lease: m.Lease, index: int, num_model_tokens: int) -> list[m.Message]:
        failed = m.SampleFailed(
            **STAMP,
            group=lease.group,
            sample_index=index,
            attempt=lease.attempt,
            boundary="reward:em",
            detail="503",
            num_model_tokens=num_model_tokens,
        )
        return self.tell(server, failed)

    def deliver(self, lease: m.Lease, tokens: list[int]) -> m.Ack:
        """Deliver sample 0 of a lease with these four tokens, the last two of which the policy wrote."""
        trajectory = make_trajectory(lease.group, 0, "s1", 0, attempt=lease.attempt, incarnation=1)
        trajectory = replace(trajectory, tokens=np.array(tokens, np.int32))
        (ack,) = self.tell("s1", m.TrajectoryDone(**STAMP, facts=trajectory.facts), trajectory.to_buffers())
        assert isinstance(ack, m.Ack)
        return ack

    def wasted(self) -> list[Tokens]:
        """Return what the audit tells of this ledger's wasted tokens."""
        with closing(sqlite3.connect(self.folder / "ledger.sqlite")) as db:
            trained, *wasted = count_tokens(AuditedRun(self.folder, Settings(), [], db, b"", []))
        assert trained == Tokens("trained", 0, 0)
        return wasted


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(tmp_path)
    yield servers
    servers.ledger.close()


# -- samples that a neighbour failed ----------------------------------------------------------------------------------


def test_tokens_written_before_a_neighbour_failed_are_wasted_by_its_failure(servers: Servers) -> None:
    lease = servers.lease()
    servers.fail("s1", lease, 0, 412)
    servers.fail("s1", lease, 1, 8)
    assert servers.wasted() == [Tokens("failed", 2, 420)]


def test_each_attempt_s_tokens_are_wasted(servers: Servers) -> None:
    for num_model_tokens in (10, 20):
        servers.fail("s1", servers.lease(), 0, num_model_tokens)
    assert servers.wasted() == [Tokens("failed", 2, 30)]


def test_failure_before_the_first_token_wastes_none(servers: Servers) -> None:
    servers.fail("s1", servers.lease(), 0, 0)
    assert servers.wasted() == []


def test_failure_told_twice_wastes_its_tokens_once(servers: Servers) -> None:
    lease = servers.lease()
    for _ in range(2):
        (ack,) = servers.fail("s1", lease, 0, 412)
        assert isinstance(ack, m.Ack)
        assert ack.outcome == "returned"
    assert servers.wasted() == [Tokens("failed", 1, 412)]


def test_failure_told_by_a_server_that_does_not_hold_the_sample_wastes_nothing(servers: Servers) -> None:
    lease = servers.lease()
    servers.fail("s2", lease, 0, 412)
    assert servers.wasted() == []


# -- tokens that the policy does not know -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ([1, 2, 3, 4], "holds the token 4, the policy's vocabulary has 4"),  # written by the policy
        ([2**31 - 1, 2, 3, 3], "holds the token 2147483647, the policy's vocabulary has 4"),  # of the prompt
        ([1, 2, -1, 3], "holds the token -1, expected 0 or more"),
    ],
)
def test_token_outside_the_vocabulary_is_refused_and_its_sample_leased_again(
    servers: Servers, tokens: list[int], problem: str
) -> None:
    lease = servers.lease()
    ack = servers.deliver(lease, tokens)
    assert (ack.outcome, ack.detail) == ("rejected", f"$.facts.tokens: {problem}")
    assert servers.coordinator.counts["rejected:vocabulary"] == 1
    assert servers.wasted() == [Tokens("rejected", 1, 2)]
    again = servers.lease()
    assert (again.group, again.attempt, again.sample_indices) == (lease.group, 2, [0])


def test_last_token_of_the_vocabulary_is_taken(servers: Servers) -> None:
    assert servers.deliver(servers.lease(), [0, 1, 2, 3]).outcome == "accepted"


def test_any_token_is_taken_when_the_model_does_not_tell_its_vocabulary(tmp_path: Path) -> None:
    servers = Servers(tmp_path, vocab_size=None)
    assert servers.deliver(servers.lease(), [0, 1, 2, 2**31 - 1]).outcome == "accepted"
    servers.ledger.close()
