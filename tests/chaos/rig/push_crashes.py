"""Runs on a real cluster whose learner dies in its weight pushes, again and again, with the servers left as they are.

SLUICE_FAILPOINT holds in every life of the run, so each life dies at the same place of its third push, one step further
than the life before it: a server is left with half of the buckets, or with all of them and no commit, or with weights
of a version that no checkpoint has. The command must end by itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from learner import audit
from learner.checkpoint.folder import LATEST
from learner.checkpoint.manifest import CorruptCheckpointError, verify
from learner.disk.run_folder import CHECKPOINTS
from protocol.failpoints import FAILPOINTS, VARIABLE
from tests.chaos.rig.crashes import CrashOutcome
from tests.fakes.http_servers import ScriptedServer, serving
from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import Bring, Left, bring, each_trained_once, score

PUSH_FAILPOINTS = tuple(name for name in FAILPOINTS if name.startswith("weight_push."))
NUM_STEPS = 4
# The first push of a life brings the servers what it starts from. A model of 1.8 MB makes two buckets of a MiB.
_PASS_IN_THIRD_PUSH = {"weight_push.after_bucket": 5}
_TOLERANCE = 1e-3


@contextmanager
def pushing_cluster(folder: Path) -> Iterator[tuple[FlowCluster, Bring]]:
    """Yield a running cluster and a user with a model, prompts and a reward service of their own."""
    place = folder / "cluster"
    place.mkdir()
    rewards, cluster = ScriptedServer(), FlowCluster(place)
    rewards.script_by("fast", score)
    with serving(rewards.app()) as address:
        try:
            if (started := cluster.start()).returncode:
                raise RuntimeError(f"the cluster did not start: {started.stderr}")
            yield cluster, bring(place / "user", f"{address}/fast")
        finally:
            cluster.stop()


def crash_in_pushes(cluster: FlowCluster, user: Bring, failpoint: str, num_steps: int = NUM_STEPS) -> CrashOutcome:
    """Return what became of a run of `num_steps` steps, each life of which dies at this place of its third push."""
    name = f"crash-{failpoint.rpartition('.')[2]}"
    setting = f"{failpoint}:kill@{_PASS_IN_THIRD_PUSH.get(failpoint, 3)}"
    options = {
        "run.max_steps": num_steps,
        "learner.checkpoint_every_steps": 1,
        "learner.max_staleness": 0,
        "weights.bucket_mb": 1,
    }
    finished = cluster.run(*user.options(name, options), environment={VARIABLE: setting})
    if finished.returncode:
        return CrashOutcome(setting, 0, (f"exit status {finished.returncode}: {finished.stderr[-500:]}",))
    left = user.left(name)
    deaths = int(left.rows("SELECT MAX(number) FROM incarnations")[0][0]) - 1
    return CrashOutcome(setting, deaths, tuple(_problems(left, num_steps, deaths)))


def _problems(left: Left, num_steps: int, deaths: int) -> Iterator[str]:
    # A life pushes what it starts from, takes and saves a step, and dies in the push of the next.
    if deaths != num_steps - 1:
        yield f"{deaths} deaths, expected {num_steps - 1}"
    if left.trained != each_trained_once(num_steps):
        yield f"trained {left.trained}"
    if not audit.audit_run_folder(left.folder).holds:
        yield "the audit does not hold"
    steps = [int(line["step"]) for line in left.metrics]
    if steps != list(range(1, num_steps + 1)):
        yield f"metrics.jsonl has the steps {steps}"
    # At staleness 0 every token is of the weights that are trained on: one of other weights differs by far more.
    worst = max((line["policy/logprob_difference_max"] for line in left.metrics), default=float("inf"))
    if not worst <= _TOLERANCE:
        yield f"logprobs differ from the learner's by up to {worst:.2g} nats"
    try:
        verify((left.folder / CHECKPOINTS / LATEST).resolve())
    except CorruptCheckpointError as error:
        yield f"latest: {error}"
