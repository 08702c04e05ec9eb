"""`sluice diff A B`: where two runs part, from their folders alone.

The parts are compared in the order in which one causes the next: settings, installation, models, services, prompts and
their order, tokens, rewards, batches, figures, weights, held-out answers. The first of the earliest step is where the
runs part: a reward of step 1 comes before the tokens of step 2. Held-out answers change no step, so they come last.
Exit status: 0 without a difference, 1 with one, 2 for a folder that is not a run's, or cannot be read.
"""

import argparse
import json
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from learner.disk.run_folder import CHECKPOINTS, INSTALLATION, LEARNER_VALUES, LEDGER, MODELS, SETTINGS, read_only_uri
from learner.report.facts import read_run
from learner.report.recorded_lines import VALUES, LearnerValues, read_lines, read_samples, values_of_step
from protocol.errors import OperatorError
from protocol.settings.loader import read_yaml

_NAMES = ("run.name", "run.dir", "run.resume")  # name a run and change nothing about it
# Figures of metrics.jsonl: of the learner, of an evaluation, and of time and faults, which runs never share. The others
# are of the data.
_OF_LEARNER = ("policy/", "critic/", "preference/", "kto/", "reward_model/", "distill/")
_OF_EVALUATION = ("eval/",)
_OF_TIME = (
    *("time", "at_s", "perf/", "health/", "data/window_used", "data/retried", "data/failed", "data/num_parts"),
    *("eval/failed", "eval/version_"),
)
# Settings that name files whose contents other parts compare: their folder may differ.
_OF_FILES = ("policy.model", "critic.model", "reference.model", "data.train", "data.eval", "rollout.environment")
_OWN_CODE = ("learner.advantage", "learner.loss", "learner.correction")
_ANSWERS = "evaluations.jsonl"
_SHOWN = 60  # last letters of a held-out answer
_LAST = "held-out answers"  # part without consequences
_Difference = tuple[int, str]  # step, 0 before the first; what differs


@dataclass(frozen=True)
class Finding:
    """One part of two runs."""

    part: str
    difference: str  # the first one, in words; empty: none
    unknown: str = ""  # why the part could not be compared; empty: it was
    step: int = 0  # step of the difference; 0: before the first


def find_differences(a: Path, b: Path) -> list[Finding]:
    """Return a finding for each part, in the order of cause and effect."""
    samples = read_samples(a), read_samples(b)
    both = sorted(samples[0].keys() & samples[1].keys(), key=lambda key: (samples[0][key]["step"], key))
    pairs = [(key, samples[0][key], samples[1][key]) for key in both]
    no_pair = "" if pairs else "samples.jsonl records no sample of both runs (report.samples_per_step)"
    same_text = [each for each in pairs if each[1]["tokens"] == each[2]["tokens"]]
    lines = read_run(a).lines, read_run(b).lines
    num_scored = sum((run / _ANSWERS).exists() for run in (a, b))
    one_scored = _missing(a, b, _ANSWERS) if num_scored == 1 else ""
    of_others = (*_OF_LEARNER, *_OF_EVALUATION, *_OF_TIME)
    no_lines = "" if all(lines) else "metrics.jsonl has no step of both runs"
    settings = [_without_folders(_flat(read_yaml(run / SETTINGS))) for run in (a, b)]
    return [
        _finding("settings", _at(0, _unlike(*settings))),
        _finding("installation", *_of_digests(a, b, INSTALLATION)),
        _finding("models at the start", *_of_digests(a, b, MODELS)),
        _finding("services and own code", *_of_ledgers(a, b, _services)),
        _finding("prompts", *_of_ledgers(a, b, _prompts)),
        _finding("order of the prompts", *_of_ledgers(a, b, _order)),
        _finding("tokens of a prompt", _tokens(pairs, "prompt"), no_pair),
        _finding("tokens of the environment", _tokens(pairs, "environment"), no_pair),
        _finding("sampled tokens", _tokens(pairs, "model"), no_pair),
        _finding("logprobs of the sampler", _logprobs(same_text), no_pair),
        _finding("rewards of the same text", _rewards(same_text), no_pair),
        _finding("other facts of the same text", _facts(same_text), no_pair),
        _finding("batches", *_of_ledgers(a, b, _batches)),
        _finding("figures of the data", _figures(*lines, lambda name: not name.startswith(of_others)), no_lines),
        _finding(
            "learner's values of the same text", _values(a, b, same_text), no_pair or _missing(a, b, LEARNER_VALUES)
        ),
        _finding("figures of the learner", _figures(*lines, lambda name: name.startswith(_OF_LEARNER)), no_lines),
        _finding("weights", *_weights(a, b)),
        _finding(_LAST, chain(_answers(a, b), _figures(*lines, _is_of_evaluation)), one_scored),
    ]


def first_of(findings: Sequence[Finding]) -> Finding | None:
    """Return where the runs part; None without a difference."""
    different = [each for each in findings if each.difference]
    return min(different, key=lambda each: (each.part == _LAST, each.step), default=None)


def main(arguments: Sequence[str]) -> int:
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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"A file of {folders[0]} or {folders[1]} was changed or cut off: {error!r}.", file=sys.stderr)
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
    if (first := first_of(findings)) is not None:
        print(f"The runs part at: {first.part}{f' of step {first.step}' if first.step else ''}.")
        return 1
    unknown = ", ".join(each.part for each in findings if each.unknown)
    print(f"No difference was found{f' in the other parts. Not compared: {unknown}' if unknown else ''}.")
    return 0


def _finding(part: str, differences: Iterator[_Difference], unknown: str = "") -> Finding:
    found = list(differences)
    more = f"; and {len(found) - 1} more" if len(found) > 1 else ""
    if not found:
        return Finding(part, "", unknown)
    step, text = found[0]
    return Finding(part, f"{text}{more}", unknown, step)


def _at(step: int, texts: Iterable[str], place: str = "") -> Iterator[_Difference]:
    """Yield differences of one step. place: sample of the step."""
    where = (f"step {step}: " if step else "") + (f"{place}: " if place else "")
    yield from ((step, f"{where}{text}") for text in texts)


def _without_folders(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat settings with the names of files and folders whose contents are compared in place of their paths."""
    return {name: _name_of(value) if name in (*_OF_FILES, *_OWN_CODE) else value for name, value in settings.items()}


def _name_of(value: Any) -> Any:
    if isinstance(value, list):
        return [_name_of(each) for each in value]
    if isinstance(value, dict):
        return {name: _name_of(each) for name, each in value.items()}
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


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


def _of_digests(a: Path, b: Path, name: str) -> tuple[Iterator[_Difference], str]:
    if missing := _missing(a, b, name):
        return iter(()), missing
    return _at(0, _unlike(*(json.loads((folder / name).read_text()) for folder in (a, b)))), ""


def _of_ledgers(
    a: Path, b: Path, compare: Callable[[sqlite3.Connection, sqlite3.Connection], Iterator[_Difference]]
) -> tuple[Iterator[_Difference], str]:
    """Return the differences that `compare` finds in both ledgers, and why there is no answer."""
    if missing := _missing(a, b, LEDGER):
        return iter(()), missing
    first, second = (sqlite3.connect(read_only_uri(folder / LEDGER), uri=True) for folder in (a, b))
    with closing(first), closing(second):
        return iter(list(compare(first, second))), ""


def _services(a: sqlite3.Connection, b: sqlite3.Connection) -> Iterator[_Difference]:
    """Yield what differs behind equal settings: scorers, users' files, indexes, tools."""
    query = "SELECT key, value FROM meta WHERE key LIKE 'code:%' OR key = 'reward_source'"
    one, other = dict(a.execute(query)), dict(b.execute(query))
    for key in sorted(one.keys() & other.keys()):
        if one[key] != other[key]:
            yield 0, f"{key.removeprefix('code:')} is {one[key]} in A, {other[key]} in B"
    # The same file or scorer may have another path or port.
    rest = [
        {key: each[key] for key in sorted(each.keys() - both.keys())} for each, both in ((one, other), (other, one))
    ]
    if sorted(rest[0].values()) != sorted(rest[1].values()):
        names = [", ".join(key.removeprefix("code:") for key in each) or "none" for each in rest]
        yield 0, f"scorers or own files with other contents: {names[0]} in A, {names[1]} in B"


def _prompts(a: sqlite3.Connection, b: sqlite3.Connection) -> Iterator[_Difference]:
    claims = "SELECT key, value FROM meta WHERE key IN ('claim:prompts', 'claim:rows')"
    names = {"claim:prompts": "the prompts of data.train", "claim:rows": "labels or other columns of data.train"}
    of_a, of_b = dict(a.execute(claims)), dict(b.execute(claims))
    yield from ((0, f"{name} differ") for key, name in names.items() if of_a.get(key) != of_b.get(key))
    sets = "SELECT key, substr(value, 1, instr(value, ' at temperature')) FROM meta WHERE key LIKE 'eval_set:%'"
    of_a, of_b = dict(a.execute(sets)), dict(b.execute(sets))
    for key in sorted(of_a.keys() & of_b.keys()):
        if of_a[key] != of_b[key]:
            yield 0, f"the prompts or labels of the held-out set {key.removeprefix('eval_set:')} differ"


def _order(a: sqlite3.Connection, b: sqlite3.Connection) -> Iterator[_Difference]:
    query = "SELECT epoch, uid, COALESCE(step, ?) FROM prompts ORDER BY position"  # a curriculum follows rewards
    rows = [db.execute(query, (sys.maxsize,)) for db in (a, b)]
    for place, (one, other) in enumerate(zip_longest(*rows)):
        if one is not None and other is not None and one[:2] != other[:2]:  # one run may be longer
            text = f"prompt {place} is {one[1]} of epoch {one[0]} in A, {other[1]} of epoch {other[0]} in B"
            yield min(one[2], other[2]), text
            return


def _batches(a: sqlite3.Connection, b: sqlite3.Connection) -> Iterator[_Difference]:
    versions, counts = ("policy version", "newest policy version"), ("tokens", "tokens of the model", "turns")
    facts = (*versions, *counts, "reward", "end", "parts of the reward")
    query = (
        'SELECT step, "group", sample_index, oldest_version, newest_version, num_tokens, num_model_tokens, num_turns, '
        "reward, finish, reward_parts FROM trajectories WHERE kind = 'train' AND step IS NOT NULL "
        'ORDER BY step, "group", sample_index'
    )
    steps = [db.execute("SELECT COALESCE(MAX(step), 0) FROM trajectories").fetchone()[0] for db in (a, b)]
    for one, other in zip_longest(a.execute(query), b.execute(query)):
        if one == other:
            continue
        step = min(row[0] for row in (one, other) if row is not None)
        if step > min(steps):  # one run is shorter
            return
        if one is not None and other is not None and one[:3] == other[:3]:
            unlike = _unlike(*(dict(zip(facts, row[3:], strict=True)) for row in (one, other)))
            yield from _at(step, unlike, f"sample {one[2]} of {one[1]}")
            continue
        row, name = min((row[:3], name) for row, name in ((one, "A"), (other, "B")) if row is not None)
        yield step, f"step {step}: {name} alone trains sample {row[2]} of {row[1]}"
        return


_Pair = tuple[tuple[str, int], dict[str, Any], dict[str, Any]]


def _tokens(pairs: Sequence[_Pair], author: str) -> Iterator[_Difference]:
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
            text = f"token {place}{behind} is {ids[0]} in A, {ids[1]} in B"
            yield from _at(a["step"], [text], f"sample {index} of {group}")


def _logprobs(pairs: Sequence[_Pair]) -> Iterator[_Difference]:
    for (group, index), a, b in pairs:
        each = zip(a.get("logprobs", ()), b.get("logprobs", ()), strict=False)
        if (found := next(((i, one, other) for i, (one, other) in enumerate(each) if one != other), None)) is not None:
            text = f"token {found[0]} has {found[1]} in A, {found[2]} in B"
            yield from _at(a["step"], [text], f"sample {index} of {group}")


def _rewards(pairs: Sequence[_Pair]) -> Iterator[_Difference]:
    for (group, index), a, b in pairs:
        if (a["reward"], a["reward_parts"]) != (b["reward"], b["reward_parts"]):
            parts = "; ".join(_unlike(a["reward_parts"], b["reward_parts"])) or "the parts are equal"
            text = f"{a['reward']:g} in A, {b['reward']:g} in B ({parts})"
            yield from _at(a["step"], [text], f"sample {index} of {group}")


def _facts(pairs: Sequence[_Pair]) -> Iterator[_Difference]:
    for (group, index), a, b in pairs:
        short = [{name: line.get(name) for name in ("label", "finish")} for line in (a, b)]
        long = [name for name in ("loss_mask", "version_spans") if name in a and name in b and a[name] != b[name]]
        texts = chain(_unlike(*short), (f"{name} differs" for name in long))
        yield from _at(a["step"], texts, f"sample {index} of {group}")


def _figures(
    a: Sequence[Mapping[str, float]], b: Sequence[Mapping[str, float]], is_wanted: Callable[[str], bool]
) -> Iterator[_Difference]:
    of_a, of_b = ({int(line["step"]): line for line in lines} for lines in (a, b))
    last = min(max(lines, default=0) for lines in (of_a, of_b))  # one run may be longer
    for step in sorted(each for each in {*of_a, *of_b} if each <= last):
        if step in of_a and step in of_b:
            wanted = [
                {name: lines[step][name] for name in sorted(lines[step]) if is_wanted(name)} for lines in (of_a, of_b)
            ]
            yield from _at(step, _unlike(*wanted))
        elif step:
            yield from _at(step, [f"{'A' if step in of_a else 'B'} alone has figures"])


def _is_of_evaluation(name: str) -> bool:
    return name.startswith(_OF_EVALUATION) and not name.startswith(_OF_TIME)


def _values(a: Path, b: Path, pairs: Sequence[_Pair]) -> Iterator[_Difference]:
    """Yield the first token of each sample of which the learners say something else."""
    step, of_step = -1, [dict[tuple[str, int], LearnerValues]()] * 2
    for (group, index), line, _ in pairs:
        if line["step"] != step:
            step = line["step"]
            of_step = [values_of_step(run, step) for run in (a, b)]
        both = [values[group, index] for values in of_step if (group, index) in values]
        for name in VALUES if len(both) == 2 else ():
            each = enumerate(zip_longest(*(getattr(values, name) for values in both)))
            if (found := next(((place, *two) for place, two in each if two[0] != two[1]), None)) is not None:
                text = f"{name} {found[0]}: {found[1]} in A, {found[2]} in B"
                yield from _at(step, [text], f"sample {index} of {group}")


def _answers(a: Path, b: Path) -> Iterator[_Difference]:
    keys = ("step", "set", "uid", "sample", "is_greedy")
    of_a, of_b = ({tuple(line.get(key) for key in keys): line for line in read_lines(run / _ANSWERS)} for run in (a, b))
    evaluated = {key[:2] for key in of_a} & {key[:2] for key in of_b}
    for key in (each for each in {**of_a, **of_b} if each[:2] in evaluated):
        step, place = int(key[0] or 0), f"sample {key[3]} of {key[2]} in {key[1]}"
        if key not in of_a or key not in of_b:
            yield from _at(step, [f"{'A' if key in of_a else 'B'} alone has an answer"], place)
            continue
        for name in ("label", "response", "reward", "reward_parts", "finish"):
            if of_a[key].get(name) != of_b[key].get(name):
                values = [str(each[key].get(name))[-_SHOWN:] for each in (of_a, of_b)]
                yield from _at(step, [f"{name} {values[0]!r} in A, {values[1]!r} in B"], place)
                break


def _weights(a: Path, b: Path) -> tuple[Iterator[_Difference], str]:
    """Return the differing checkpoints: of the policy's weights, or else of another file, such as a critic's."""
    digests: list[dict[str, dict[str, str]]] = []
    for run in (a, b):
        found = {
            path.parent.name: json.loads(path.read_text()) for path in (run / CHECKPOINTS).glob("step_*/MANIFEST.json")
        }
        digests.append(
            {name: {"": each["policy_digest"], **each.get("files", {}), LEDGER: ""} for name, each in found.items()}
        )
    both = sorted(digests[0].keys() & digests[1].keys())
    unlike = []
    for name in both:
        of_a, of_b = (digests[each][name] for each in (0, 1))
        file = next((file for file in {**of_a, **of_b} if of_a.get(file) != of_b.get(file)), None)
        if file is not None:
            unlike.append((int(name.removeprefix("step_")), f"checkpoint {name}" + (f", {file}" if file else "")))
    return iter(unlike), "" if both else "the runs have no checkpoint of the same step"
