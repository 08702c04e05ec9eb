"""`sluice diff A B`: where two runs part, from their folders alone.

The parts are compared in the order in which one causes the next: settings, installation, prompts and their order, the
tokens of a prompt, sampled tokens, rewards, batches, the learner's figures, weights. The first that differs is where
the runs part; what follows it may be its consequence. Exit status: 0 without a difference, 1 with one, 2 for a folder
that is not a run's.
"""

import argparse
import json
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from learner.disk.run_folder import CHECKPOINTS, INSTALLATION, LEDGER, SETTINGS, read_only_uri
from learner.report.facts import read_run
from protocol.errors import OperatorError
from protocol.settings.loader import read_yaml

_NAMES = ("run.name", "run.dir", "run.resume")  # name a run and change nothing about it
_FIGURES = ("policy/", "critic/", "preference/", "kto/", "reward_model/")  # of the learner, in metrics.jsonl


@dataclass(frozen=True)
class Finding:
    """One part of two runs."""

    part: str
    difference: str  # the first one, in words; empty: none
    unknown: str = ""  # why the part could not be compared; empty: it was


def find_differences(a: Path, b: Path) -> list[Finding]:
    """Return a finding for each part, in the order of cause and effect."""
    samples = _read_samples(a), _read_samples(b)
    both = sorted(samples[0].keys() & samples[1].keys(), key=lambda key: (samples[0][key]["step"], key))
    pairs = [(key, samples[0][key], samples[1][key]) for key in both]
    no_pair = "" if pairs else "samples.jsonl records no sample of both runs (report.samples_per_step)"
    same_text = [each for each in pairs if each[1]["tokens"] == each[2]["tokens"]]
    lines = read_run(a).lines, read_run(b).lines
    return [
        Finding("settings", _first(_unlike(_flat(read_yaml(a / SETTINGS)), _flat(read_yaml(b / SETTINGS))))),
        Finding("installation", *_of_installations(a, b)),
        Finding("prompts", *_of_ledgers(a, b, _prompts)),
        Finding("order of the prompts", *_of_ledgers(a, b, _order)),
        Finding("tokens of a prompt", _first(_tokens(pairs, is_prompt=True)), no_pair),
        Finding("sampled tokens", _first(_tokens(pairs, is_prompt=False)), no_pair),
        Finding("logprobs of the sampler", _first(_logprobs(same_text)), no_pair),
        Finding("rewards of the same text", _first(_rewards(same_text)), no_pair),
        Finding("batches", *_of_ledgers(a, b, _batches)),
        Finding("figures of the learner", _first(_figures(*lines))),
        Finding("weights", *_weights(a, b)),
    ]


def main(arguments: Sequence[str]) -> int:
    """Return the command's exit status."""
    parser = argparse.ArgumentParser(prog="sluice diff", description="Names where two runs part, from their folders.")
    parser.add_argument("runs", type=Path, nargs=2, metavar="RUN_DIR")
    folders: list[Path] = parser.parse_args(arguments).runs
    try:
        for folder in folders:
            if not (folder / SETTINGS).exists():
                raise OperatorError(f"{folder} is not a run's folder: it has no {SETTINGS}. Give runs/NAME.")
        findings = find_differences(*folders)
    except (OperatorError, sqlite3.Error) as error:
        print(error, file=sys.stderr)
        return 2
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("part", no_wrap=True)
    table.add_column(f"A is {folders[0]}, B is {folders[1]}", overflow="fold")
    for each in findings:
        table.add_row(each.part, Text(each.difference or (f"not compared: {each.unknown}" if each.unknown else "same")))
    Console().print(table)
    first = next((each.part for each in findings if each.difference), None)
    print(f"The runs part at: {first}." if first else "No difference was found.")
    return 1 if first else 0


def _first(differences: Iterator[str]) -> str:
    found = list(differences)
    more = f"; and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{found[0]}{more}" if found else ""


def _unlike(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys([*a, *b]):
        if a.get(name) != b.get(name) and name not in _NAMES:
            yield f"{name} is {a.get(name, 'absent')} in A, {b.get(name, 'absent')} in B"


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, each in value.items():
        flat |= _flat(each, f"{prefix}{name}.") if isinstance(each, dict) and each else {f"{prefix}{name}": each}
    return flat


def _missing(a: Path, b: Path, name: str) -> str:
    """Return why a file of both runs cannot be compared; empty when both have it."""
    return next((f"{folder / name} is missing" for folder in (a, b) if not (folder / name).exists()), "")


def _of_installations(a: Path, b: Path) -> tuple[str, str]:
    if missing := _missing(a, b, INSTALLATION):
        return "", missing
    return _first(_unlike(*(json.loads((folder / INSTALLATION).read_text()) for folder in (a, b)))), ""


def _of_ledgers(
    a: Path, b: Path, compare: Callable[[sqlite3.Connection, sqlite3.Connection], Iterator[str]]
) -> tuple[str, str]:
    """Return the first difference that `compare` finds in both ledgers, and why there is no answer."""
    if missing := _missing(a, b, LEDGER):
        return "", missing
    first, second = (sqlite3.connect(read_only_uri(folder / LEDGER), uri=True) for folder in (a, b))
    with closing(first), closing(second):
        return _first(compare(first, second)), ""


def _prompts(a: sqlite3.Connection, b: sqlite3.Connection) -> Iterator[str]:
    claims = "SELECT key, value FROM meta WHERE key IN ('claim:prompts', 'claim:rows')"
    names = {"claim:prompts": "the prompts of data.train", "claim:rows": "labels or other columns of data.train"}
    of_a, of_b = dict(a.execute(claims)), dict(b.execute(claims))
    yield from (f"{name} differ" for key, name in names.items() if of_a.get(key) != of_b.get(key))


def _order(a: sqlite3.Connection, b: sqlite3.Connection) -> Iterator[str]:
    query = "SELECT epoch, uid FROM prompts ORDER BY position"
    for place, (one, other) in enumerate(zip_longest(a.execute(query), b.execute(query))):
        if one is not None and other is not None and one != other:  # one run may be longer
            yield f"prompt {place} is {one[1]} of epoch {one[0]} in A, {other[1]} of epoch {other[0]} in B"
            return


def _batches(a: sqlite3.Connection, b: sqlite3.Connection) -> Iterator[str]:
    query = (
        'SELECT step, "group", sample_index, oldest_version FROM trajectories '
        "WHERE kind = 'train' AND step IS NOT NULL ORDER BY step, \"group\", sample_index"
    )
    steps = [db.execute("SELECT COALESCE(MAX(step), 0) FROM trajectories").fetchone()[0] for db in (a, b)]
    for one, other in zip_longest(a.execute(query), b.execute(query)):
        if one == other:
            continue
        step = min(row[0] for row in (one, other) if row is not None)
        if step > min(steps):  # one run is shorter
            return
        if one is not None and other is not None and one[:3] == other[:3]:
            yield f"step {step}: sample {one[2]} of {one[1]} is of policy version {one[3]} in A, {other[3]} in B"
        else:
            row, name = min((row[:3], name) for row, name in ((one, "A"), (other, "B")) if row is not None)
            yield f"step {step}: {name} alone trains sample {row[2]} of {row[1]}"
        return


def _read_samples(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the recorded samples of a run by group and place in it; of a repeated step the last ones."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    path, unnumbered = folder / "samples.jsonl", dict[tuple[int, str], int]()
    for text in path.read_bytes().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # cut off by a kill
        place = (line["step"], line["group"])
        unnumbered[place] = unnumbered.get(place, -1) + 1
        found[line["group"], line.get("sample_index", -1 - unnumbered[place])] = line
    return found


_Pair = tuple[tuple[str, int], dict[str, Any], dict[str, Any]]


def _tokens(pairs: Sequence[_Pair], *, is_prompt: bool) -> Iterator[str]:
    for (group, index), a, b in pairs:
        parts = []
        for line in (a, b):
            end = line["num_prompt_tokens"]
            parts.append(line["tokens"][:end] if is_prompt else line["tokens"][end:])
        place = next((i for i, (one, other) in enumerate(zip_longest(*parts)) if one != other), None)
        if place is not None:
            ids = [part[place] if place < len(part) else "the end" for part in parts]
            behind = "" if is_prompt else " behind the prompt"
            yield f"step {a['step']}: sample {index} of {group}: token {place}{behind} is {ids[0]} in A, {ids[1]} in B"


def _logprobs(pairs: Sequence[_Pair]) -> Iterator[str]:
    for (group, index), a, b in pairs:
        each = zip(a.get("logprobs", ()), b.get("logprobs", ()), strict=False)
        if (found := next(((i, one, other) for i, (one, other) in enumerate(each) if one != other), None)) is not None:
            yield f"step {a['step']}: sample {index} of {group}: token {found[0]} has {found[1]} in A, {found[2]} in B"


def _rewards(pairs: Sequence[_Pair]) -> Iterator[str]:
    for (group, index), a, b in pairs:
        if (a["reward"], a["reward_parts"]) != (b["reward"], b["reward_parts"]):
            parts = _first(_unlike(a["reward_parts"], b["reward_parts"])) or "the parts are equal"
            yield f"step {a['step']}: sample {index} of {group}: {a['reward']:g} in A, {b['reward']:g} in B ({parts})"


def _figures(a: Sequence[Mapping[str, float]], b: Sequence[Mapping[str, float]]) -> Iterator[str]:
    others = {line["step"]: line for line in b}
    for line in a:
        if (other := others.get(line["step"])) is not None:
            learnt = [
                {name: each[name] for name in sorted(each) if name.startswith(_FIGURES)} for each in (line, other)
            ]
            yield from (f"step {line['step']:.0f}: {text}" for text in _unlike(*learnt))


def _weights(a: Path, b: Path) -> tuple[str, str]:
    digests: list[dict[str, str]] = []
    for run in (a, b):
        paths = (run / CHECKPOINTS).glob("step_*/MANIFEST.json")
        digests.append({path.parent.name: json.loads(path.read_text())["policy_digest"] for path in paths})
    both = sorted(digests[0].keys() & digests[1].keys())
    unlike = (f"checkpoint {name}" for name in both if digests[0][name] != digests[1][name])
    return _first(unlike), "" if both else "the runs have no checkpoint of the same step"
