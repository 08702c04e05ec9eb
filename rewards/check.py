"""`python -m rewards.check URL`: check that a run can use a reward endpoint, and print what to change.

It sends requests as a run does, with two built-in samples or one of yours (--sample). Each line of output is one fact:
ok, a warning, or a problem. Exit 0: no problem.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from protocol.errors import OperatorError
from protocol.http.bearer import read_token
from rewards.check_probes import Endpoint, Finding, Probe, findings

BUILT_IN = (
    Probe("What is 1 + 1?", " <think>one more</think><answer>2</answer>", "2"),
    Probe("What is 2 + 2?", " <think>hm</think><answer>5</answer>", "4"),
)


def main() -> int:
    arguments = _parser().parse_args()
    try:
        samples = _samples(arguments.sample)
        headers = _headers(arguments.header, arguments.token_file)
    except OperatorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    is_usable = True
    with Endpoint(arguments.url, headers, arguments.timeout_s) as endpoint:
        for finding in findings(endpoint, samples):
            print(line_of(finding), flush=True)
            is_usable = is_usable and finding.kind != "problem"
    print(f"{arguments.url} {'can' if is_usable else 'cannot'} be used by a run.")
    return 0 if is_usable else 1


def line_of(finding: Finding) -> str:
    """Return a finding as a line of text."""
    advice = f" {finding.advice}" if finding.advice else ""
    return f"{finding.kind:8} {finding.fact}{advice}"


def _samples(path: Path | None) -> list[Probe]:
    """Return two samples: built-in, or the user's and a second response to its prompt."""
    if path is not None:
        try:
            row = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
            rows: list[dict[str, Any]] = [
                {"response": " <answer>1</answer>", **row},
                {**row, "response": " <answer>none</answer>"},
            ]
            probes = [Probe(**each) for each in rows]
            if not all(isinstance(each.prompt, str) and isinstance(each.response, str) for each in probes):
                raise ValueError("prompt and response must be text")
            if not all(isinstance(each.columns, dict) for each in probes):
                raise ValueError("columns must be an object")
            return probes
        except (OSError, ValueError, IndexError, TypeError) as error:
            raise OperatorError(
                f"rewards: --sample {path} is not a sample ({error}). Expected one line of JSON: "
                '{"prompt": "..", "response": "..", "label": ..}, and the row\'s other columns as "columns".'
            ) from None
    return list(BUILT_IN)


def _headers(given: list[str], token_file: Path | None) -> dict[str, str]:
    headers = {"authorization": f"Bearer {read_token(token_file)}"} if token_file is not None else {}
    for header in given:
        name, colon, value = header.partition(":")
        if not colon or not name.strip() or not (header.isascii() and header.isprintable()):
            raise OperatorError(f"rewards: --header {header!r} is not a header. Expected NAME: VALUE in ASCII.")
        headers[name.strip().lower()] = value.strip()
    return headers


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a time limit. Expected seconds above 0")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rewards.check", description=__doc__)
    parser.add_argument("url", metavar="URL", help="as in rewards.endpoints")
    parser.add_argument("--sample", type=Path, help='file with a line {"prompt", "response", "label", "columns"}')
    parser.add_argument("--header", action="append", default=[], help="NAME: VALUE, sent with each request")
    parser.add_argument("--token-file", type=Path, help="send the bearer token in this file")
    parser.add_argument("--timeout-s", type=_seconds, default=60.0, help="time limit of a request, as in the settings")
    return parser


if __name__ == "__main__":
    sys.exit(main())
