"""The command `python -m learner.audit RUN_DIR` as a function: importing it runs nothing.

Exit status: 0 when in the surviving lineage every prompt of every epoch was trained exactly once, skipped with a
reason, or is still to come; 1 with one line for each breach; 2 with one sentence for a wrong option or folder.
Reads only: the run may be under way, killed or ended.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from learner.audit.report import audit_run_folder
from learner.audit.view import show_audit
from protocol.errors import OperatorError

_ABOUT = """\
Prove from the ledger, the checkpoints and metrics.jsonl that every prompt was trained exactly once or skipped with a
reason, or name what broke it. Also lists dead letters, wasted tokens by reason, and attempts and skips by answer
length. Reads only; the run may be under way."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser("python -m learner.audit", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run, such as runs/NAME")
    parser.add_argument("--data", type=Path, help="where the run's training prompts lie now, when they were moved")
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
