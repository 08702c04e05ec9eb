"""The files of a data set: paths, patterns, folders, and names on the Hugging Face hub.

A hub name is hf:OWNER/NAME[/CONFIG][@REVISION][:SPLIT]. Without a revision, the hub's own Parquet copy is read. Else,
or without a whole copy (of a split above 5 GB the hub copies the first rows, to `partial-SPLIT`), the repository's
Parquet and JSONL files are read that belong to the split. Without a network, files from the local cache are used.
"""

import glob
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from protocol.errors import SettingsError
from protocol.settings.data import DataEntry
from protocol.settings.paths import HUB_PREFIX

_PARQUET_COPY = "refs/convert/parquet"
_SUFFIXES = (".parquet", ".jsonl")
_TIMEOUT_S = 20.0
_SHARD = re.compile(r"(?P<split>.+?)-\d{5}-of-\d{5}(?:-.*)?")  # stem of a file of a split, by the hub's own rule
_NAME = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+|[\w.-]+)(?:/(?P<config>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?(?::(?P<split>[\w.-]+))?"
)
_FORM = "hf:OWNER/NAME[/CONFIG][@REVISION][:SPLIT], for instance hf:openai/gsm8k/main:train"


class HubName(NamedTuple):
    """The parts of a hub name."""

    repo: str
    config: str | None  # None: the only config, or the one named default
    revision: str | None  # None: the Parquet copy, or the newest revision
    split: str


def parse_hub_name(text: str) -> HubName:
    """Return the parsed name, with or without `hf:`. Raises: SettingsError."""
    found = _NAME.fullmatch(text.removeprefix(HUB_PREFIX))
    if found is None:
        raise SettingsError(f"data: {text} is not a name on the Hugging Face hub. Write {_FORM}.")
    return HubName(found["repo"], found["config"], found["revision"], found["split"] or "train")


def fetch(text: str) -> list[Path]:
    """Return the files of a hub name in order, downloaded to the cache.

    Raises: SettingsError when the hub has no such data set, split or config, or cannot be reached.
    """
    name = parse_hub_name(text)
    problem = ""
    for revision in (name.revision,) if name.revision else (_PARQUET_COPY, None):
        try:
            listed = _list(name.repo, revision)
        except Exception as error:  # errors of the hub's HTTP client share no base class
            problem = problem or f"is not in reach of the Hugging Face hub ({type(error).__name__})"
            continue
        if files := choose_files(listed, name):
            return _download(text, name.repo, revision, files)
        of_config = f" in the config {name.config!r}" if name.config else ""
        problem = f"has no Parquet or JSONL file of the split {name.split!r}{of_config}"
    raise SettingsError(f"data: {text} {problem}. Write {_FORM}, or download its files and name them.")


def choose_files(listed: Sequence[str], name: HubName) -> list[str]:
    """Return the repository's files of a split, in order. Raises: SettingsError for several configs."""
    of_config: dict[str, list[str]] = {}
    for file in sorted(listed):
        path = PurePosixPath(file)
        if path.suffix in _SUFFIXES and (config := _config_of(path, name.split)) is not None:
            of_config.setdefault(config, []).append(file)
    if name.config is not None:
        return of_config.get(name.config, [])
    for usual in ("default", "data", ""):
        if usual in of_config:
            return of_config[usual]
    if len(of_config) > 1:
        raise SettingsError(
            f"data: {HUB_PREFIX}{name.repo} has the configs {', '.join(sorted(of_config))}. Name one: "
            f"{HUB_PREFIX}{name.repo}/{min(of_config)}:{name.split}."
        )
    return next(iter(of_config.values()), [])


def _config_of(path: PurePosixPath, split: str) -> str | None:
    """Return the config of a file of this split, "" for a file without config; None for a file of another split.

    Example: main/train/0000.parquet, main/train-00000-of-00001.parquet and main/train.jsonl all give "main";
    main/train_sft-00000-of-00001.parquet is of the split train_sft alone.
    """
    parents = path.parts[:-1]
    if parents and parents[-1] == split:
        return "/".join(parents[:-1])
    shard = _SHARD.fullmatch(path.stem)
    is_of_split = shard["split"] == split if shard else re.fullmatch(rf"{re.escape(split)}(?:[-_.].*)?", path.stem)
    return "/".join(parents) if is_of_split else None


def _list(repo: str, revision: str | None) -> list[str]:
    """Return the files of a revision, from the hub, or from the local cache when the hub cannot be reached."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = HfApi().dataset_info(repo, revision=revision, timeout=_TIMEOUT_S)
        return [file.rfilename for file in info.siblings or []]
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except Exception:
        folder = Path(snapshot_download(repo, revision=revision, repo_type="dataset", local_files_only=True))
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _download(text: str, repo: str, revision: str | None, files: Sequence[str]) -> list[Path]:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(repo, revision=revision, repo_type="dataset", allow_patterns=list(files))
    except Exception as error:
        raise SettingsError(
            f"data: {text} cannot be downloaded from the Hugging Face hub ({type(error).__name__}: {error!s:.200}). "
            "Download its files and name them."
        ) from None
    return [Path(folder) / file for file in files]


# A run keeps every file open, and Parquet files in memory.
_MAX_FILES = 512
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")


class RowFile(NamedTuple):
    path: Path
    name: str  # part of its rows' uids: the file name, numbered when several files have it
    entry: int  # index of its entry in the setting, from 0


def find_files(entries: Sequence[DataEntry]) -> list[RowFile]:
    """Return the files of a data set in their order. Raises: SettingsError for a missing or repeated file."""
    if not entries:
        raise SettingsError("settings: data.train is not set. Give a JSONL or Parquet file of prompts.")
    found: list[RowFile] = []
    seen: dict[Path, str] = {}
    names: Counter[str] = Counter()
    for number, entry in enumerate(entries):
        files = list(_files_of(entry.path))
        _check_forms(entry.path, [path for path, _ in files])
        for path, name in files:
            if (first := seen.get(path.resolve())) is not None:
                raise SettingsError(f"data: {path} is named twice, by {first} and by {entry.path}. Leave one out.")
            seen[path.resolve()] = entry.path
            names[name] += 1
            found.append(RowFile(path, name if names[name] == 1 else f"{names[name]}/{name}", number))
    if len(found) > _MAX_FILES:
        raise SettingsError(f"data: {len(found)} files are named, at most {_MAX_FILES}. Join some of them.")
    return found


def _files_of(given: str) -> Iterator[tuple[Path, str]]:
    """Yield (path, name) of the files of a path, pattern, folder or hub name."""
    if given.startswith(HUB_PREFIX):
        for path in fetch(given):
            yield path, f"{given}/{path.name}"
        return
    path = Path(given)
    if path.is_dir():
        inside = sorted(each for each in path.iterdir() if _has_rows(each))
        if not inside:
            raise SettingsError(f"data: the folder {given} has no *.jsonl and no *.parquet. Name the files.")
    elif not path.exists() and glob.has_magic(given):
        inside = sorted(map(Path, glob.glob(given, recursive=True)))
        if not inside:
            raise SettingsError(f"data: no file is called like {given}. Change the pattern, or name the files.")
    else:
        inside = [path]
    for file in inside:
        _check(file)
        yield file, file.name


def _has_rows(file: Path) -> bool:
    """Return whether a file of a folder belongs to its data set: so does a packed one that is not unpacked beside."""
    unpacked = file.with_suffix("")
    is_packed_alone = file.suffix.lower() in _PACKED and not unpacked.exists()
    return (unpacked if is_packed_alone else file).suffix.lower() in _SUFFIXES


def _check_forms(given: str, files: Sequence[Path]) -> None:
    """Raise SettingsError for two files that differ in their suffix alone: both forms of one file double its rows."""
    of_stem: dict[Path, Path] = {}
    for file in files:
        if (first := of_stem.setdefault(file.with_suffix(""), file)) != file:
            raise SettingsError(
                f"data: {given} has {first.name} and {file.name}, which may be the same rows in two forms. Remove one, "
                "or name the files to read."
            )


def _check(file: Path) -> None:
    if not file.is_file():
        hub = (
            ""
            if file.suffix
            else f" A data set of the Hugging Face hub would be {HUB_PREFIX}{file.parent.name}/{file.name}."
        )
        raise SettingsError(
            f"data: {file} does not exist. Give a JSONL or Parquet file as data.train or data.eval.{hub}"
        )
    if file.suffix.lower() in _PACKED:
        raise SettingsError(f"data: {file} is packed, and rows are read one by one in any order. Unpack it first.")
