"""Every generated token is in the token books once: the engines' own counters equal the books, to the token.

    python -m tests.chaos.token_books [--seed N] [--runs N] [--short]

40 runs of three servers with real sockets, coordinator, ledger, checkpoints and rewards; the engine is paced by script
and counts its tokens in a file of its own. In each run two servers are killed, turns time out (aborts), environments
fail, and old groups are dropped. In some of them coordinator and learner are killed and steps are trained again, groups
are filtered, prompts are evaluated, or messages are lost, doubled, mixed up and damaged and the links are cut for
seconds. `--short`: four runs.

holds: in every run `learner.audit` passes, the sum of the books is that of the engines' counters, none of it is
"uncounted", its trained tokens are those of the ledger, and no group is trained that the filter does not take; every
other fate occurs in some run.
"""

import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import psutil

from learner import audit
from learner.audit.report import audit_run_folder
from learner.disk.run_folder import LEDGER
from protocol.settings.settings import Settings
from tests.chaos.frames.proxy import Faults, FrameProxy
from tests.chaos.long_conversations import TalkingRig
from tests.chaos.rig.counting import count_filtered
from tests.chaos.rig.counting_engine import kill_between_counts, num_counted, run_counting_server
from tests.chaos.rig.processes import Pace
from tests.chaos.rig.run import Parts, Rig
from tests.chaos.rig.settings import reward_service, rig_home, rig_settings
from tests.chaos.rig.verdict import conclude, options

_ENVIRONMENT = f"{Path(__file__).parent / 'rig' / 'counting_engine.py'}:ShortTalk"
_FATES = {"trained", "died", "failed", "aborted", "filtered", "redone", "evaluation", "stale"}
_NUM_PROMPTS, _LIMIT_S = 40, 90.0


class _Disturber:
    """Kills two servers; without a proxy a coordinator or a learner too; with one it cuts all links for two seconds."""

    def __init__(self, seed: int, num_steps: int, proxy: FrameProxy | None) -> None:
        self._random = random.Random(seed)
        kinds = ["server", "server", "cut" if proxy is not None else self._random.choice(["coordinator", "learner"])]
        self._due = sorted(((self._random.uniform(0.0, 0.8 * num_steps), kind) for kind in kinds), reverse=True)
        self._proxy = proxy
        self._furthest = 0
        self.did: Counter[str] = Counter()

    def __call__(self, rig: Rig, now: float) -> None:
        self._furthest = max(self._furthest, rig.step)
        if not self._due or self._due[-1][0] > self._furthest or self._random.random() < 0.8 or rig.learner is None:
            return  # not at once: anywhere within the step
        kind = self._due[-1][1]
        if kind == "cut":
            self._cut()
        elif kind == "server":
            part = self._random.choice(list(rig.servers.values()))
            if not part.process.is_alive() or not kill_between_counts(part):
                return
        else:
            part = rig.learner if kind == "learner" else rig.coordinator
            if part is None or not part.process.is_alive():
                return
            part.kill()
        self._due.pop()
        self.did[kind] += 1

    def _cut(self) -> None:
        assert self._proxy is not None
        process = psutil.Process(self._proxy._process.pid)
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.0)
        process.send_signal(signal.SIGCONT)


def main() -> int:
    arguments = options(str(__doc__), least={"runs": 40}, runs=40)
    num_runs = 4 if arguments.short else arguments.runs
    seen, fates, problems = Counter[str](), Counter[str](), list[str]()
    for number in range(num_runs):
        _run_once(arguments.seed * 1000 + number, number, seen, fates, problems)
    for problem in problems:
        print(f"token_books: {problem}", flush=True)
    missing = set() if arguments.short else _FATES - {what for what, num in fates.items() if num}
    holds = not problems and not missing and seen["difference"] == 0 and seen["generated"] > 0
    shown = {what.replace(" ", "_"): num for what, num in fates.most_common()}
    return conclude("token_books", holds, runs=num_runs, **seen, **shown, problems=len(problems))


def _run_once(seed: int, number: int, seen: Counter[str], fates: Counter[str], problems: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name, rig_home(Path(name)) as keys, reward_service(Path(name)) as url:
        settings = _settings(Path(name), url, seed, number)
        faults = Faults(seed, dropped=0.03, duplicated=0.1, reordered=0.1, corrupted=0.03)
        proxy = FrameProxy(keys, faults) if number % 4 == 3 else None
        disturb = _Disturber(seed, settings.run.max_steps, proxy)
        route = proxy.route if proxy is not None else lambda address: address
        pace, parts = Pace(seed, token_s=0.001, mean_tokens=40.0), Parts(server=run_counting_server)
        rig = TalkingRig(settings, keys, num_servers=3, pace=pace, disturb=disturb, route=route, parts=parts)
        try:
            rig.run(_LIMIT_S)
        except (TimeoutError, RuntimeError) as error:
            problems.append(f"seed {seed}: {error}")
            return
        finally:
            if proxy is not None:
                proxy.close()
        if audit.main([str(rig.folder)]) != 0:
            problems.append(f"seed {seed}: the audit does not hold")
        books = {each.what: each.num_tokens for each in audit_run_folder(rig.folder).books}
        generated, booked = num_counted(), sum(books.values()) - books.get("uncounted", 0)
        seen.update(generated=generated, booked=booked, difference=abs(generated - booked), lives=rig.counts["lives"])
        seen.update({f"killed_{kind}" if kind != "cut" else "cuts": num for kind, num in disturb.did.items()})
        fates.update(books)
        if generated != booked or books.get("trained") != _num_trained(rig.folder):
            problems.append(f"seed {seed}: generated {generated}, booked {booked}: {books}")
        if settings.filter.dynamic_sampling and (wrong := count_filtered(rig.folder, settings)[1]):
            problems.append(f"seed {seed}: {wrong} groups were trained that the filter does not take")
        print(
            f"token_books: seed {seed}: generated={generated} booked={booked} {dict(disturb.did)} {books}", flush=True
        )


def _settings(folder: Path, url: str, seed: int, number: int) -> Settings:
    settings = rig_settings(
        folder,
        url,
        num_prompts=_NUM_PROMPTS,
        epochs=1,
        seed=seed,
        learner={
            "groups_per_step": 4,
            "max_staleness": 1,
            "stale_policy": "drop" if number % 2 else "wait",
            "checkpoint_every_steps": 3,
        },
        rollout={
            "group_size": 4,
            "environment": _ENVIRONMENT,
            "max_turns": 8,
            "max_response_tokens": 200,
            "turn_timeout_s": 0.18,
            "max_groups_in_flight": 8,
        },
        # Of the number of a's in about a hundred letters.
        filters={"dynamic_sampling": True, "low": 10.0, "high": 50.0, "max_replaced": 0} if number % 2 == 0 else {},
    )
    given = settings.model_dump(mode="json", exclude_unset=True)
    if number % 4 in (1, 2):
        given["data"]["eval"] = given["data"]["train"]
        given["eval"] = {"every_steps": 3, "num_prompts": 3, "samples": 1}
    return Settings.model_validate(given)


def _num_trained(folder: Path) -> int:
    with closing(sqlite3.connect(folder / LEDGER)) as db:
        query = "SELECT SUM(num_model_tokens) FROM trajectories WHERE step IS NOT NULL AND kind = 'train'"
        return int(db.execute(query).fetchone()[0])


if __name__ == "__main__":
    sys.exit(main())
