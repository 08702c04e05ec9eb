"""The documents name files that exist, and link to pages that exist; they are short, and their blocks parse."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from protocol.settings.settings import Settings
from tests.reference_pages import SETTINGS_PAGE, settings_page

_ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = ("protocol", "rollout", "rewards", "retriever", "learner", "deploy", "tests", "docs")
_PATH = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|md|sh|yaml|j2|lock))`|`((?:[\w-]+/)+)`")
_LINK = re.compile(r"\]\(((?!https?:)[^)#]*)(?:#([^)]*))?\)")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
_MAX_WORDS = {"metrics.md": 1900, "waits.md": 1700}  # tables alone
# Files of a run, a checkpoint or a user, and examples.
_NOT_OURS = re.compile(
    r"(^|/)(prompts|held_out|my|mine|\w*my_\w+|score|FILE|settings|given|README|report|corpus|config|game|agent|tools)"
    r"\.(py|yaml|jsonl|md|html)$"
    r"|^(runs|checkpoints|logs|state|model|random|path|keys|data|wandb|\.venv)/|/golden/older/$"
)


def test_every_file_that_a_document_names_is_there() -> None:
    missing = {
        f"{document.relative_to(_ROOT)}: {name}"
        for document in _documents()
        for name in map("".join, _PATH.findall(document.read_text("utf-8")))
        if not _NOT_OURS.search(name) and not _is_there(document, name)
    }
    assert missing == set()


def test_every_link_of_a_document_leads_to_a_file_and_a_heading() -> None:
    dead = {
        f"{document.relative_to(_ROOT)}: {name}#{heading}"
        for document in _documents()
        for name, heading in _LINK.findall(document.read_text("utf-8"))
        if not _leads_somewhere(document.parent / name if name else document, heading)
    }
    assert dead == set()


def test_page_of_settings_is_current() -> None:
    assert SETTINGS_PAGE.read_text("utf-8") == settings_page(), "run python -m tests.reference_pages"


def test_settings_of_the_tutorials_are_accepted_and_their_python_compiles() -> None:
    blocks = [block for page in (_ROOT / "docs").rglob("*.md") for block in re.findall(_BLOCK, page.read_text("utf-8"))]
    settings = [yaml.safe_load(text) for kind, text in blocks if kind == "yaml"]
    assert {Settings.model_validate(one).run.name for one in settings} == {"digits", "game"}
    assert all(ast.parse(text) for kind, text in blocks if kind == "python")


def test_documents_have_at_most_1500_words() -> None:
    lengths = {path.name: len(path.read_text("utf-8").split()) for path in _documents() if path != SETTINGS_PAGE}
    assert {name: length for name, length in lengths.items() if length > _MAX_WORDS.get(name, 1500)} == {}


def _documents() -> list[Path]:
    in_folders = (path for folder in _FOLDERS for path in (_ROOT / folder).rglob("*.md"))
    return [_ROOT / "README.md", _ROOT / "CONTRIBUTING.md", *in_folders]


def _leads_somewhere(path: Path, heading: str) -> bool:
    headings = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.M) if heading and path.is_file() else []
    return path.exists() and (not heading or heading in map(_anchor, headings))


def _anchor(heading: str) -> str:
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


def _is_there(document: Path, name: str) -> bool:
    """Return whether a name is a path from the root or from the document, or a file's own name below its folder."""
    if (_ROOT / name).exists() or (document.parent / name).exists():
        return True
    in_room = document.parent != _ROOT and not document.is_relative_to(_ROOT / "docs")
    return any(str(path).endswith(f"/{name.rstrip('/')}") for path in _below(document.parent if in_room else _ROOT))


def _below(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        yield path
        if path.is_dir():
            yield from _below(path)
