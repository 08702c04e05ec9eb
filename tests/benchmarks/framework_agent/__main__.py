"""Whether an agent written with a framework from the package index learns a task through the OpenAI-compatible address.

    .venv/bin/pip install openai-agents==0.24.0
    deploy/start_cluster.sh && .venv/bin/python -m tests.benchmarks.framework_agent

The agent (`agent.py`, in the OpenAI Agents SDK's own form) is asked for a product that the tiny policy cannot work out;
the SDK sends its calculator along, runs what the policy calls, and goes on. The run is `settings.yaml` alone:
real vLLM, real learner, a warm start that shows the call's form. About five minutes on two cores, so not part of CI.

holds: the run exits with 0, and its held-out score at temperature 1 rises by at least 0.3. --short: two steps, and no
score is asked for.
"""

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from protocol.node.home import sluice_home
from tests.benchmarks.tool_task.build import build_tool_task
from tests.chaos.rig.verdict import conclude, options

_MIN_RISE = 0.3


def main() -> int:
    arguments = options(__doc__ or "")
    if find_spec("agents") is None:
        print("framework_agent: the framework is missing: .venv/bin/pip install openai-agents==0.24.0")
        return 2
    if not (sluice_home() / "tool_task" / "model").is_dir():
        build_tool_task(sluice_home() / "tool_task", seed=0)
    given = {"config": Path(__file__).with_name("settings.yaml"), "run.seed": arguments.seed, "run.name": "agent"}
    if arguments.short:
        given |= {"run.max_steps": 2, "eval.num_prompts": 16, "policy.warm_start.max_steps": 20}
    with tempfile.TemporaryDirectory() as folder:
        settings = [part for key, value in {**given, "run.dir": folder}.items() for part in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "learner.run", *settings]
        exit_status = subprocess.run(command, timeout=3600, check=False).returncode
        scored = _scores(Path(folder) / "agent" / "metrics.jsonl")
    before, after = (scored[0], scored[-1]) if scored else (float("nan"), float("nan"))
    has_risen = arguments.short or after - before >= _MIN_RISE
    return conclude("framework_agent", has_risen and exit_status == 0, before=before, after=after, scores=len(scored))


def _scores(metrics: Path) -> list[float]:
    """Return the held-out score at temperature 1 of each evaluation."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    key = "eval/held_out/reward"
    return [line[key] for line in lines if key in line]


if __name__ == "__main__":
    sys.exit(main())
