"""A scripted run with evaluations: its steps, what its evaluations come to, and what ranks are told to wait for."""

from pathlib import Path
from typing import Any

from protocol.settings.settings import Settings
from protocol.wire import messages as m
from tests.learner.coordinator.coordinator_script import Script, settings_of


def evaluated(every_steps: int, max_steps: int = 3, **sections: dict[str, Any]) -> Settings:
    """Return settings of evaluations of two prompts with one sampled and one greedy trajectory each."""
    evaluation = {"every_steps": every_steps, "num_prompts": 2, "samples": 1}
    sections = {"run": {"max_steps": max_steps}, "data": {"eval": "held_out.jsonl"}} | sections
    return settings_of(eval=evaluation, **sections)


def begin(folder: Path, settings: Settings, step: int = 0, services: dict[str, str] | None = None) -> Script:
    return Script(folder, settings, num_prompts=80, num_held_out=3, step=step, services=services)


def restart(script: Script, settings: Settings, step: int, services: dict[str, str] | None = None) -> Script:
    script.advance()
    script.ledger.close()
    return begin(script.folder, settings, step, services)


def finish(script: Script, leases: list[m.Lease], kind: str, version: int, reward: float = 0.5) -> None:
    for lease in leases:
        if lease.kind == kind:
            assert set(script.finish("s1", lease, version, reward)) == {"accepted"}


def take_step(script: Script, step: int) -> list[m.Lease]:
    """Take a step without delivering any evaluation; returns the evaluation's leases that went out meanwhile."""
    leases = script.demand(version=step - 1)
    finish(script, leases, "train", step - 1)
    script.batch(step)
    script.step(step, version=step)
    return [lease for lease in leases if lease.kind == "eval"]


def evaluate(script: Script, step: int, reward: float) -> None:
    """Have the evaluation of a step leased and delivered."""
    leases = script.demand(version=step)
    assert {lease.group.split("-")[1] for lease in leases if lease.kind == "eval"} == {str(step)}
    finish(script, leases, "eval", step, reward)
    finish(script, leases, "train", step)
    script.advance()


def scores(script: Script) -> dict[int, tuple[int, float]]:
    """Return, by the step of the line that has it, each evaluation's policy version and mean reward."""
    return {
        line["step"]: (line["eval/policy_version"], line["eval/held_out/reward"])
        for line in script.metrics()
        if "eval/held_out/reward" in line
    }


def waits(script: Script, step: int, rank: int = 0) -> str:
    """Have a rank ask for a step that an evaluation holds back; returns what it is told to wait for."""
    assert script.ask(step, rank) == []
    script.advance(1.1)
    (answer,) = script.take(f"rank-{rank}", m.Message)
    assert isinstance(answer, m.Wait), answer
    assert answer.is_for_evaluation is True
    return answer.detail
