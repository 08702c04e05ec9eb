"""The rollout servers of a running attempt: each is checked at every poll, and pushes go to those that serve.

A new server gets the weights with the first push after it was attached.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from learner.cluster.servers import ServerCalls
from learner.run.server import RunServer
from protocol.errors import OperatorError
from protocol.settings.run_spec import RunSpec

_LAST_START = "the last start of this run"


class RunServers:
    """Call order: note_attached for the servers that are ready, then `poll` every few seconds; it never blocks."""

    def __init__(
        self,
        infos: Sequence[Mapping[str, Any]],
        spec: RunSpec,
        calls: ServerCalls,
        other_index: str = "warn",
        record: Path | None = None,
        *,
        share_devices: bool = False,
        tools: str = "",
        refuse_other_tools: bool = False,
    ) -> None:
        """infos: the fleet's descriptions. other_index: retriever.other_index.

        record: file with the digest of the index that the run's last start searched. share_devices: with ranks.
        tools: digest of the tools that MCP servers offered before the run started; "": unknown. refuse_other_tools: a
        server that is offered others must not serve.
        """
        self._calls = calls
        self._other_index = other_index
        # Digest of each attached server's search index ("": none), and of the last start's until one is known.
        self._digests = {_LAST_START: record.read_text("utf-8")} if record is not None and record.exists() else {}
        self._record = record
        self._tools, self._refuses_other_tools = tools, refuse_other_tools
        self._servers = [RunServer(str(info["name"]), spec, calls, self._check) for info in infos]
        for server, info in zip(self._servers, infos if share_devices else (), strict=False):
            server.place = str(info["node_id"]), list(info["cards"])
        self._late = {str(info["name"]) for info in infos if not info["is_started"]}
        self._pushed_to: tuple[str, ...] = self.ready_names

    @property
    def names(self) -> list[str]:
        return [server.name for server in self._servers]

    @property
    def ready_names(self) -> tuple[str, ...]:
        """The servers whose engines ran when the attempt began."""
        return tuple(name for name in self.names if name not in self._late)

    @property
    def late_names(self) -> list[str]:
        """The servers whose engines start while the run trains."""
        return sorted(self._late)

    @property
    def may_serve(self) -> bool:
        """False when no server serves and none may serve later; True for a run without servers."""
        return not self._servers or any(server.may_serve for server in self._servers)

    def note_attached(self, runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Note that servers are attached; return messages. Raises: OperatorError when their indexes differ."""
        messages = self._check(runs)
        for server in self._servers:
            if server.name in runs:
                server.begin_serving()
        return messages

    def poll(self) -> list[str]:
        """Check every server and restart those that ended; return messages for the user."""
        messages = [message for server in self._servers for message in server.poll()]
        pushed_to = tuple(server.name for server in self._servers if not server.is_new)
        if pushed_to != self._pushed_to:
            self._pushed_to = pushed_to
            self._calls.push_to(pushed_to)
        return messages

    def _check(self, runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return messages about servers that are attached. Raises: OperatorError when they must not serve."""
        digests = self._digests | {name: run.get("content_hash", "") for name, run in runs.items()}
        warning = compare_indexes(digests, self._other_index)
        if found := next((digest for name, digest in digests.items() if digest and name != _LAST_START), None):
            digests.pop(_LAST_START, None)
            if self._record is not None:
                self._record.write_text(found, "utf-8")
        self._digests = digests
        messages = [f"{name}: agents generate at {run['base_url']}" for name, run in runs.items() if "base_url" in run]
        messages += self._check_tools(runs)
        return messages + ([warning] if warning is not None else [])

    def _check_tools(self, runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return a message for each server that offers other tools than the one before it."""
        messages = []
        for name, digest in ((name, digest) for name, run in runs.items() if (digest := run.get("tools_digest"))):
            if self._tools not in ("", digest):
                text = (
                    f"{name}: the tools of tools.mcp have other names, descriptions or parameters than before, or than "
                    "on another node: prompts differ, and scores may not compare."
                )
                if self._refuses_other_tools:
                    raise OperatorError(f"{text} Give the command again when all nodes have the same MCP servers.")
                messages.append(text)
            self._tools = digest
        return messages


def compare_indexes(digests: Mapping[str, str], other_index: str) -> str | None:
    """Return a warning when servers search different indexes: the policy's texts must not depend on its server.

    digests: of each server's index; "" where it has none or its retriever reports none.
    Raises: OperatorError instead of the warning with other_index = refuse.
    """
    known = {server: digest for server, digest in digests.items() if digest}
    if len(set(known.values())) < 2:
        return None
    each = ", ".join(f"{server} searches {digest[:12]}" for server, digest in sorted(known.items()))
    text = (
        f"Rollout servers search different indexes: {each}. The policy's texts depend on its server. Build one "
        "index on every node from the same corpus with the same options, or set retriever.url."
    )
    if other_index == "refuse":
        raise OperatorError(f"{text} With retriever.other_index = warn the run continues.")
    return text
