"""The command `sluice audit RUN_DIR` as a function, and its tables.

Exit status: 0 when in the surviving lineage every prompt of every epoch was trained exactly once, skipped with a
reason, or is still to come; 1 with one line for each breach; 2 with one sentence for a wrong option or folder.
Reads only: the run may be running, killed or ended.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from learner.audit.report import AuditReport, BookedTokens, DeadLetter, Tokens, audit_run_folder
from protocol.errors import OperatorError

_MAX_DEAD_LETTERS = 50
_ABOUT = """\
Prove from the ledger, the checkpoints and metrics.jsonl that every prompt was trained exactly once or skipped with a
reason, or report each breach. Also lists dead letters, and every generated token by what became of it. Reads only; the
run may be running."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("sluice audit", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run, such as runs/NAME")
    parser.add_argument("--data", type=Path, help="present path of the run's training prompts, if they were moved")
    parser.add_argument("--json", action="store_true", help="print the same facts as one JSON object")
    options = parser.parse_args(arguments)
    try:
        report = audit_run_folder(options.run_dir, options.data)
    except OperatorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        show_audit(report, Console(emoji=False))
    return 0 if report.holds else 1


def show_audit(report: AuditReport, console: Console) -> None:
    """Print the counts, then the breaches, one line each, then the verdict."""
    console.print(_epoch_table(report))
    if report.dead_letters:
        console.print(_dead_letter_table(report.dead_letters))
    console.print(_token_table(report.tokens))
    if report.books:
        console.print(_books_table(report.books))
    for line in (*(f"note: {note}" for note in report.notes), *report.breaches.lines(), report.verdict):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _epoch_table(report: AuditReport) -> Table:
    table = Table("epoch", title=f"Prompts of {report.run}, {report.step} steps", title_justify="left")
    has_filter = any(epoch.filtered for epoch in report.epochs)
    for column in ("prompts", "trained once", "skipped", *(["filtered"] if has_filter else []), "under way", "to come"):
        table.add_column(column, justify="right")
    for epoch in report.epochs:
        table.add_row(
            str(epoch.epoch),
            f"{epoch.num_prompts:,}",
            f"{epoch.trained:,}",
            f"{epoch.skipped:,}",
            *([f"{epoch.filtered:,}"] if has_filter else []),
            ", ".join(f"{count:,} {state}" for state, count in epoch.under_way.items()) or "0",
            f"{epoch.to_come:,}",
        )
    return table


def _dead_letter_table(letters: Sequence[DeadLetter]) -> Table:
    table = Table("prompt", "reason", "failures", title="Skipped prompts (dead letters)", title_justify="left")
    for letter in letters[:_MAX_DEAD_LETTERS]:
        failures = "\n".join(
            f"sample {f.sample_index}, lease {f.attempt} on {f.server}: {f.boundary}: {f.detail}"
            for f in letter.failures
        )
        table.add_row(escape(letter.uid), escape(letter.reason), escape(failures))
    if len(letters) > _MAX_DEAD_LETTERS:
        table.caption = f"and {len(letters) - _MAX_DEAD_LETTERS:,} more; --json lists all"
    return table


def _token_table(tokens: Sequence[Tokens]) -> Table:
    table = Table("model tokens", title="Tokens: trained, and wasted by reason", title_justify="left")
    for column in ("trajectories", "tokens", "share", "tokens each"):
        table.add_column(column, justify="right")
    total = sum(t.num_tokens for t in tokens) or 1
    for t in tokens:
        table.add_row(
            escape(t.what),
            f"{t.num_trajectories:,}",
            f"{t.num_tokens:,}",
            f"{t.num_tokens / total:.1%}",
            f"{t.num_tokens / t.num_trajectories:.1f}" if t.num_trajectories else "",
        )
    return table


def _books_table(books: Sequence[BookedTokens]) -> Table:
    total = sum(each.num_tokens for each in books)
    title = f"Token books: {total:,} generated tokens, each counted once"
    table = Table("generated tokens", title=title, title_justify="left")
    for column in ("tokens", "share"):
        table.add_column(column, justify="right")
    for each in books:
        table.add_row(escape(each.what), f"{each.num_tokens:,}", f"{each.num_tokens / (total or 1):.1%}")
    return table
