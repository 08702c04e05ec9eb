"""The documents name files that exist, and link to pages that exist; they are short, and their blocks parse."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from deploy.command import VERBS
from learner.disk.run_folder import RENAMED
from protocol.settings.settings import Settings
from tests.learner.test_metrics_names import GROUPS, documented
from tests.reference_pages import PAGES, settings_page

_ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = ("protocol", "rollout", "rewards", "retriever", "learner", "deploy", "tests", "docs")
_PATH = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|md|sh|yaml|j2|lock))`|`((?:[\w-]+/)+)`")
_LINK = re.compile(r"\]\(((?!https?:)[^)#]*)(?:#([^)]*))?\)")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
# Files of a run, a checkpoint or a user, and examples.
_NOT_OURS = re.compile(
    r"(^|/)(prompts|held_out|my|mine|\w*my_\w+|score|FILE|settings|given|README|report|corpus|config|game|agent|tools)"
    r"\.(py|yaml|jsonl|md|html)$"
    r"|^(runs|checkpoints|batches|logs|state|model|random|path|keys|data|wandb|tensorboard|cache|\.venv)/|/golden/older/$"
)


def test_every_file_that_a_document_names_is_there() -> None:
    missing = {
        f"{document.relative_to(_ROOT)}: {name}"
        for document in _documents()
        for name in map("".join, _PATH.findall(document.read_text("utf-8")))
        if not _NOT_OURS.search(name) and not _is_there(document, name)
    }
    assert missing == set()


def test_every_test_that_a_document_names_is_there() -> None:
    named = {
        pair for page in _documents() for pair in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text("utf-8"))
    }
    assert len(named) > 15
    assert {(file, name) for file, name in named if f"def {name}(" not in (_ROOT / file).read_text("utf-8")} == set()


def test_every_link_of_a_document_leads_to_a_file_and_a_heading() -> None:
    dead = {
        f"{document.relative_to(_ROOT)}: {name}#{heading}"
        for document in _documents()
        for name, heading in _LINK.findall(document.read_text("utf-8"))
        if not _leads_somewhere(document.parent / name if name else document, heading)
    }
    assert dead == set()


def test_every_page_of_the_site_is_in_its_menu_and_links_to_the_site_alone() -> None:
    docs = _ROOT / "docs"
    pages = list(docs.rglob("*.md"))
    menu = re.findall(r": (\S+\.md)$", (_ROOT / "mkdocs.yml").read_text("utf-8"), re.M)
    assert sorted(menu) == sorted(str(page.relative_to(docs)) for page in pages)
    links = [(page, name) for page in pages for name, _ in _LINK.findall(page.read_text("utf-8"))]
    assert {name for page, name in links if not (page.parent / name).resolve().is_relative_to(docs)} == set()


def test_every_setting_that_a_document_names_exists() -> None:
    settings = {name.replace("[]", "") for name in re.findall(r"^\| `([\w.\[\]]+)` \|", settings_page(), re.M)}
    parts = {name[: dot.start()] for name in settings for dot in re.finditer(r"\.", name)}
    named = re.compile(rf"(?:^|[\s(])(?:--)?((?:{'|'.join(Settings.model_fields)})(?:\.\w+)+)(?![\w/])")
    spans = list(_spans("coming_from.md", "README.md"))
    named_anywhere = {(page.name, name) for page, span in spans for name in named.findall(span)}
    assert len(named_anywhere) > 200
    assert {
        (page, name) for page, name in named_anywhere if name not in settings | parts and not _is_other(name)
    } == set()


def test_every_metric_that_a_document_names_is_in_the_table_of_metrics() -> None:
    names = {re.sub("[A-Z@].*", "", name) for name in documented()}
    named = re.compile(rf"(?:^|\s)((?:{GROUPS})/[a-z_/]+)(?![\w.])")
    named_anywhere = {(page.name, name) for page, span in _spans("metrics.md") for name in named.findall(span)}
    assert named_anywhere
    assert {(page, name) for page, name in named_anywhere if name not in names and not _is_other(name)} == set()
    old = {name for name in RENAMED if "_" in name}
    assert {(page.name, span) for page, span in _spans("metrics.md") if span in old} == set()


def test_every_verb_and_option_that_a_document_names_exists() -> None:
    sources = [path.read_text("utf-8") for path in _below(_ROOT) if path.suffix in (".py", ".sh")]
    known = {option for text in sources for option in re.findall(r"[\"'(| ](--[a-z][\w-]*)", text)} | {"--objective"}
    command = re.compile(r"^(?:sluice (\w[\w-]*)|deploy/\w+\.sh|\S*python -m (?:learner|rewards|retriever)\S*)(.*)")
    commands = [(page.name, *match.groups("")) for page, span in _spans() if (match := command.match(span))]
    assert {(page, verb) for page, verb, _ in commands if verb not in {"", "VERB", *VERBS}} == set()
    option = re.compile(r" (--[a-z][\w-]*)(?![\w.-])")
    assert {(page, name) for page, _, rest in commands for name in option.findall(rest) if name not in known} == set()


def test_generated_pages_are_current() -> None:
    for path, page in PAGES.items():
        assert path.read_text("utf-8") == page(), "run python -m tests.reference_pages"


def test_settings_of_the_tutorials_are_accepted_and_their_python_compiles() -> None:
    blocks = [block for page in (_ROOT / "docs").rglob("*.md") for block in re.findall(_BLOCK, page.read_text("utf-8"))]
    # A settings file's loader replaces the variable.
    settings = [yaml.safe_load(text.replace("$SLUICE_HOME", "/home")) for kind, text in blocks if kind == "yaml"]
    assert {Settings.model_validate(one).run.name for one in settings} == {"digits", "game"}
    assert all(ast.parse(text) for kind, text in blocks if kind == "python")


def test_documents_have_at_most_1500_words_and_rooms_400() -> None:
    lengths = {path: len(path.read_text("utf-8").split()) for path in _documents() if path not in PAGES}
    rooms = [path for path in lengths if path.name == "README.md" and path.relative_to(_ROOT).parts[0] in _FOLDERS[:6]]
    assert {path: length for path, length in lengths.items() if length > (400 if path in rooms else 1500)} == {}


def _spans(*exempt: str) -> Iterator[tuple[Path, str]]:
    """Yield each code span and each line of a shell block, with its document; exempt: pages of other systems' names."""
    for document in _documents():
        text = document.read_text("utf-8") if document.name not in exempt else ""
        lines = (line for kind, block in _BLOCK.findall(text) if kind == "bash" for line in block.splitlines())
        yield from ((document, line) for line in lines)
        yield from ((document, span) for span in re.findall(r"`([^`\n]+)`", _BLOCK.sub("", text)))


def _is_other(name: str) -> bool:
    """Return whether a name in a setting's form is a file, a module, or an argument of vLLM's."""
    module = _ROOT.joinpath(*name.split(".")[:2])
    is_module = module.exists() or module.with_suffix(".py").exists()
    return is_module or name.endswith((".py", ".html", ".sbatch", ".jsonl")) or name.startswith("rollout.engine_args.")


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
