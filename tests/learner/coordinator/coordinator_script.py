"""A coordinator under a script: messages of servers and ranks in, exact messages out, exact books.

No sockets and no threads; the clock
is a number.
"""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from learner.coordinator.coordinator import Coordinator
from learner.coordinator.groups.eval_scores import HeldOutSet
from learner.coordinator.groups.written_answers import WrittenAnswers
from learner.coordinator.steps.record import RunRecord
from learner.data.prompts import Prompt
from learner.ledger.ledger import Ledger
from learner.rank.coordinator_client import open_batch
from protocol.settings.settings import Settings
from protocol.wire import messages as m
from protocol.wire.trajectory import Trajectory
from tests.protocol.wire.examples import make_trajectory

M = TypeVar("M", bound=m.Message)


def settings_of(**sections: dict[str, Any]) -> Settings:
    """Return settings of three steps of two groups of two samples, with these values in place of the usual ones."""
    base: dict[str, dict[str, Any]] = {
        "run": {"max_steps": 3},
        "rollout": {"group_size": 2, "lease_timeout_s": 100},
        "learner": {"groups_per_step": 2, "max_staleness": 1},
    }
    return Settings.model_validate({name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}})


def prompts(number: int, prefix: str = "p") -> list[Prompt]:
    """Return so many prompts, with uids p0, p1 and so on."""
    return [Prompt(f"{prefix}{i}", f"question {i}", f"answer {i}", {}) for i in range(number)]


class Script:
    """A coordinator, a clock, and what it has sent and nobody has looked at yet."""

    def __init__(
        self,
        folder: Path,
        settings: Settings | None = None,
        num_prompts: int = 8,
        num_held_out: int = 0,
        step: int = 0,
        more_sets: Sequence[HeldOutSet] = (),
        vocab_size: int | None = None,
        answers: WrittenAnswers | None = None,
        services: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.now = 1000.0
        self.ledger = Ledger(folder / "ledger.sqlite")
        wanted = settings or settings_of()
        train, held_out = prompts(num_prompts), prompts(num_held_out, "h")[: wanted.eval.num_prompts]
        sets = [HeldOutSet(held_out, wanted.eval.samples), *more_sets] if held_out else []
        record = RunRecord(folder, 0)
        self.coordinator = Coordinator(
            wanted,
            "r1",
            self.ledger,
            train,
            sets,
            record,
            step,
            vocab_size=vocab_size,
            answers=answers,
            services=services,
        )
        self.stamp: dict[str, Any] = {"run_id": "r1", "incarnation": self.coordinator.incarnation}
        self.mail: list[tuple[str, m.Message, list[bytes]]] = []

    # -- a turn of the loop -------------------------------------------------------------------------------------------

    def tell(self, peer: str, message: m.Message, buffers: list[bytes] | None = None) -> None:
        self.coordinator.receive(peer, message, buffers or [], self.now)

    def advance(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.coordinator.advance(self.now)
        self.mail += [(peer, *_open_mail(*sent)) for peer, *sent in self.coordinator.take_outgoing()]

    def take(self, peer: str, kind: type[M]) -> list[M]:
        """Take the messages of one kind to one peer out of the mail."""
        self.advance()
        taken = [message for to, message, _ in self.mail if to == peer and isinstance(message, kind)]
        self.mail = [entry for entry in self.mail if not (entry[0] == peer and isinstance(entry[1], kind))]
        return taken

    # -- a rollout server ---------------------------------------------------------------------------------------------

    def demand(
        self,
        server: str = "s1",
        num_groups: int = 100,
        version: int | None = 0,
        heard_of: int = 0,
        here: dict[str, int] | None = None,
        **more: Any,
    ) -> list[m.Lease]:
        """Have a server ask for groups, as `want`; returns the leases it is given."""
        self.want(server, num_groups, version, heard_of, here, **more)
        return self.take(server, m.Lease)

    def want(
        self,
        server: str,
        num_groups: int,
        version: int | None = 0,
        heard_of: int = 0,
        here: dict[str, int] | None = None,
        **more: Any,
    ) -> None:
        """Have a server say that it wants groups beyond those on the way. heard_of, here: what it says of others."""
        known = self.coordinator._servers._servers.get(server)
        num_on_the_way = sum(number > heard_of for number in known.unheard) if known is not None else 0
        demand = m.Demand(
            **self.stamp,
            num_groups=num_groups + num_on_the_way,
            policy_version=version,
            heard_of_lease=heard_of,
            leases=here or {},
            **more,
        )
        self.tell(server, demand)

    def finish(self, server: str, lease: m.Lease, version: int = 0, reward: float = 0.5) -> list[str]:
        """Have a server deliver every sample of a lease; returns the outcomes it is told."""
        return [self.deliver(server, lease, index, version, reward).outcome for index in lease.sample_indices]

    def demand_and_finish(
        self, server: str = "s1", num_groups: int = 100, version: int = 0, reward: float = 0.5
    ) -> None:
        """Have a server deliver every sample that it is leased."""
        for lease in self.demand(server, num_groups, version):
            self.finish(server, lease, version, reward)

    def deliver(
        self, peer: str, lease: m.Lease, index: int, version: int = 0, reward: float = 0.5, **changes: Any
    ) -> m.Ack:
        return self.send_trajectory(peer, self.trajectory(peer, lease, index, version, reward, **changes))

    def trajectory(
        self, peer: str, lease: m.Lease, index: int, version: int = 0, reward: float = 0.5, **changes: Any
    ) -> Trajectory:
        """Return what a server makes of one sample of a lease."""
        facts: dict[str, Any] = {
            "server": peer,
            "kind": lease.kind,
            "attempt": lease.attempt,
            "is_greedy": index in lease.greedy_indices,
            "incarnation": lease.incarnation,
        }
        return make_trajectory(lease.group, index, version=version, reward=reward, **(facts | changes))

    def send_trajectory(self, server: str, trajectory: Trajectory) -> m.Ack:
        self.tell(server, m.TrajectoryDone(**self.stamp, facts=trajectory.facts), trajectory.to_buffers())
        (ack,) = self.take(server, m.Ack)
        return ack

    def fail(
        self,
        server: str,
        lease: m.Lease,
        index: int,
        detail: str = "503",
        num_model_tokens: int = 0,
        place: str | msgspec.UnsetType = msgspec.UNSET,
    ) -> m.Ack:
        failed = m.SampleFailed(
            **self.stamp,
            group=lease.group,
            sample_index=index,
            attempt=lease.attempt,
            boundary="reward:em",
            detail=detail,
            num_model_tokens=num_model_tokens,
            place=place,
        )
        self.tell(server, failed)
        (ack,) = self.take(server, m.Ack)
        return ack

    # -- a learner rank -----------------------------------------------------------------------------------------------

    def ask(self, step: int, rank: int = 0, part: int | msgspec.UnsetType = msgspec.UNSET) -> list[m.Message]:
        """Have a rank ask for its batch; returns what it is answered at once. part: of a step in parts."""
        self.tell(f"rank-{rank}", m.NextBatch(**self.stamp, step=step, rank=rank, part=part))
        return self.take(f"rank-{rank}", m.Message)

    def batch(self, step: int, rank: int = 0, part: int | msgspec.UnsetType = msgspec.UNSET) -> m.Batch:
        (answer,) = self.ask(step, rank, part)
        assert isinstance(answer, m.Batch), answer
        return answer

    def step(self, step: int, version: int, is_applied: bool = True, detail: str = "", **metrics: float) -> None:
        stepped = m.StepEnd(
            **self.stamp,
            step=step,
            policy_version=version,
            is_applied=is_applied,
            detail=detail,
            metrics={"policy/loss": 0.25, **metrics},
        )
        self.tell("rank-0", stepped)
        assert len(self.take("rank-0", m.Done)) == 1

    def train(self, step: int, reward: float = 0.5) -> None:
        """Take a step on the version before it: s1 is leased what may go out and delivers it, rank 0 trains."""
        self.demand_and_finish(version=step - 1, reward=reward)
        self.batch(step)
        self.step(step, version=step)

    # -- the books ----------------------------------------------------------------------------------------------------

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        self.advance()
        with closing(sqlite3.connect(self.folder / "ledger.sqlite")) as db:
            return db.execute(query).fetchall()

    def states(self) -> dict[str, int]:
        return dict(self.rows("SELECT state, count(*) FROM prompts GROUP BY state"))

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    def resume(self, step: int, **sections: dict[str, Any]) -> "Script":
        """Return the next start of this run, on the same ledger."""
        self.ledger.close()
        return Script(self.folder, settings_of(**sections), step=step)


def _open_mail(message: m.Message, buffers: list[bytes]) -> tuple[m.Message, list[bytes]]:
    """Return a message as its peer uses it: the facts of a batch are in a frame."""
    return (open_batch(message, buffers)[0] if isinstance(message, m.Batch) else message), buffers
