"""`sluice select ANSWERS ROWS`: rows for SFT, DPO or KTO from the answers of `sluice generate`.

Each row of answers is judged alone: two rows with the same prompt stay two rows. Token ids are those that the model
sampled, so that conversations with tools are learnt exactly; texts can be learnt by any model.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from learner.data.answers import Answers, Sample, read_answers
from protocol.disk.files import naming_disk_errors, replacing
from protocol.errors import OperatorError, SettingsError
from protocol.message_texts import with_texts

_ABOUT = """\
Write the rows to train on from a file of sluice generate. best: the first sample of the highest reward; best_worst:
it and the first of the lowest, unless their rewards are equal; threshold: the samples of at least --at-least; all:
every sample. Left-out rows are counted."""
MODES = {"best": ("sft",), "best_worst": ("dpo", "kto"), "threshold": ("sft", "kto"), "all": ("sft",)}


@dataclass(frozen=True)
class Selection:
    """Which samples become rows, and of which form."""

    mode: str  # key of MODES
    objective: str  # objective of the run that learns the rows
    at_least: float | None = None  # smallest reward of a sample that is learnt as a good one; None: any
    as_text: bool = False  # prompt and answer as text; False: token ids
    tag: str | None = None  # text behind the prompt, with {reward}; needs as_text


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("sluice select", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("answers", metavar="ANSWERS", type=Path, help="file of sluice generate")
    parser.add_argument("rows", metavar="ROWS", type=Path, help="JSONL file to write, for data.train")
    add_options(parser)
    parser.add_argument("--for", dest="objective", help="sft, dpo or kto, where a mode has several")
    parser.add_argument("--text", action="store_true", help="rows of text, which another model can learn too")
    parser.add_argument(
        "--tag", help="with --text: put behind each prompt, such as ' <score>: {reward} ' (conditional SFT)"
    )
    given = parser.parse_args(arguments)
    objective = given.objective or MODES[given.select][0]
    selection = check_selection(Selection(given.select, objective, given.at_least, given.text, given.tag))
    counts = write_rows(given.answers, given.rows, selection)
    print(describe(counts))
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a selection that `sluice iterate` has too."""
    parser.add_argument("--select", choices=MODES, default="best", help="samples that become rows (best)")
    parser.add_argument("--at-least", type=float, help="smallest reward of a sample that is learnt as a good one")


def check_selection(selection: Selection) -> Selection:
    """Return the selection. Raises: SettingsError for one that contradicts itself."""
    expected = MODES[selection.mode]
    if selection.objective not in expected:
        raise SettingsError(
            f"--select {selection.mode} makes rows for {' or '.join(expected)}, not for "
            f"{selection.objective}. Change one of the two."
        )
    if selection.mode == "threshold" and selection.at_least is None:
        raise SettingsError("--select threshold needs the threshold. Give --at-least, such as --at-least 1.")
    if selection.tag is not None and not (selection.as_text and selection.objective == "sft"):
        raise SettingsError("--tag is for rows of text for sft. Add --text, or leave it out.")
    return selection


def write_rows(answers: Path, rows: Path, selection: Selection) -> Counter[str]:
    """Write the rows in the order of their answers; returns how many there are, and what was left out.

    Raises: OperatorError.
    """
    counts = Counter({"rows": 0})
    if rows.resolve() == answers.resolve():
        raise OperatorError(f"{rows} is the file of the answers, which the rows would replace. Give another file.")
    with (
        naming_disk_errors(f"{rows} cannot be written", "Give another file."),
        replacing(rows) as aside,
        aside.open("w", encoding="utf-8") as file,
    ):
        for each in read_answers(answers):
            for row in rows_of(each, selection, counts):
                file.write(json.dumps({"row": each.row, **row}) + "\n")
                counts["rows"] += 1
        if not counts["rows"]:
            raise OperatorError(f"No row of {answers} is left: {describe(counts)}. Select others.")
    return counts


def rows_of(answers: Answers, selection: Selection, counts: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of one prompt, and count the reason where there are none."""
    samples, least = _usable(answers, selection, counts), selection.at_least
    if not samples:
        counts["prompts without a sample to use"] += 1
        return
    best, worst = max(samples, key=attrgetter("reward")), min(samples, key=attrgetter("reward"))
    good = [sample for sample in samples if least is None or sample.reward >= least]
    if selection.mode == "threshold" and selection.objective == "kto":
        for sample in samples:
            yield _row(answers, sample, selection) | {"label": sample in good}
    elif not good:
        counts["prompts with every reward below --at-least"] += 1
    elif selection.mode != "best_worst":
        for sample in [best] if selection.mode == "best" else good:
            yield _row(answers, sample, selection)
    elif best.reward == worst.reward:
        counts["prompts with equal rewards"] += 1
    elif selection.objective == "kto":
        for sample in (best, worst):
            yield _row(answers, sample, selection) | {"label": sample is best}
    elif best.tokens[: best.learnt[0][0]] != worst.tokens[: worst.learnt[0][0]]:
        counts["prompts that the environment wrote otherwise for the best and the worst sample"] += 1
    else:
        yield _pair(answers, best, worst, selection)


def describe(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items())


def _usable(answers: Answers, selection: Selection, counts: Counter[str]) -> list[Sample]:
    """Return the samples that a row can hold: a text without its end would be learnt with one."""
    if not selection.as_text:
        return answers.samples
    if answers.besides is not None:
        raise OperatorError(
            f"Row {answers.row} was sampled with {answers.besides}, which a row of text does not hold: the model would "
            "learn the answers to other prompts. Leave --text out."
        )
    whole = []
    for sample in answers.samples:
        if len(sample.learnt) > 1 or sample.learnt[-1][1] < len(sample.tokens):
            raise OperatorError(f"Row {answers.row} has a conversation of several turns. Leave --text out.")
        if sample.is_cut:
            counts["samples that a limit cut off"] += 1
        else:
            whole.append(sample)
    return whole


def _row(answers: Answers, sample: Sample, selection: Selection) -> dict[str, Any]:
    if not selection.as_text:
        # The text is for readers: input_ids count.
        mask = sample.loss_mask
        return {"reward": sample.reward, "input_ids": sample.tokens, "loss_mask": mask, "text": sample.text}
    prompt = answers.prompt if isinstance(answers.prompt, str) else with_texts(answers.prompt)
    prompt = _with_tag(prompt, (selection.tag or "").replace("{reward}", f"{sample.reward:.2f}"))
    return {"reward": sample.reward, "prompt": prompt, "completion": sample.text}


def _pair(answers: Answers, best: Sample, worst: Sample, selection: Selection) -> dict[str, Any]:
    chosen, rejected = (_row(answers, each, selection) for each in (best, worst))
    if not selection.as_text:
        return {"chosen": chosen, "rejected": rejected}
    return {"prompt": chosen["prompt"], "chosen": chosen["completion"], "rejected": rejected["completion"]}


def _with_tag(prompt: Any, tag: str) -> Any:
    """Return the prompt with a text behind its last message."""
    if isinstance(prompt, str):
        return prompt + tag
    *before, last = prompt
    return [*before, {**last, "content": f"{last['content']}{tag}"}] if tag else prompt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
