"""The token books against vLLM's own counter of generation tokens, through a killed server and a killed command.

    python -m tests.chaos.vllm_token_books [--steps N]

A run of two servers on real vLLM, DeepSpeed and Ray, in a cluster of its own. A plug-in of vLLM (its
`vllm.stat_logger_plugins`) writes what vLLM counts into a file for each process. After a few steps one server is
killed, later the command with everything of it, and given again. Not part of CI: minutes.

holds: `learner.audit` passes, and the books have exactly the tokens that vLLM's counters have beyond the two of each
engine's warm-up.
"""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

from learner import audit
from learner.audit.report import audit_run_folder
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.http_servers import scripted_server
from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import Bring, bring, score

_VARIABLE = "TOKEN_COUNTERS"
_PLUGIN = f'''
import mmap, os
from vllm.v1.metrics.loggers import StatLoggerBase

class Counter(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0):
        path = os.path.join(os.environ["{_VARIABLE}"], str(os.getpid()))
        with open(path, "wb") as file:
            file.write(bytes(8))
        with open(path, "r+b") as file:
            self.words = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        if iteration_stats is not None:
            self.words[0] += iteration_stats.num_generation_tokens

    def log_engine_initialized(self):
        pass
'''
_WARM_UP = 2  # tokens of each engine before it serves a run
_LIMIT_S = 400.0
_SLOT_BYTES = 1024


def main() -> int:
    arguments = options(str(__doc__), steps=40)
    with tempfile.TemporaryDirectory() as name, scripted_server() as rewards:
        folder = Path(name)
        counters = _install_plugin(folder)
        cluster = FlowCluster(folder)
        user = bring(folder, rewards.script_by("score", score))
        started = cluster.start()
        assert started.returncode == 0, started.stdout + started.stderr
        try:
            agreed = _run_killed(cluster, user, counters, arguments.steps)
            with cluster.running(*_given(user, arguments.steps)) as again:
                ended = again.finished(_LIMIT_S)
            assert ended.returncode == 0, ended.stdout + ended.stderr
        finally:
            cluster.stop()
        left = user.left("books").folder
        holds = audit.main([str(left)]) == 0
        books = {each.what: each.num_tokens for each in audit_run_folder(left).books}
        by_engine = [int.from_bytes(file.read_bytes(), "little") for file in counters.iterdir()]
    generated = sum(by_engine) - _WARM_UP * len(by_engine)
    booked = sum(books.values()) - books.get("uncounted", 0)
    shown = {what.replace(" ", "_"): number for what, number in books.items()}
    holds = holds and generated == booked > 0 and len(by_engine) > 2
    return conclude(
        "vllm_token_books",
        holds,
        engines=len(by_engine),
        moments_tried=agreed,
        generated=generated,
        booked=booked,
        difference=generated - booked,
        **shown,
    )


def _install_plugin(folder: Path) -> Path:
    """Put the plug-in on the path of all processes that are started from now on; returns the counters' folder."""
    counters, site = folder / "counters", folder / "site"
    described = site / "token_counters-1.0.dist-info"
    counters.mkdir()
    described.mkdir(parents=True)
    (site / "token_counters.py").write_text(_PLUGIN)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: token-counters\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[vllm.stat_logger_plugins]\ncounter = token_counters:Counter\n")
    os.environ[_VARIABLE] = str(counters)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return counters


def _given(user: Bring, num_steps: int) -> list[str]:
    more = {
        "run.max_steps": num_steps,
        "rollout.num_servers": 2,
        "rollout.max_response_tokens": 200,
        "rollout.engine_args": json.dumps({"disable_log_stats": False}),
        "learner.checkpoint_every_steps": 4,
        "eval.every_steps": 5,
        "eval.num_prompts": 2,
        "eval.samples": 1,
    }
    return user.options("books", more)


def _run_killed(cluster: FlowCluster, user: Bring, counters: Path, num_steps: int) -> int:
    """Kill a server at a third of the run and the command at two thirds; returns the moments that were tried."""
    left = user.left("books")
    with cluster.running(*_given(user, num_steps)) as run:
        run.wait_until(lambda: left.last_step >= num_steps // 3 or run.process.poll() is not None, _LIMIT_S)
        assert run.process.poll() is None, run.finished(1.0).stderr
        tried = _kill_server(cluster, counters)
        run.wait_until(lambda: left.last_step >= 2 * num_steps // 3, _LIMIT_S)
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
    return tried


def _kill_server(cluster: FlowCluster, counters: Path) -> int:
    """Kill a server while vLLM has counted what its last step returned, which it does some lines after our count."""
    process = next(each for each in cluster.actors("RolloutServer") if (counters / str(each.pid)).exists())
    for tried in range(1, 1000):
        process.send_signal(signal.SIGSTOP)
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
        counted = int.from_bytes((counters / str(process.pid)).read_bytes(), "little") - _WARM_UP
        if counted in _sums_of_files(cluster.home / "tokens"):
            process.kill()
            return tried
        process.send_signal(signal.SIGCONT)
        time.sleep(0.01)
    raise TimeoutError("the file of the session and vLLM's counter never agreed")


def _sums_of_files(folder: Path) -> list[int]:
    """Return the sum of all counts in each session's file, where an attempt is being generated."""
    sums = []
    for file in folder.glob("*/*"):
        data = file.read_bytes()
        words = [
            [int.from_bytes(data[place + 8 * i : place + 8 * i + 8], "little") for i in range(3)]
            for place in range(0, len(data), _SLOT_BYTES)
        ]
        is_open = any(count and length and not end for count, length, end in words[2:])
        if is_open:
            sums.append(words[0][0] + sum(count for count, length, _ in words[1:] if length))
    return sums


if __name__ == "__main__":
    sys.exit(main())
