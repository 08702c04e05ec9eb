"""Rollout servers, a coordinator and a rank 0 for `RunServers`: they answer when the test lets them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from learner.run.servers import RunServers
from protocol.settings.run_spec import run_spec
from protocol.settings.settings import Settings

SPEC = run_spec(Settings(), "my-run", 1, "tcp://127.0.0.1:1")
OURS = {"run_id": "my-run", "incarnation": 1, "ended": None}


class PlayedCalls:
    """`ServerCalls`: the calls, in order, and their answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []  # (server, method)
        self.pushed_to: list[tuple[str, ...]] = []
        self.lost: list[tuple[str, str]] = []
        self.attached: set[str] = set()
        self.silent: set[str] = set()  # servers that do not answer
        self.errors: dict[str, Exception] = {}  # error of each call to this server, or of this method
        self.runs: dict[str, Any] = {}  # run of this server's description, instead of OURS
        self.node_ip = "127.0.0.1"
        self.cards = ["3"]

    def ask(self, name: str, method: str, *arguments: Any) -> Any:
        self.asked.append((name, method))
        if method == "attach":
            self.attached.add(name)
        return name, method

    def is_done(self, reference: Any) -> bool:
        name, _ = reference
        return name not in self.silent

    def result(self, reference: Any, who: str) -> Any:
        name, method = reference
        for key in (name, method):
            if key in self.errors:
                raise self.errors[key]
        run = self.runs.get(name, OURS if name in self.attached else None)
        return {"run": run, "node_ip": self.node_ip, "node_id": "n0", "cards": self.cards}

    def push_to(self, names: tuple[str, ...]) -> None:
        self.pushed_to.append(names)

    def lose(self, name: str, reason: str) -> None:
        self.lost.append((name, reason))


class PlayedRun:
    """A run with servers s0, s1, ... late: those whose engines have not started yet."""

    def __init__(
        self,
        number: int,
        late: Sequence[str] = (),
        other_index: str = "warn",
        record: Path | None = None,
        *,
        share_devices: bool = False,
        **more: Any,
    ) -> None:
        names = [f"s{each}" for each in range(number)]
        self.calls = PlayedCalls()
        self.calls.silent |= set(late)
        place = {"node_id": "n0", "cards": ["3"]}
        infos = [{"name": name, "is_started": name not in late, **place} for name in names]
        self.servers = RunServers(
            infos, SPEC, self.calls, other_index, record=record, share_devices=share_devices, **more
        )
        ready = {name: {"content_hash": ""} for name in names if name not in late}
        self.calls.attached |= set(ready)
        self.servers.note_attached(ready)

    def poll(self, times: int = 12) -> list[str]:
        return [message for _ in range(times) for message in self.servers.poll()]
