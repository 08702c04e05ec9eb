"""CPU seconds per sample, by part, of this checkout beside those of another commit, run in turn on one machine.

    python -m tests.benchmarks.compare --commit COMMIT [--repeats N] [--steps N] [--staleness N] [--seed N]

The work is that of `tests.benchmarks.throughput`. Each commit gets a checkout, an environment and a cluster of its own
in a temporary folder, and one run that is not counted, which starts the rollout server. Then they run in turn. CPU time
is read from /proc between the ends of the first and the last step. Prints the medians of both, and the median of the
ratios of neighbouring runs (this checkout / COMMIT): below 1, this checkout is cheaper.
holds: no part that takes a tenth of the time, and not the whole, costs more than 1.1 times as much.
"""

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tests.benchmarks.cpu_by_part import cpu_per_sample
from tests.benchmarks.throughput import make_model, make_prompts, reward_service, run_command
from tests.chaos.rig.verdict import conclude, options

_ROOT = Path(__file__).parents[2]
_LIMIT = 1.1


@dataclass
class Checkout:
    """A commit with its own environment, home and cluster."""

    commit: str
    folder: Path
    first_port: int
    runs: list[dict[str, float]] = field(default_factory=list)  # CPU seconds per sample by part, of each run

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def start(self, stack: ExitStack) -> None:
        code = self.folder / "code"
        _call(["git", "worktree", "add", "--detach", str(code), self.commit], _ROOT)
        stack.callback(_call, ["git", "worktree", "remove", "--force", str(code)], _ROOT)
        ports = f"{self.first_port}-{self.first_port + 999}"
        stack.callback(self.call, ["deploy/stop_cluster.sh"])
        self.call(["deploy/start_cluster.sh", "--no-reward", "--ports", ports])

    def call(self, command: list[str]) -> None:
        _call(command, self.folder / "code", self.environment())

    def environment(self) -> dict[str, str]:
        path = f"{self.folder / 'code' / '.venv' / 'bin'}:{os.environ['PATH']}"
        return {**os.environ, "SLUICE_HOME": str(self.home), "PATH": path}

    def run(self, work: Path, arguments: list[str], name: str) -> dict[str, float]:
        """Return CPU seconds per sample by part, of one run."""
        code = self.folder / "code"
        command = [str(code / ".venv" / "bin" / "python"), *arguments]
        return cpu_per_sample(command, code, self.environment(), work / "runs" / name / "metrics.jsonl", self.home)


def main() -> int:
    arguments = options(__doc__ or "", commit="HEAD^", repeats=5, steps=12, staleness=4)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(reward_service())
        make_model(place / "model", arguments.seed)
        make_prompts(place / "prompts.jsonl", arguments.seed)
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=_ROOT, capture_output=True, text=True, check=True)
        both = [
            Checkout(commit, place / name, port)
            for commit, name, port in ((head.stdout.strip(), "new", 31000), (arguments.commit, "old", 32000))
        ]
        for checkout in both:
            checkout.start(stack)
        for turn in range(1 + arguments.repeats):
            for checkout in both if turn % 2 else reversed(both):
                name = f"{checkout.folder.name}-{turn}"
                given = run_command(place, name, url, arguments.staleness, arguments.steps, arguments.seed)
                cost = checkout.run(place, given, name)
                if turn:
                    checkout.runs.append(cost)
        return report(*both)


def report(new: Checkout, old: Checkout) -> int:
    print("| part | old, ms of CPU per sample | new | new / old |\n|---|---|---|---|")
    dearer = []
    for part in sorted(old.runs[0], key=lambda part: -old.runs[0][part]):
        before, after = ([run.get(part, 0.0) for run in checkout.runs] for checkout in (old, new))
        ratio = median(b / max(a, 1e-9) for a, b in zip(before, after, strict=True))
        print(f"| {part} | {1000 * median(before):.2f} | {1000 * median(after):.2f} | {ratio:.3f} |")
        if ratio > _LIMIT and median(before) >= 0.1 * median(run["all"] for run in old.runs):
            dearer.append(part)
    return conclude("compare", not dearer, dearer=", ".join(dearer) or "none")


def _call(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
