"""Servers are killed under long conversations: each goes on elsewhere, and loses at most the turn under way.

    python -m tests.chaos.long_conversations [--seed N] [--short]

64 conversations of 20 turns, one call of a tool in each, and 128 short ones whose steps push new weights meanwhile; 100
SIGKILLs of servers, each after a few calls. Real coordinator, ledger, sockets, rollout servers, tool over HTTP and
reward service; the engine is paced by script, and each of its tokens says which version wrote it. --short: 16
conversations of 12 turns, 10 kills.

Which calls there were is the tool's own word. holds: every conversation is trained once and whole (lost=0); no turn was
played again once the next one had called, and no conversation began anew once a turn was over (lost_turns=0); each
reply in a trajectory is of one call, its own (called_twice=0); tokens, logprobs and versions are what the engine wrote
(wrong=0). repeated: turns under way that were lost with their server after they had called.
"""

import random
import re
import sys
import tempfile
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

from learner import audit
from protocol.settings.tools import ToolsSettings
from tests.chaos.rig.counted_tool import ToolCall, calls_in, counted_tool
from tests.chaos.rig.long_talk import letter_of, read_talks, run_noting_learner, run_talking_server
from tests.chaos.rig.part import Part
from tests.chaos.rig.processes import Pace
from tests.chaos.rig.run import Parts, Rig
from tests.chaos.rig.settings import reward_service, rig_home, rig_settings
from tests.chaos.rig.verdict import conclude, options

_ENVIRONMENT = f"{Path(__file__).parent / 'rig' / 'long_talk.py'}:LongTalk"
_GROUP_SIZE = 4
# is short -> prompts, of which a third are long conversations' groups; turns; kills.
_SIZES = {False: (48, 20, 100), True: (12, 12, 10)}
_REPLY = re.compile(r"\[(\w+) (\d+) (\d+)\]")


class TalkingRig(Rig):
    """A run whose servers are given the newest weights as soon as they are attached, as a learner rejoins them."""

    _version: int | None = None

    def _begin_life(self) -> None:
        self._version = None  # a life begins with its checkpoint's version
        super()._begin_life()

    def _on_message(self, part: Part, verb: str, *rest: Any) -> None:
        if verb == "push" and part is self.learner:
            self._version = rest[0]
        super()._on_message(part, verb, *rest)
        if verb == "attach" and self._version is not None:
            part.tell("push", self._version)


class Killer:
    """Kills a server a moment after it has made so many calls that most of its conversations have had a turn."""

    def __init__(self, seed: int, num_kills: int, calls: Path) -> None:
        self._random = random.Random(seed)
        self._num_left = num_kills
        self._calls = calls
        self._read = 0
        self._made: Counter[int] = Counter()
        self._needed: dict[int, int] = {}
        self._due: dict[int, float] = {}
        self.num_killed = 0

    def __call__(self, rig: Rig, now: float) -> None:
        self._look()
        for part in rig.servers.values():
            process = part.process.pid
            needed = self._needed.setdefault(process, self._random.randint(6, 14))
            if self._made[process] < needed or not self._num_left:
                continue
            if now >= self._due.setdefault(process, now + self._random.uniform(0.0, 0.08)) and part.process.is_alive():
                part.kill()
                self._made[process] = -1_000_000
                self._num_left -= 1
                self.num_killed += 1

    def _look(self) -> None:
        with self._calls.open(encoding="utf-8") as file:
            file.seek(self._read)
            whole, _, _ = file.read().rpartition("\n")
        self._read += len(whole) + bool(whole)
        self._made.update(call.process for call in calls_in(whole))


def lost_turns(calls: list[ToolCall], trained: set[str]) -> tuple[int, int]:
    """Return how many turns that were over were lost, and how many under way. trained: conversations that came back."""
    by_conversation: dict[str, list[int]] = {}
    for call in calls:
        by_conversation.setdefault(call.conversation, []).append(call.turn)
    lost = repeated = 0
    for conversation, turns in by_conversation.items():
        # The call for turn 2 is made once turn 1 is kept: a conversation that got there may not begin anew.
        lost += conversation not in trained and turns[-1] > 1
        repeated += sum(conversation not in trained and turn == 1 for turn in turns)
        for before, turn in zip([0, *turns], turns, strict=False):
            repeated += turn == before
            lost += turn not in (before, before + 1)
    return lost, repeated


def faults_of(talk: dict[str, Any], calls: list[ToolCall], used: set[int]) -> tuple[int, int]:
    """Return how many replies of a trajectory are no call's own, and how much of it is not what the engine wrote."""
    start = talk["prompt"]
    text = "".join(map(chr, talk["tokens"][start:]))
    twice = 0
    for place, (conversation, turn, number) in enumerate(_REPLY.findall(text), 1):
        call = calls[int(number)]
        twice += (
            call.number in used or (call.conversation, call.turn) != (conversation, int(turn)) or place != int(turn)
        )
        used.add(call.number)
    signed = {place: letter_of(version) for first, end, version in talk["spans"] for place in range(first, end)}
    wrong = 0
    for is_own, part in groupby(range(start, len(talk["tokens"])), key=lambda place: talk["mask"][place]):
        for number, place in enumerate(part, 1):
            expected = (signed.get(place), -number / 64) if is_own else (talk["tokens"][place], 0.0)
            wrong += (talk["tokens"][place], talk["logprobs"][place]) != expected
    return twice, wrong


def main() -> int:
    arguments = options(str(__doc__))
    num_prompts, num_turns, num_kills = _SIZES[arguments.short]
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), Path(name) / "calls.txt"
        with rig_home(folder) as keys, reward_service(folder) as url, counted_tool(log) as tool:
            settings = rig_settings(
                folder,
                url,
                num_prompts=num_prompts,
                epochs=1,
                seed=arguments.seed,
                learner={"groups_per_step": 2, "max_staleness": num_prompts // 2 - 1, "checkpoint_every_steps": 100},
                rollout={
                    "group_size": _GROUP_SIZE,
                    "environment": _ENVIRONMENT,
                    "max_turns": num_turns,
                    "max_response_tokens": 24,
                    "max_context_tokens": 4096,
                    "max_groups_in_flight": 1,
                },
            )
            count = {"name": "count", "url": tool, "description": "Counts."}
            settings = settings.model_copy(update={"tools": ToolsSettings.model_validate({"http": [count]})})
            killer = Killer(arguments.seed, num_kills, log)
            pace = Pace(arguments.seed, token_s=0.005, mean_tokens=8.0)
            parts = Parts(server=run_talking_server, learner=run_noting_learner)
            rig = TalkingRig(settings, keys, num_servers=4, pace=pace, disturb=killer, parts=parts)
            print(f"long_conversations: {rig.run(limit_s=120.0 if arguments.short else 600.0)}", flush=True)
            has_audit_passed = audit.main([str(rig.folder)]) == 0
        talks, calls = read_talks(rig.folder), calls_in(log.read_text(encoding="utf-8"))
    return _judge(
        talks, calls, num_prompts // 3 * _GROUP_SIZE, num_turns, num_kills - killer.num_killed, has_audit_passed
    )


def _judge(
    talks: list[dict[str, Any]], calls: list[ToolCall], num_long: int, num_turns: int, num_spared: int, audited: bool
) -> int:
    """Print what became of it all; returns the exit status. num_spared: kills that the run was too short for."""
    faults, used = Counter[str](), set[int]()
    trained: set[str] = set()
    num_whole = 0
    for talk in talks:
        twice, wrong = faults_of(talk, calls, used)
        faults.update(called_twice=twice, wrong=wrong)
        replies = _REPLY.findall("".join(map(chr, talk["tokens"][talk["prompt"] :])))
        trained |= {conversation for conversation, _, _ in replies}
        num_whole += len(replies) == num_turns == talk["turns"] - 1
    lost, repeated = lost_turns(calls, trained)
    figures = {
        "lost": 3 * num_long - len(talks) + num_long - num_whole,
        "lost_turns": lost,
        "called_twice": faults["called_twice"],
        "wrong": faults["wrong"],
    }
    versions = {version for talk in talks if talk["turns"] > 2 for _, _, version in talk["spans"]}
    holds = not any(figures.values()) and not num_spared and audited and len(versions) > 1
    return conclude(
        "long_conversations",
        holds,
        conversations=num_long,
        turns=num_turns,
        spared=num_spared,
        versions=len(versions),
        calls=len(calls),
        repeated=repeated,
        **figures,
        audit="passed" if audited else "failed",
    )


if __name__ == "__main__":
    sys.exit(main())
