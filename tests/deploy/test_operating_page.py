"""docs/look_up/messages.md: every failure message of the code has its line there, and every line its message."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("protocol", "rollout", "rewards", "retriever", "learner", "deploy")
ERRORS = ("OperatorError", "SettingsError", "NeighbourError", "FrameError", "ClusterInUse")
UNKNOWN = "\N{HORIZONTAL ELLIPSIS}"  # what a message fills in


@dataclass(frozen=True)
class Message:
    """A failure message where the code makes it."""

    path: str
    line: int
    text: str


@dataclass(frozen=True)
class Entry:
    """A line of the page."""

    patterns: tuple[str, ...]
    places: tuple[str, ...]

    def is_for(self, message: Message) -> bool:
        return message.path.startswith(self.places) and any(matches(each, message.text) for each in self.patterns)


def matches(pattern: str, text: str) -> bool:
    parts = [re.escape(part.strip()) for part in pattern.split("...") if part.strip()]
    return re.search(".*".join(parts), text) is not None


@cache
def messages() -> tuple[Message, ...]:
    return tuple(
        Message(str(path.relative_to(ROOT)), call.lineno, ": ".join(map(_text, call.args)))
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(call, ast.Call) and getattr(call.func, "id", None) in ERRORS
    )


@cache
def entries() -> tuple[Entry, ...]:
    page = (ROOT / "docs" / "look_up" / "messages.md").read_text("utf-8")
    return tuple(_entries(page))


def _entries(page: str) -> Iterator[Entry]:
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if len(cells) == 3 and cells[0].startswith("`"):
            yield Entry(tuple(re.findall("`([^`]+)`", cells[0])), tuple(re.findall("`([^`]+)`", cells[1])))


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return UNKNOWN


def test_page_has_an_entry_for_every_failure_message() -> None:
    missing = [message for message in messages() if not any(entry.is_for(message) for entry in entries())]
    assert [f"{each.path}:{each.line} {each.text}" for each in missing] == []


def test_every_entry_of_the_page_is_for_a_message() -> None:
    assert [entry for entry in entries() if not any(map(entry.is_for, messages()))] == []


def test_new_message_without_an_entry_is_noticed() -> None:
    stranger = Message("deploy/cluster/start.py", 1, "The moon is down.")
    assert not any(entry.is_for(stranger) for entry in entries())
