"""The servers of the page about verifiers, with stand-ins for both of its interfaces: a zero is a scorer's own."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.fakes.ports import free_port

_PAGE = Path(__file__).parents[2] / "docs" / "do" / "verifiers.md"
_OLD = """
import logging
from types import SimpleNamespace

class Env:
    score_rollouts = True

    def __init__(self, requires_group_rollouts):
        self.requires_group_rollouts = requires_group_rollouts

    def get_dataset(self):
        tasks = [{"prompt": kind, "kind": kind} for kind in ("right", "wrong", "raises", "breaks", "error")]
        return SimpleNamespace(to_list=lambda: tasks)

    async def run_rollout(self, task, client, model, sampling):
        if task["kind"] == "breaks":
            raise KeyError("the environment")
        if task["kind"] == "raises":  # as its Rubric
            logging.getLogger("verifiers.rubrics.rubric.Rubric").error("Error calling reward function f: 'judge'")
        error = "no model" if task["kind"] == "error" else None
        return {"reward": float(task["kind"] == "right"), "error": error}


def load_environment(name):
    return Env(name == "groups")
"""
# As in verifiers 0.4, whose rubrics are in another module; the process of its mathematical one has died.
_MOVED = _OLD.replace(
    """verifiers.rubrics.rubric.Rubric").error("Error calling reward function f: 'judge'")""",
    """verifiers.legacy.rubrics.rubric.MathRubric").warning("Math verification failed: a process")""",
)
# As in verifiers 0.1, when no process of the mathematical rubric had an answer for two minutes.
_SLOW = _MOVED.replace("legacy.", "").replace("failed: a process", "hit hard timeout after 120s.")
_CLIENTS = """
class Client:
    async def close(self):
        print("closed", flush=True)


def resolve_client(config):
    return Client()
"""
_NEW = """
from contextlib import asynccontextmanager
from types import SimpleNamespace

_TRACES = {
    "right": ({"f": 1.0}, "agent_completed"),
    "wrong": ({"f": 0.0}, "agent_completed"),
    "raises": ({"f": None}, "scoring_timeout"),
    "breaks": ({}, "agent_completed"),
    "error": ({"f": 0.5}, "finalize_timeout"),
}
EvalClientConfig = SimpleNamespace


class ModelContext:
    def __init__(self, model, client):
        pass


class Taskset(list):
    config = None

    def toolsets(self, config):
        return []


class Env:
    taskset = Taskset(SimpleNamespace(kind=kind, data=SimpleNamespace(prompt_text=kind)) for kind in _TRACES)

    async def start(self):
        pass

    @asynccontextmanager
    async def serving(self):
        print("clients add up", flush=True)
        yield

    async def run_episode(self, task, context):
        rewards, stop = _TRACES[task.kind]
        reward = sum(value or 0.0 for value in rewards.values())  # as a Trace adds them
        trace = SimpleNamespace(rewards=rewards, stop_condition=stop, reward=reward, errors=[])
        return SimpleNamespace(ok=True, traces=[trace], errors=[])


def resolve_env_config(data):
    return data


def load_environment(config):
    return Env()
"""
_UNSCORED = {
    "old": ["Error calling reward function f: 'judge'", "KeyError('the environment')", "no model"],
    "moved": ["Math verification failed: a process", "KeyError('the environment')", "no model"],
    "slow": ["Math verification hit hard timeout", "KeyError('the environment')", "no model"],
    "new": ["not scored (scoring_timeout): {'f': None}", "not scored (agent_completed): {}", "(finalize_timeout)"],
}


def _set_up(folder: Path, interface: str) -> Path:
    """Write a stand-in for verifiers and the page's server; return the server."""
    package = folder / "verifiers"
    package.mkdir()
    (package / "__init__.py").write_text({"moved": _MOVED, "slow": _SLOW}.get(interface, _OLD))
    (package / "types.py").write_text("from types import SimpleNamespace as ClientConfig\n")
    (package / "clients.py").write_text(_CLIENTS)
    (package / "v1.py").write_text(_NEW)
    blocks = re.findall(r"```python\n(# serve_tasks\.py\n.*?)```", _PAGE.read_text(), re.DOTALL)
    server = folder / "serve_tasks.py"
    server.write_text(next(block for block in blocks if ("verifiers.v1" in block) == (interface == "new")))
    return server


@pytest.mark.parametrize("interface", ["old", "moved", "slow", "new"])
async def test_sample_that_its_task_set_did_not_score_gets_no_reward(interface: str, tmp_path: Path) -> None:
    server, port = _set_up(tmp_path, interface), free_port()
    command = [sys.executable, str(server), "mine", str(port)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as serving:
        try:
            transport = httpx.AsyncHTTPTransport(retries=8)  # of connections, with growing pauses
            async with httpx.AsyncClient(transport=transport, timeout=30.0) as client:

                async def play(task: int) -> tuple[int, str]:
                    sample = {"base_url": "http://127.0.0.1:1/v1", "api_key": str(task), "task": task}
                    reply = await client.post(f"http://127.0.0.1:{port}/play", json=sample)
                    return reply.status_code, reply.text

                right, wrong, *unscored = await asyncio.gather(*map(play, range(5)))
        finally:
            serving.terminate()
        assert serving.stdout is not None
        printed = serving.stdout.read()
    # Each sample's client ends with it: a run makes many thousands.
    assert (printed.count("closed"), printed.count("add up")) == (0 if interface == "new" else 5, 0)
    assert [(status, json.loads(reward)) for status, reward in (right, wrong)] == [(200, 1.0), (200, 0.0)]
    assert [status for status, _ in unscored] == [500] * 3
    for reason, (_, text) in zip(_UNSCORED[interface], unscored, strict=True):
        assert reason in text


def test_environment_that_compares_samples_is_refused(tmp_path: Path) -> None:
    server = _set_up(tmp_path, "old")
    ended = subprocess.run(
        [sys.executable, str(server), "groups", "rows"], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "each sample needs a reward of its own" in ended.stderr
