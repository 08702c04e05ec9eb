"""The documents name files that exist."""

import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = ("protocol", "rollout", "rewards", "retriever", "learner", "deploy", "tests", "docs")
_PATH = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|md|sh|yaml|j2|lock))`|`((?:[\w-]+/)+)`|\]\(([^)#:]+)\)")
# Files of a run, a checkpoint or a user, and examples.
_NOT_OURS = re.compile(
    r"(^|/)(prompts|held_out|my|mine|my_env|score|FILE|settings|given|README|report|corpus|config)\.(py|yaml|jsonl|md|html)$"
    r"|^(runs|checkpoints|logs|state|model|random|path|keys|\.venv)/|/golden/older/$"
)


def test_every_file_that_a_document_names_is_there() -> None:
    missing = {f"{document.relative_to(_ROOT)}: {name}" for document, name in _named() if not _is_there(document, name)}
    assert missing == set()


def _named() -> Iterator[tuple[Path, str]]:
    in_folders = (path for folder in _FOLDERS for path in (_ROOT / folder).rglob("*.md"))
    documents = [_ROOT / "README.md", _ROOT / "CONTRIBUTING.md", *in_folders]
    for document in documents:
        for groups in _PATH.findall(document.read_text(encoding="utf-8")):
            name = next(filter(None, groups))
            if not _NOT_OURS.search(name):
                yield document, name


def _is_there(document: Path, name: str) -> bool:
    """Return whether a name is a path from the root or from the document, or a file's own name below its folder."""
    if (_ROOT / name).exists() or (document.parent / name).exists():
        return True
    below = document.parent if document.parent != _ROOT else _ROOT
    return any(str(path).endswith(f"/{name.rstrip('/')}") for path in _below(below))


def _below(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        yield path
        if path.is_dir():
            yield from _below(path)
