"""Writes the quick start's files into a folder, unless it has them."""

import hashlib
import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from deploy.quickstart.demonstrations import Recipe

STAMP = "QUICKSTART.json"
FILES = ("corpus.jsonl", "train.jsonl", "eval.jsonl", "warmstart.jsonl", "model/config.json", "model/model.safetensors")


@dataclass(frozen=True)
class QuickstartSettings:
    """Settings of the files' content."""

    seed: int = 0  # random seed of splits, questions, demonstrations and weights
    two_hop_share: float = 0.125  # share of each split's questions that need two searches, 0 to 1
    recipe: Recipe = field(default_factory=Recipe)


def content_key(settings: QuickstartSettings) -> str:
    """Return a hash of the settings, of the source code and of the versions of the facts' packages."""
    from importlib.metadata import version

    package = Path(__file__).parent
    environment = package.parents[1] / "rollout" / "environments" / "search.py"  # source of the observations

    digest = hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode())
    for name in ("pycountry", "tokenizers"):
        digest.update(f"{name} {version(name)}".encode())
    for source in [*sorted(package.glob("*.py")), environment]:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def build_quickstart(out: Path, settings: QuickstartSettings) -> bool:
    """Write the quick start's files into `out`; returns False when they were there.

    The stamp is written last: a folder without it, with another key or with a missing file is written again.
    """
    key = content_key(settings)
    stamp = out / STAMP
    if all((out / name).is_file() for name in (STAMP, *FILES)) and _stamped_key(stamp) == key:
        return False
    out.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    counts = _write_files(out, settings)
    stamp.write_text(json.dumps({"key": key, "settings": asdict(settings), "rows": counts}, indent=2) + "\n")
    return True


def _stamped_key(stamp: Path) -> str | None:
    try:
        key = json.loads(stamp.read_text(encoding="utf-8"))["key"]
    except (ValueError, KeyError, TypeError):
        return None  # truncated, or another program's: the files are written again
    return key if isinstance(key, str) else None


def _write_files(out: Path, settings: QuickstartSettings) -> dict[str, int]:
    from deploy.quickstart.demonstrations import demonstrations
    from deploy.quickstart.facts import load_entities
    from deploy.quickstart.passages import contents
    from deploy.quickstart.policy import write_policy
    from deploy.quickstart.questions import questions, split_entities, unambiguous
    from rollout.environments.search import render_passages

    entities = load_entities()
    splits = split_entities(entities, settings.seed)
    askable = unambiguous(entities)
    corpus = [{"id": entity.id, "contents": contents(entity)} for entity in entities]
    counts = {"corpus": write_rows(out / "corpus.jsonl", corpus)}
    for name in ("train", "eval"):
        rng = _stream(name, settings.seed)
        asked = questions(splits[name], askable, settings.two_hop_share, rng)
        counts[name] = write_rows(out / f"{name}.jsonl", (question.row() for question in asked))
    rng = _stream("warmstart", settings.seed)
    rows = demonstrations(splits["warmstart"], {entity.name for entity in entities}, settings.recipe, rng)
    counts["warmstart"] = write_rows(out / "warmstart.jsonl", rows)
    known = questions(splits["warmstart"], askable, settings.two_hop_share, rng)
    texts = [question.prompt for question in known]
    texts += [render_passages([contents(entity)]) for entity in splits["warmstart"]]
    write_policy(out / "model", texts, settings.seed)
    return counts


def _stream(name: str, seed: int) -> random.Random:
    return random.Random(f"{name} {seed}")  # noqa: S311 - reproducible choices, no secrets


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> int:
    """Write one JSON object a line; returns the number of lines."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            count += 1
    return count
