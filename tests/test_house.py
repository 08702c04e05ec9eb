"""The house keeps its measure: files and functions that fit a screen, small folders, few ways between rooms."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

_ROOT = Path(__file__).resolve().parents[1]
_ROOMS = ("protocol", "rollout", "rewards", "retriever", "learner", "deploy")
_MAX_FILE_LINES = 400
_MIN_FILE_LINES = 30
_MAX_SMALL_FILES = 15
_MAX_FUNCTION_LINES = 50
_MAX_FILES_IN_FOLDER = 24
_MAX_ARROWS_IN_LEARNER = 46


def test_no_file_of_the_product_is_longer_than_its_limit() -> None:
    lengths = {str(path.relative_to(_ROOT)): len(path.read_text().splitlines()) for path in _files()}
    assert {name: length for name, length in lengths.items() if length > _MAX_FILE_LINES} == {}


def test_few_files_of_the_product_are_fragments() -> None:
    # An algorithm may be as short as its formula.
    small = [
        str(path.relative_to(_ROOT))
        for path in _files()
        if len(path.read_text().splitlines()) < _MIN_FILE_LINES
        and path.name not in ("__init__.py", "__main__.py")
        and not path.is_relative_to(_ROOT / "learner" / "algorithms")
    ]
    assert len(small) <= _MAX_SMALL_FILES, small


def test_no_function_of_the_product_is_longer_than_its_limit() -> None:
    too_long = {
        f"{path.relative_to(_ROOT)}:{function.name}": length
        for path in _files()
        for function, length in _functions(path)
        if length > _MAX_FUNCTION_LINES
    }
    assert too_long == {}


def test_no_folder_of_the_product_holds_more_files_than_its_limit() -> None:
    # __init__.py is a docstring and __main__.py a call: readers search for neither.
    folders = Counter(
        str(path.parent.relative_to(_ROOT)) for path in _files() if path.name not in ("__init__.py", "__main__.py")
    )
    assert {name: number for name, number in folders.items() if number > _MAX_FILES_IN_FOLDER} == {}


def test_every_package_says_what_it_is_and_does_nothing_else() -> None:
    # learner.audit is also a library for tests and notebooks: it names its two functions.
    packages = [path for path in _files() if path.name == "__init__.py" and path.parent.name != "audit"]
    assert [str(path) for path in packages if not _is_docstring_alone(path)] == []


def test_learner_rooms_have_few_ways_between_them() -> None:
    assert len(_arrows("learner")) <= _MAX_ARROWS_IN_LEARNER


@pytest.mark.parametrize("room", ["learner", "rollout", "deploy", "protocol"])
def test_rooms_import_each_other_in_one_direction(room: str) -> None:
    arrows = _arrows(room)
    assert {(start, end) for start, end in arrows if (end, start) in arrows} == set()


def _files() -> Iterator[Path]:
    for room in _ROOMS:
        yield from sorted((_ROOT / room).rglob("*.py"))


def _functions(path: Path) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, (node.end_lineno or node.lineno) - node.lineno + 1


def _is_docstring_alone(path: Path) -> bool:
    body = ast.parse(path.read_text()).body
    return len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)


def _arrows(room: str) -> set[tuple[str, str]]:
    """Return the pairs (importing folder, imported folder) directly below a room."""
    graph = grimp.build_graph(room, cache_dir=None)
    arrows = set()
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            start, end = importer.split(".")[1:2], imported.split(".")[1:2]
            if start and end and start != end:
                arrows.add((start[0], end[0]))
    return arrows
