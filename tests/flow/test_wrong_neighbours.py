"""What only a running cluster can find wrong: services, environments, backends. One line each, before anything starts.

What needs no cluster is in test_wrong_inputs.py.
"""

from pathlib import Path

import pytest

from tests.fakes.http_servers import Answer, ScriptedServer, free_address
from tests.flow.flow_cluster import FlowCluster
from tests.flow.refusals import Wrong, expect_refusal, options_of
from tests.flow.user_run import Bring

pytestmark = pytest.mark.stack

_NO_STEP = """
class Half:
    stop = ()

    async def reset(self, task):
        return task.prompt
"""


def _write_half(folder: Path) -> None:
    (folder / "half.py").write_text(_NO_STEP, encoding="utf-8")


def _write_row(folder: Path) -> None:
    (folder / "one.jsonl").write_text('{"prompt": "1 + 1 =", "completion": " 2"}\n' * 2, encoding="utf-8")


CASES = [
    Wrong(
        "reward service down",
        1,
        r"reward:mine: http://127.0.0.1:\d+/score: no connection \(.+\). "
        r"Start the service, or change rewards.endpoints \(name mine\).",
        {"rewards.endpoints": [{"name": "mine", "url": "{down}/score"}]},
        is_pattern=True,
    ),
    Wrong(
        "header without its variable",
        1,
        "settings: rewards.endpoints mine: the header X-Key comes from the environment variable NO_SUCH_KEY, "
        "which is not set. Export it before you start the cluster.",
        {
            "rewards.endpoints": [
                {"name": "mine", "url": "http://127.0.0.1:9/", "headers_env": {"X-Key": "NO_SUCH_KEY"}}
            ]
        },
    ),
    Wrong(
        "retriever that answers nonsense",
        1,
        r"retriever: http://127.0.0.1:\d+/nonsense: in the reply \$.result is missing. "
        r"Start it with sluice start, or change retriever.url.",
        {"rollout.environment": "search", "retriever.url": "{rewards}/nonsense"},
        is_pattern=True,
    ),
    Wrong(
        "environment without a step",
        2,
        "settings: rollout.environment = {user}/half.py:Half: it has no `async def step`. "
        "See rollout/environments/base.py.",
        {"rollout.environment": "{user}/half.py:Half"},
        _write_half,
    ),
]


@pytest.mark.parametrize("wrong", CASES, ids=str)
def test_a_wrong_neighbour_is_one_line_before_anything_starts(
    wrong: Wrong, cluster: FlowCluster, user: Bring, rewards: ScriptedServer
) -> None:
    rewards.script("nonsense", Answer({"hello": 1}))
    before = {process.pid for process in cluster.actors("RolloutServer")}
    options = [
        option.replace("{down}", free_address()).replace("{rewards}", rewards.address)
        for option in options_of(wrong, user)
    ]

    finished = cluster.run(*options, timeout_s=400.0)

    expect_refusal(wrong, user, finished)
    assert cluster.actors("CoordinatorProcess") == []
    assert cluster.ranks() == []
    assert {process.pid for process in cluster.actors("RolloutServer")} == before


# -- found only once processes of the run have started -----------------------------------------------------------------

LATE = [
    Wrong(
        "engine argument that vLLM refuses",
        2,
        "settings: vLLM refuses the engine settings of .*no_such_type.*",
        {"rollout.engine_args": {"kv_cache_dtype": "no_such_type"}},
        is_pattern=True,
    ),
    Wrong(
        "DeepSpeed setting of a wrong type",
        1,
        r"learner rank 0: failed: ValidationError: .*\breduce_bucket_size\b.*'seven'.* "
        r"Traceback: .+/logs/rank_0\.log",
        {
            **{"objective": "sft", "data.train": "{user}/one.jsonl", "data.eval": None, "rollout.group_size": 1},
            **{"rewards.endpoints": [], "learner.deepspeed": {"zero_optimization": {"reduce_bucket_size": "seven"}}},
        },
        _write_row,
        is_pattern=True,
    ),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("wrong", LATE, ids=str)
def test_a_start_that_fails_halfway_leaves_neither_processes_nor_a_run_folder(
    wrong: Wrong, cluster: FlowCluster, user: Bring
) -> None:
    expect_refusal(wrong, user, cluster.run(*options_of(wrong, user)))
    assert cluster.actors("CoordinatorProcess") == []
    assert cluster.ranks() == []
