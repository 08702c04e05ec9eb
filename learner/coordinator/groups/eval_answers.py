"""An evaluation's metrics and its answers, from the groups of each set that are back whole."""

from collections.abc import Sequence

import msgspec

from learner.coordinator.groups.eval_scores import ScoredPrompt, score_set
from learner.coordinator.groups.group import Group
from learner.coordinator.groups.held_out import HeldOutSet

SetResult = tuple[HeldOutSet, list[Group]]


def metrics_of(parts: Sequence[SetResult], solved_at: float) -> dict[str, float]:
    """Return every set's scores under eval/NAME/, the first set's means as eval_reward and eval_reward_greedy too, and
    the oldest and newest policy version of any answer. solved_at: eval.solved_at."""
    metrics: dict[str, float] = {}
    facts = [t.facts for _, groups in parts for group in groups for t in group.trajectories.values()]
    if facts:
        metrics["eval_version_min"] = min(f.oldest_version for f in facts)
        metrics["eval_version_max"] = max(f.newest_version for f in facts)
    for place, (held_out, groups) in enumerate(parts):
        scores = score_set([_scored(group) for group in groups], solved_at)
        if place == 0 and groups:
            metrics |= {"eval_reward": scores["reward"], "eval_reward_greedy": scores["greedy"]}
        metrics |= {f"eval/{held_out.name}/{name}": value for name, value in scores.items()}
    return metrics


def answer_lines(step: int, parts: Sequence[SetResult]) -> list[dict[str, object]]:
    """Return one line for each answer: whose it is, its reward, and the policy versions that wrote it."""
    return [
        {
            "step": step,
            "set": held_out.name,
            "uid": group.prompt.uid,
            "data_source": _source(group),
            "sample": facts.sample_index,
            "is_greedy": facts.is_greedy,
            "reward": facts.reward,
            "reward_parts": facts.reward_parts,
            "answer": None if facts.answer is msgspec.UNSET else facts.answer,
            "finish": facts.finish,
            "num_model_tokens": facts.num_model_tokens,
            "oldest_version": facts.oldest_version,
            "newest_version": facts.newest_version,
        }
        for held_out, groups in parts
        for group in groups
        for facts in (group.trajectories[index].facts for index in sorted(group.trajectories))
    ]


def _scored(group: Group) -> ScoredPrompt:
    facts = [group.trajectories[index].facts for index in sorted(group.trajectories)]
    sampled = [f for f in facts if not f.is_greedy]
    is_answered = all(f.answer is not msgspec.UNSET for f in sampled)
    return ScoredPrompt(
        source=_source(group),
        rewards=tuple(f.reward for f in sampled),
        greedy=next(f.reward for f in facts if f.is_greedy),
        answers=tuple(str(f.answer) or None for f in sampled) if is_answered else (),
    )


def _source(group: Group) -> str:
    """Return the row's data_source as a part of a metric's name; empty without one."""
    source = group.prompt.columns.get("data_source")
    return source.replace("/", "_")[:100] if isinstance(source, str) else ""
