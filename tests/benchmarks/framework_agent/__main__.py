"""Whether an agent written with a framework from the package index learns a task through the OpenAI-compatible address.

    .venv/bin/pip install openai-agents==0.24.0
    deploy/start_cluster.sh && .venv/bin/python -m tests.benchmarks.framework_agent

The agent (`agent.py`, in the OpenAI Agents SDK's own form) is asked for a product that the tiny policy cannot work out;
the SDK sends its calculator along, runs what the policy calls, and goes on. The run is `settings.yaml` alone:
real vLLM, real learner, a warm start that shows the call's form. About five minutes on two cores, so not part of CI.

holds: the run exits with 0, and its held-out score at temperature 1 rises by at least 0.3. --short: two steps, and no
score is asked for.
"""

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from protocol.node.home import sluice_home
from tests.benchmarks.quickstart_run import run_quickstart
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
    changed: dict[str, object] = {"config": Path(__file__).with_name("settings.yaml"), "run.seed": arguments.seed}
    if arguments.short:
        changed |= {"run.max_steps": 2, "eval.num_prompts": 16, "policy.warm_start.max_steps": 20}
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_quickstart(Path(folder) / "framework_agent", changed)
    if outcome.exit_status:
        print(outcome.log, flush=True)
    has_risen = arguments.short or outcome.after - outcome.before >= _MIN_RISE
    return conclude(
        "framework_agent",
        has_risen and outcome.exit_status == 0,
        before=outcome.before,
        after=outcome.after,
        greedy_before=outcome.greedy_before,
        greedy_after=outcome.greedy_after,
        step_s=outcome.step_s,
        seconds=outcome.seconds,
    )


if __name__ == "__main__":
    sys.exit(main())
