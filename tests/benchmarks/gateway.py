"""A thousand live agents with long histories at one server's OpenAI-compatible address, beside a plain gateway.

    python -m tests.benchmarks.gateway [--seed N] [--short]

Each agent's history is 1k to 100k tokens long (a token is a byte here), and sent whole with each of its three turns;
the engine is scripted and takes 0.1 to 0.5 s for a turn. Agents begin within 30 s. One request in ten is given up by
its client and sent again with its Idempotency-Key. The plain gateway (`tests.benchmarks.gateway_server`) does what a
user would write in FastAPI: everything in one event loop, each history tokenised anew. Both are processes of their own,
one after the other, beside the agents' process, which has a lower priority. Agents who are still at it after 120 s are
stopped, which the line says. It also says how busy other processes kept the machine: with no core left, lag is theirs.

holds: our event loop is late by at most 50 ms in 99 % of the wakings, every request is answered (unanswered=0), and
none is generated twice (duplicates=0). --short: 100 agents, who begin within 3 s.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.gateway_agents import TURNS
from tests.benchmarks.load import percentile
from tests.chaos.rig.verdict import conclude, options

_LONGEST_LAG_MS = 50.0
_LIMIT_S = 120.0


def main() -> int:
    arguments = options(__doc__ or "")
    num_agents = 100 if arguments.short else 1000
    figures: dict[str, Any] = {}
    for kind in ("plain", "ours"):
        met, told = measured(kind, num_agents, arguments.seed)
        lags = {"http": told["http"]}
        seconds, duplicates = met["seconds"], max(0, told["turns"] - num_agents * TURNS)
        print(
            f"{kind}: {len(seconds)} of {num_agents * TURNS} turns in {met['took_s']:.1f} s"
            f"{' (stopped)' if met['is_stopped'] else ''}, a turn {percentile(seconds, 0.5):.2f} s "
            f"(p99 {percentile(seconds, 0.99):.2f}), lag {_shown(lags)}, {duplicates} turns twice, "
            f"{met['unanswered']} unanswered, {told['finished']} samples; processor time {told['cpu_s']:.1f} s, "
            f"the agents' {met['cpu_s']:.1f} s; others kept {told['others']:.1f} of {os.cpu_count()} cores busy",
            flush=True,
        )
        prefix = "" if kind == "ours" else "plain_"
        unanswered = met["unanswered"] + num_agents * TURNS - len(seconds)
        figures |= {f"{prefix}{name}_lag_p99_ms": lag["p99"] for name, lag in lags.items()}
        figures |= {f"{prefix}duplicates": duplicates, f"{prefix}unanswered": unanswered}
        figures |= {f"{prefix}others_cores": told["others"]}
    is_on_time = figures["http_lag_p99_ms"] <= _LONGEST_LAG_MS
    holds = is_on_time and not figures["duplicates"] and not figures["unanswered"]
    return conclude("gateway", holds, agents=num_agents, **figures)


def measured(kind: str, num_agents: int, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what agents met at a server of this kind, and what it says of itself.

    others: of what it says, the cores that processes beside agents and server kept busy meanwhile, on average.
    """
    command = [sys.executable, "-m", "tests.benchmarks.gateway_server", kind, str(num_agents)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        began, busy_s, server_s = time.perf_counter(), _busy_s(), _processor_s(server.pid)
        agents = [sys.executable, "-m", "tests.benchmarks.gateway_agents", address, str(num_agents), str(seed)]
        played = subprocess.run([*agents, str(_LIMIT_S)], check=True, capture_output=True, text=True)
        met = json.loads(played.stdout)
        both_s = _processor_s(server.pid) - server_s + met["cpu_s"]
        others = max(0.0, (_busy_s() - busy_s - both_s) / (time.perf_counter() - began))
        said, _ = server.communicate(timeout=120.0)
    return met, {**json.loads(said.splitlines()[-1]), "others": others}


def _shown(lags: dict[str, dict[str, float]]) -> str:
    return ", ".join(
        f"{name} p50 {lag['p50']:.0f} p99 {lag['p99']:.0f} max {lag['max']:.0f} ms" for name, lag in lags.items()
    )


def _busy_s() -> float:
    """Return the seconds of all cores together that were not idle since the machine began."""
    user, nice, system, _, _, *others = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    return (user + nice + system + sum(others[:3])) / os.sysconf("SC_CLK_TCK")


def _processor_s(pid: int) -> float:
    user, system = map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])
    return (user + system) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
