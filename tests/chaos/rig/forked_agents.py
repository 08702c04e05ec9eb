"""Agents in processes of their own, for `tests.chaos.agents`: each plays one sample over HTTP, as its fate has it.

    python -m tests.chaos.rig.forked_agents URL TOKEN SEED NUM_AT_ONCE

The parent holds no connection and forks a child per sample, so that a child can be killed at any moment of its own. It
goes on until it is terminated, and then prints how many children had which fate.
"""

import contextlib
import os
import random
import signal
import ssl
import sys
import threading
import time
import zlib
from collections import Counter
from typing import Any

import httpx

FATES = ("killed", "silent", "twice")
# Of what a child's exit status says.
_STATUS = {name: number for number, name in enumerate(("good", "retried", *FATES, "none", "wrong"))}
_ASKS_S = 60.0
_ROUNDS = 3
# Made once: it takes longer than a conversation.
_CONTEXT = ssl.create_default_context()


def reward_of(texts: list[str]) -> float:
    """Return the one reward that is right for what the policy said."""
    return zlib.crc32("|".join(texts).encode()) % 10_000 / 8.0


def fate_of(sample: str, seed: int) -> str:
    """Return what the agent of a sample does: a third goes wrong, at the first attempt alone."""
    draw = random.Random(f"{seed}/{sample}")
    if not sample.endswith("/1") or draw.random() >= 1 / 3:
        return "retried" if draw.random() < 0.2 else "good"
    return draw.choice(FATES)


class Agent:
    """Plays one sample."""

    def __init__(self, url: str, token: str, seed: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=_ASKS_S, trust_env=False, verify=_CONTEXT)
        self._token = token
        self._seed = seed

    def play(self) -> str:
        """Return which fate this agent has had; "none" when there was no sample."""
        headers = {"Authorization": f"Bearer {self._token}"}
        reply = self._http.post("/sluice/sessions", json={"wait_s": 2.0}, headers=headers)
        if reply.status_code != 200:
            return "none"
        told = reply.json()
        fate = fate_of(told["sample"], self._seed)
        self._http.headers["Authorization"] = f"Bearer {told['api_key']}"
        messages: list[dict[str, Any]] = [{"role": "user", "content": told["prompt"]}]
        texts: list[str] = []
        for number in range(_ROUNDS):
            if number == 1 and fate == "killed":
                self._die_while_asking(messages)
            if number == 2 and fate == "silent":
                return self._be_silent(told)
            if (text := self._turn(messages, number, fate)) is None:
                return "wrong"  # it was too slow for the limit on silence, or its lease was taken back
            texts.append(text)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"and {number}?"}]
        return self._report(told, reward_of(texts), fate)

    def _turn(self, messages: list[dict[str, Any]], number: int, fate: str) -> str | None:
        body = {"model": "policy", "messages": messages}
        headers = {"Idempotency-Key": f"turn-{number}"} if fate == "retried" else {}
        if fate == "retried":  # nobody waits for the first answer
            with contextlib.suppress(httpx.TimeoutException):
                self._http.post("/v1/chat/completions", json=body, headers=headers, timeout=0.01)
        reply = self._http.post("/v1/chat/completions", json=body, headers=headers)
        return str(reply.json()["choices"][0]["message"]["content"]) if reply.status_code == 200 else None

    def _die_while_asking(self, messages: list[dict[str, Any]]) -> None:
        body = {"model": "policy", "messages": messages}
        threading.Thread(target=self._http.post, args=("/v1/chat/completions",), kwargs={"json": body}).start()
        time.sleep(random.Random().uniform(0.0, 0.03))
        os.kill(os.getpid(), signal.SIGKILL)

    def _be_silent(self, told: dict[str, Any]) -> str:
        time.sleep(told["idle_timeout_s"] + 1.0)
        late = self._http.post(f"/sluice/sessions/{told['id']}/reward", json={"reward": -1.0})
        return "silent" if late.status_code == 410 else "wrong"

    def _report(self, told: dict[str, Any], reward: float, fate: str) -> str:
        path = f"/sluice/sessions/{told['id']}/reward"
        first = self._http.post(path, json={"reward": reward})
        if first.status_code != 200:
            return "wrong"
        if fate == "twice":
            again = self._http.post(path, json={"reward": reward})
            other = self._http.post(path, json={"reward": -1.0})
            if again.json().get("counted") or other.status_code != 410:
                return "wrong"
        return fate


def main() -> int:
    url, token, seed, num_at_once = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    has_ended = False

    def end(*_: object) -> None:
        nonlocal has_ended
        has_ended = True

    signal.signal(signal.SIGTERM, end)
    children: set[int] = set()
    fates: Counter[str] = Counter()
    while not has_ended or children:
        while len(children) < num_at_once and not has_ended:
            if (child := os.fork()) == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os._exit(_STATUS[_played(url, token, seed)])
            children.add(child)
        if has_ended:
            for child in children:
                os.kill(child, signal.SIGTERM)
        child, status = os.wait()
        children.discard(child)
        if os.WIFSIGNALED(status):
            fates["killed" if os.WTERMSIG(status) == signal.SIGKILL else "ended"] += 1
        else:
            fates[next(name for name, number in _STATUS.items() if number == os.WEXITSTATUS(status))] += 1
    with contextlib.suppress(BrokenPipeError):  # whoever started us may be gone
        print(" ".join(f"{name}={number}" for name, number in sorted(fates.items())), flush=True)
    return 0


def _played(url: str, token: str, seed: int) -> str:
    try:
        return Agent(url, token, seed).play()
    except httpx.HTTPError:
        return "none"  # the run is over


if __name__ == "__main__":
    sys.exit(main())
