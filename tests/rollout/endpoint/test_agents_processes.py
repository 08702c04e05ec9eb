"""Agents that are processes of their program: one that is killed fails its sample, for which no more is written."""

import asyncio
import sys
from typing import Any

from tests.rollout.endpoint.agents_scene import agents_scene

_AGENT = """
import json, sys, urllib.request
url, key = sys.argv[1:]
body = json.dumps({"messages": [{"role": "user", "content": "2+2"}]}).encode()
request = urllib.request.Request(url + "/chat/completions", body, {"Authorization": "Bearer " + key})
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(json.load(opener.open(request))["choices"][0]["message"]["content"])
"""


async def test_killed_process_of_an_agent_fails_its_sample_and_its_turn_is_given_up() -> None:
    processes: list[asyncio.subprocess.Process] = []

    async def program(task: Any) -> float:
        command = (sys.executable, "-I", "-c", _AGENT, task.base_url, task.api_key)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        processes.append(process)
        said, _ = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"the agent's process ended with {process.returncode}")
        return float(said == b"four\n")

    async with agents_scene(program=program) as scene:
        scene.engine.may_write.clear()
        scene.coordinator.lease("g")
        async with asyncio.timeout(30.0):
            while not scene.engine.asked:
                await asyncio.sleep(0.01)
        processes[0].kill()
        assert (await scene.failure("g")).startswith("agent: RuntimeError: the agent's process ended with -9")
        async with asyncio.timeout(30.0):  # the endpoint's loop cancels it after the failure was told
            while not scene.engine.num_given_up:
                await asyncio.sleep(0.01)
        scene.engine.may_write.set()
        scene.coordinator.lease("h")
        assert (await scene.trajectory("h")).facts.reward == 1.0
        assert (len(scene.engine.wrote), scene.engine.num_given_up) == (1, 1)
