"""`sluice diff A B`: where two runs part, from their folders alone.

The parts are compared in the order in which one causes the next: settings, installation, models, services, prompts and
their order, tokens, rewards, batches, figures, weights, held-out answers. The first that differs is where the runs
part; what follows it may be its consequence. Exit status: 0 without a difference, 1 with one, 2 for a folder that is
not a run's.
"""

import argparse
import json
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from learner.disk.run_folder import CHECKPOINTS, INSTALLATION, LEARNER_VALUES, LEDGER, MODELS, SETTINGS, read_only_uri
from learner.report.facts import read_run
from protocol.errors import OperatorError
from protocol.settings.loader import read_yaml

_NAMES = ("run.name", "run.dir", "run.resume")  # name a run and change nothing about it
# Figures of metrics.jsonl: of the learner, of an evaluation, and of time and faults, which runs never share. The others
# are of the data.
_OF_LEARNER = ("policy/", "critic/", "preference/", "kto/", "reward_model/", "distill/")
_OF_EVALUATION = ("eval/",)
_OF_TIME = ("time", "at_s", "perf/", "health/", "data/window_used", "data/retried", "data/failed", "data/num_parts")
_ANSWERS = "evaluations.jsonl"
_SHOWN = 60  # last letters of a held-out answer
_VALUES = ("logprobs", "advantages", "entropies")  # of a token, by the learner


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
    num_scored = sum((run / _ANSWERS).exists() for run in (a, b))
    one_scored = _missing(a, b, _ANSWERS) if num_scored == 1 else ""
    of_others = (*_OF_LEARNER, *_OF_EVALUATION, *_OF_TIME)
    return [
        Finding("settings", _first(_unlike(_flat(read_yaml(a / SETTINGS)), _flat(read_yaml(b / SETTINGS))))),
        Finding("installation", *_of_digests(a, b, INSTALLATION)),
        Finding("models at the start", *_of_digests(a, b, MODELS)),
        Finding("services and own code", *_of_ledgers(a, b, _services)),
        Finding("prompts", *_of_ledgers(a, b, _prompts)),
        Finding("order of the prompts", *_of_ledgers(a, b, _order)),
        Finding("tokens of a prompt", _first(_tokens(pairs, "prompt")), no_pair),
        Finding("tokens of the environment", _first(_tokens(pairs, "environment")), no_pair),
        Finding("sampled tokens", _first(_tokens(pairs, "model")), no_pair),
        Finding("logprobs of the sampler", _first(_logprobs(same_text)), no_pair),
        Finding("rewards of the same text", _first(_rewards(same_text)), no_pair),
        Finding("other facts of the same text", _first(_facts(same_text)), no_pair),
        Finding("batches", *_of_ledgers(a, b, _batches)),
        Finding("figures of the data", _first(_figures(*lines, lambda name: not name.startswith(of_others)))),
        Finding(
            "learner's values of the same text",
            _first(_values(a, b, same_text)),
            no_pair or _missing(a, b, LEARNER_VALUES),
        ),
        Finding("figures of the learner", _first(_figures(*lines, lambda name: name.startswith(_OF_LEARNER)))),
        Finding("weights", *_weights(a, b)),
        Finding("held-out answers", _first(chain(_answers(a, b), _figures(*lines, _is_of_evaluation))), one_scored),
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
    ends = [max((int(line["step"]) for line in read_run(folder).lines), default=0) for folder in folders]
    if ends[0] != ends[1]:
        print(f"A ends at step {ends[0]}, B at step {ends[1]}: the steps that only one has were not compared.")
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


def _of_digests(a: Path, b: Path, name: str) -> tuple[str, str]:
    if missing := _missing(a, b, name):
        return "", missing
    return _first(_unlike(*(json.loads((folder / name).read_text()) for folder in (a, b)))), ""


def _of_ledgers(
    a: Path, b: Path, compare: Callable[[sqlite3.Connection, sqlite3.Connection], Iterator[str]]
) -> tuple[str, str]:
    """Return the first difference that `compare` finds in both ledgers, and why there is no answer."""
    if missing := _missing(a, b, LEDGER):
        return "", missing
    first, second = (sqlite3.connect(read_only_uri(folder / LEDGER), uri=True) for folder in (a, b))
    with closing(first), closing(second):
        return _first(compare(first, second)), ""


def _services(a: sqlite3.Connection, b: sqlite3.Connection) -> Iterator[str]:
    """Yield what differs behind equal settings: scorers, users' files, indexes, tools."""
    query = "SELECT key, value FROM meta WHERE key LIKE 'code:%' OR key = 'reward_source'"
    one, other = dict(a.execute(query)), dict(b.execute(query))
    for key in sorted(one.keys() & other.keys()):
        if one[key] != other[key]:
            yield f"{key.removeprefix('code:')} is {one[key]} in A, {other[key]} in B"
    # The same file or scorer may have another path or port.
    rest = [
        {key: each[key] for key in sorted(each.keys() - both.keys())} for each, both in ((one, other), (other, one))
    ]
    if sorted(rest[0].values()) != sorted(rest[1].values()):
        names = [", ".join(key.removeprefix("code:") for key in each) or "none" for each in rest]
        yield f"scorers or own files with other contents: {names[0]} in A, {names[1]} in B"


def _prompts(a: sqlite3.Connection, b: sqlite3.Connection) -> Iterator[str]:
    claims = "SELECT key, value FROM meta WHERE key IN ('claim:prompts', 'claim:rows')"
    names = {"claim:prompts": "the prompts of data.train", "claim:rows": "labels or other columns of data.train"}
    of_a, of_b = dict(a.execute(claims)), dict(b.execute(claims))
    yield from (f"{name} differ" for key, name in names.items() if of_a.get(key) != of_b.get(key))
    sets = "SELECT key, substr(value, 1, instr(value, ' at temperature')) FROM meta WHERE key LIKE 'eval_set:%'"
    of_a, of_b = dict(a.execute(sets)), dict(b.execute(sets))
    for key in sorted(of_a.keys() & of_b.keys()):
        if of_a[key] != of_b[key]:
            yield f"the prompts or labels of the held-out set {key.removeprefix('eval_set:')} differ"


def _order(a: sqlite3.Connection, b: sqlite3.Connection) -> Iterator[str]:
    query = "SELECT epoch, uid FROM prompts ORDER BY position"
    for place, (one, other) in enumerate(zip_longest(a.execute(query), b.execute(query))):
        if one is not None and other is not None and one != other:  # one run may be longer
            yield f"prompt {place} is {one[1]} of epoch {one[0]} in A, {other[1]} of epoch {other[0]} in B"
            return


def _batches(a: sqlite3.Connection, b: sqlite3.Connection) -> Iterator[str]:
    facts = ("policy version", "tokens", "tokens of the model", "reward", "end")
    query = (
        'SELECT step, "group", sample_index, oldest_version, num_tokens, num_model_tokens, reward, finish '
        "FROM trajectories WHERE kind = 'train' AND step IS NOT NULL ORDER BY step, \"group\", sample_index"
    )
    steps = [db.execute("SELECT COALESCE(MAX(step), 0) FROM trajectories").fetchone()[0] for db in (a, b)]
    for one, other in zip_longest(a.execute(query), b.execute(query)):
        if one == other:
            continue
        step = min(row[0] for row in (one, other) if row is not None)
        if step > min(steps):  # one run is shorter
            return
        if one is not None and other is not None and one[:3] == other[:3]:
            unlike = _unlike(dict(zip(facts, one[3:], strict=True)), dict(zip(facts, other[3:], strict=True)))
            yield from (f"step {step}: sample {one[2]} of {one[1]}: {text}" for text in unlike)
            continue
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


def _tokens(pairs: Sequence[_Pair], author: str) -> Iterator[str]:
    """Yield the first difference of each sample that is in tokens of one author: prompt, environment or model."""
    for (group, index), a, b in pairs:
        ends = [line["num_prompt_tokens"] for line in (a, b)]
        is_prompt = author == "prompt"
        parts = [
            line["tokens"][:end] if is_prompt else line["tokens"][end:] for line, end in zip((a, b), ends, strict=True)
        ]
        place = next((i for i, (one, other) in enumerate(zip_longest(*parts)) if one != other), None)
        if place is None:
            continue
        masks = [line["loss_mask"][end + place :][:1] for line, end in zip((a, b), ends, strict=True)]
        if is_prompt or (author == "model") == any(masks[0] + masks[1]):
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


def _facts(pairs: Sequence[_Pair]) -> Iterator[str]:
    for (group, index), a, b in pairs:
        place = f"step {a['step']}: sample {index} of {group}"
        short = [{name: line.get(name) for name in ("label", "finish")} for line in (a, b)]
        yield from (f"{place}: {text}" for text in _unlike(*short))
        for name in ("loss_mask", "version_spans"):
            if name in a and name in b and a[name] != b[name]:
                yield f"{place}: {name} differs"


def _figures(
    a: Sequence[Mapping[str, float]], b: Sequence[Mapping[str, float]], is_wanted: Callable[[str], bool]
) -> Iterator[str]:
    others = {line["step"]: line for line in b}
    for line in a:
        if (other := others.get(line["step"])) is not None:
            wanted = [{name: each[name] for name in sorted(each) if is_wanted(name)} for each in (line, other)]
            yield from (f"step {line['step']:.0f}: {text}" for text in _unlike(*wanted))


def _is_of_evaluation(name: str) -> bool:
    return name.startswith(_OF_EVALUATION)


def _values(a: Path, b: Path, pairs: Sequence[_Pair]) -> Iterator[str]:
    """Yield the first token of each sample of which the learners say something else."""
    step, of_step = -1, [dict[tuple[str, int], dict[str, list[float]]]()] * 2
    for (group, index), line, _ in pairs:
        if line["step"] != step:
            step = line["step"]
            of_step = [_values_of_step(run, step) for run in (a, b)]
        both = [values[group, index] for values in of_step if (group, index) in values]
        for name in _VALUES if len(both) == 2 else ():
            each = enumerate(zip_longest(both[0][name], both[1][name]))
            if (found := next(((place, *two) for place, two in each if two[0] != two[1]), None)) is not None:
                where = f"step {step}: sample {index} of {group}: {name} {found[0]}"
                yield f"{where}: {found[1]} in A, {found[2]} in B"


def _values_of_step(run: Path, step: int) -> dict[tuple[str, int], dict[str, list[float]]]:
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    for path in sorted((run / LEARNER_VALUES).glob(f"step_{step}.rank_*.json")):
        with suppress(ValueError):  # cut off by a kill
            found |= {(row["group"], row["sample_index"]): row for row in json.loads(path.read_bytes())}
    return found


def _answers(a: Path, b: Path) -> Iterator[str]:
    keys = ("step", "set", "uid", "sample", "is_greedy")
    of_runs: list[dict[Any, dict[str, Any]]] = []
    for run in (a, b):
        path, found = run / _ANSWERS, {}
        for text in path.read_bytes().splitlines() if path.exists() else ():
            with suppress(ValueError):  # cut off by a kill
                line = json.loads(text)
                found[tuple(line.get(key) for key in keys)] = line
        of_runs.append(found)
    for key, one in of_runs[0].items():
        other = of_runs[1].get(key, one)
        unlike = (name for name in ("response", "reward", "reward_parts", "finish") if one.get(name) != other.get(name))
        for name in unlike:
            values = [str(each.get(name))[-_SHOWN:] for each in (one, other)]
            place = f"step {key[0]}: sample {key[3]} of {key[2]} in {key[1]}"
            yield f"{place}: {name} {values[0]!r} in A, {values[1]!r} in B"
            break


def _weights(a: Path, b: Path) -> tuple[str, str]:
    digests: list[dict[str, str]] = []
    for run in (a, b):
        paths = (run / CHECKPOINTS).glob("step_*/MANIFEST.json")
        digests.append({path.parent.name: json.loads(path.read_text())["policy_digest"] for path in paths})
    both = sorted(digests[0].keys() & digests[1].keys())
    unlike = (f"checkpoint {name}" for name in both if digests[0][name] != digests[1][name])
    return _first(unlike), "" if both else "the runs have no checkpoint of the same step"
