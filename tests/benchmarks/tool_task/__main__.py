"""`python -m tests.benchmarks.tool_task [--out DIR] [--seed N]`: write the files of a task that needs a calculator."""

import argparse
import sys
from pathlib import Path

from protocol.node.home import sluice_home
from tests.benchmarks.tool_task.build import build_tool_task


def main() -> int:
    """Return the exit code: 0 when the folder holds the files, 1 when they cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.tool_task", description=__doc__)
    parser.add_argument(
        "--out", type=Path, help="folder that the files are written into; default: in the cluster's home"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides the splits, the demonstrations and the weights")
    arguments = parser.parse_args()
    out = arguments.out or sluice_home() / "tool_task"
    try:
        counts = build_tool_task(out, arguments.seed)
    except OSError as error:
        remedy = "Set --out to a folder with 50 MB free."
        print(f"tool task: {out} cannot be written ({error.strerror}). {remedy}", file=sys.stderr)
        return 1
    print(f"tool task made: {out} ({', '.join(f'{count} {name}' for name, count in counts.items())})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
