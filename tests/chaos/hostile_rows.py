"""Rows, environments and services that do anything at all: `python -m tests.chaos.hostile_rows`.

Half of 10,000 rows are sound, the other half is generated: odd prompts, labels and columns; environments that return
and raise whatever there is; replies and headers of reward services and retrievers. They are played by two real sessions
for a real coordinator, over real sockets, in runs of 400 rows; the engine writes by script. Group size 2.

It holds when no server ended (its session is still serving), no sound row had a failure of any kind, no lease was lost
and no message refused, every row of the first epoch is made or given up, and every one given up has a reason. --short:
120 rows.
"""

import asyncio
import logging
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from learner.coordinator.coordinator import Coordinator
from learner.coordinator.loop import CoordinatorLoop
from learner.coordinator.steps.record import RunRecord
from learner.data.prompts import Prompt
from learner.ledger.ledger import Ledger
from protocol.node.home import Keys
from protocol.settings.rewards import RewardEndpoint
from protocol.settings.settings import Settings
from protocol.wire.channel import RouterChannel
from rollout.engine.generation import Generation, Sampling
from rollout.environments.base import Resources, Task, Turn
from rollout.environments.search import Search
from rollout.neighbours.http.endpoint import HttpPolicy
from rollout.neighbours.retriever_client import RetrieverClient
from rollout.neighbours.reward_client import RewardClient
from tests.chaos.rig.hostile_values import CONTROL_NAMES, Row, hostile_rows, hostile_services
from tests.chaos.rig.neighbours import Place, Seat, open_session, search_at
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.engines import ScriptedEngine
from tests.fakes.rollout_fakes import make_keys
from tests.fakes.tool_models import byte_core

_CHATML = (
    "{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('no role') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
# Rows of one run: nothing of it is trained, so all of them stay in its window.
_RUN_ROWS = 400
# Services fail for half of the rows, for their rows' sake: outages, which the breaker is for, are not the matter here.
_POLICY = HttpPolicy(
    min_backoff_s=0.02,
    max_backoff_s=0.3,
    max_retry_after_s=0.01,
    attempt_timeout_s=2.0,
    overall_timeout_s=6.0,
    breaker_threshold=1 << 30,
)


def main() -> int:
    arguments = options(__doc__ or "", rows=10_000)
    num_rows = 120 if arguments.short else arguments.rows
    logging.disable(logging.CRITICAL)
    hostile = hostile_rows(num_rows // 2, arguments.seed)
    outcome = _Outcome()
    for start in range(0, len(hostile), _RUN_ROWS // 2):
        # The sound rows of a run stand behind its others: row N is hostile when N is below their number.
        part = hostile[start : start + _RUN_ROWS // 2]
        outcome.add(asyncio.run(_play(part, 2 * len(part))))
    print(f"failures by boundary: {dict(outcome.boundaries.most_common(12))}")
    for line in outcome.complaints[:10]:
        print(line)
    figures: dict[str, Any] = {
        "rows": num_rows,
        "hostile": len(hostile),
        "refused_rows": outcome.num_skipped,
        "without_reason": outcome.num_without_reason,
        "servers_ended": outcome.num_ended,
        "bystanders_failed": outcome.num_bystanders_failed,
        "unfinished": outcome.num_unfinished,
        "lost_leases": outcome.counts["lost_leases"],
        "messages_refused": sum(n for key, n in outcome.counts.items() if key.startswith(("refused:", "rejected:"))),
    }
    names = ("without_reason", "servers_ended", "bystanders_failed", "unfinished", "lost_leases", "messages_refused")
    return conclude("hostile_rows", not any(figures[name] for name in names), **figures)


@dataclass
class _Outcome:
    """What became of the rows of the first epoch of one run, or of all."""

    num_ended: int = 0  # sessions that ended before they were told to
    num_skipped: int = 0  # rows given up
    num_without_reason: int = 0  # rows given up of which no failure says boundary and detail
    num_bystanders_failed: int = 0  # failures of sound rows' samples
    num_unfinished: int = 0  # rows neither made nor given up in time
    boundaries: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)

    def add(self, other: "_Outcome") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class _Playing(Search):
    """Search-R1's loop, but for what the row says. Rows are told apart by the column "row"."""

    rows: Sequence[Row] = ()

    async def reset(self, task: Task) -> Any:
        number = task.columns["row"]
        self._row = self.rows[number] if number < len(self.rows) else None
        if self._row is not None and self._row.reset is not None:
            return self._row.reset()
        return task.prompt

    async def step(self, turn: Turn) -> Any:
        if self._row is not None and self._row.step is not None and self._num_turns < 3:
            self._num_turns += 1
            return self._row.step()
        return await super().step(turn)


class _Engine(ScriptedEngine):
    """Writes a search, then an answer, in the tokens of a tokenizer as Qwen's is."""

    def __init__(self) -> None:
        super().__init__(lambda context: "")
        core = byte_core()
        core.add_special_tokens(list(CONTROL_NAMES))
        self.tokenizer = PreTrainedTokenizerFast(  # type: ignore[assignment]
            tokenizer_object=core, eos_token=CONTROL_NAMES[0], chat_template=_CHATML
        )

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        await asyncio.sleep(0)
        context = self.decode(prompt_tokens)
        number = context.partition("row ")[2].partition(":")[0]
        text, stop = (f"<search>row {number}:</search>", "</search>")
        if "<information>" in context or not number.isdigit():
            text, stop = "<answer> 4</answer>", "</answer>"
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return Generation(tokens, [-0.5] * len(tokens), ((0, len(tokens), 0),), "stop", stop, text)


async def _play(hostile: Sequence[Row], num_rows: int) -> _Outcome:
    _Playing.rows = hostile
    settings = Settings.model_validate(
        {
            "run": {"max_steps": num_rows // 8},
            "rollout": {"group_size": 2, "max_response_tokens": 64, "max_context_tokens": 1024, "max_turns": 3}
            | {"turn_timeout_s": 20.0},
            # Nothing trains: what is made stays in the window, which has room for all of it.
            "learner": {"groups_per_step": 8, "max_staleness": num_rows // 8},
        }
    )
    keys = make_keys()
    engines = [_Engine(), _Engine()]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ledger = Ledger(folder / "ledger.sqlite")
        prompts = _prompts(hostile, num_rows)
        coordinator = Coordinator(settings, "chaos", ledger, prompts, [], RunRecord(folder, 0), last_step=0)
        router = RouterChannel("127.0.0.1", keys.coordinator, [keys.peer.public])
        loop = CoordinatorLoop(coordinator, router)
        loop.start()
        address = await stack.enter_async_context(hostile_services(hostile))
        tasks = [
            await _serve(stack, f"s{i}", engine, settings, address, router.address, keys)
            for i, engine in enumerate(engines)
        ]
        await _until_finished(folder / "ledger.sqlite", num_rows, tasks)
        num_ended = sum(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        loop.close()
        ledger.close()
        ends = [f"a session ended: {task.exception()!r}" for task in tasks if not task.cancelled()]
        return _judged(folder / "ledger.sqlite", len(hostile), num_rows, num_ended, coordinator, ends)


def _prompts(hostile: Sequence[Row], num_rows: int) -> list[Prompt]:
    prompts = []
    for number in range(num_rows):
        row = hostile[number] if number < len(hostile) else Row("hostile", "4", {})
        prompt = f"row {number}: what?" if row.prompt == "hostile" else row.prompt
        prompts.append(Prompt(f"p{number}", prompt, row.label, {**row.columns, "row": number}))
    return prompts


async def _serve(
    stack: AsyncExitStack, name: str, engine: _Engine, settings: Settings, services: str, coordinator: str, keys: Keys
) -> "asyncio.Task[str]":
    endpoint = RewardEndpoint.model_validate({"name": "odd", "url": f"{services}/score", "timeout_s": 2.0})
    rewards = await stack.enter_async_context(RewardClient([endpoint], "sum", None, _POLICY))
    retriever = await stack.enter_async_context(RetrieverClient([f"{services}/retrieve"], 3, None, _POLICY))
    seat = Seat(rewards, Resources(3, {"search": search_at(retriever)}), rewards, _Playing)
    task, channel = open_session(name, seat, engine, settings, Place(coordinator, keys))
    stack.callback(channel.close)
    return task


async def _until_finished(path: Path, num_rows: int, tasks: Sequence["asyncio.Task[str]"]) -> None:
    """Return once every row of the first epoch is made or given up, a server has ended, or nothing moves any more."""
    deadline = asyncio.get_running_loop().time() + 30.0 + num_rows / 20
    while asyncio.get_running_loop().time() < deadline and not any(task.done() for task in tasks):
        with closing(sqlite3.connect(path)) as books:
            done = "SELECT count(*) FROM prompts WHERE epoch = 0 AND state NOT IN ('pending', 'leased')"
            if books.execute(done).fetchone()[0] >= num_rows:
                return
        await asyncio.sleep(0.2)


def _judged(
    path: Path, num_hostile: int, num_rows: int, num_ended: int, coordinator: Coordinator, ends: list[str]
) -> _Outcome:
    with closing(sqlite3.connect(path)) as books:
        states = dict(books.execute("SELECT uid, state FROM prompts WHERE epoch = 0").fetchall())
        rows = 'SELECT p.uid, f.boundary, f.detail FROM failures f JOIN prompts p USING ("group")'
        failures = books.execute(rows).fetchall()
    skipped = {uid for uid, state in states.items() if state == "skipped"}
    told = {uid for uid, boundary, detail in failures if boundary and detail}
    bystanders = [failure for failure in failures if int(failure[0][1:]) >= num_hostile]
    finished = sum(state not in ("pending", "leased") for state in states.values())
    return _Outcome(
        num_ended=num_ended,
        num_skipped=len(skipped),
        num_without_reason=len(skipped - told),
        num_bystanders_failed=len(bystanders),
        num_unfinished=num_rows - finished,
        boundaries=Counter(boundary[:40] for _, boundary, _ in failures),
        counts=coordinator.counts,
        complaints=[*ends, *(f"a sound row failed: {failure}" for failure in bystanders)],
    )


if __name__ == "__main__":
    sys.exit(main())
