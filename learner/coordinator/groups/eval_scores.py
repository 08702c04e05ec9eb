"""The scores of an evaluation: means with standard errors, pass@k, majority@n, by data source; and its answers.

Shape letters: P prompts, n samples of each.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from learner.coordinator.groups.group import Group
from learner.data.prompt_set import rows_digest
from learner.data.prompts import Prompt
from learner.data.text_decoder import TextDecoder
from protocol.settings.evaluation import MAIN_SET


@dataclass(frozen=True)
class HeldOutSet:
    """Prompts that are scored and never trained."""

    prompts: Sequence[Prompt]  # each is sampled num_samples times, and once more without randomness
    num_samples: int
    name: str = MAIN_SET  # part of its metrics: eval/NAME/reward
    temperature: float | None = None  # None: rollout.temperature

    def identity(self, usual_temperature: float) -> str:
        """Return the prompts and the temperature of the scores. usual_temperature: rollout.temperature."""
        temperature = usual_temperature if self.temperature is None else self.temperature
        return f"{rows_digest(self.prompts)} at temperature {temperature:g}"


SetResult = tuple[HeldOutSet, list[Group]]


@dataclass(frozen=True)
class ScoredPrompt:
    """One held-out prompt with all its samples."""

    source: str  # data_source of its row, "" without one
    rewards: tuple[float, ...]  # [n] rewards of its samples at the set's temperature
    greedy: float  # reward of the sample without randomness
    answers: tuple[str | None, ...] = ()  # [n] final answer of each sample; None: it gave no answer


def evaluation_metrics(results: Sequence[SetResult], solved_at: float) -> dict[str, float]:
    """Return every set's scores under eval/NAME/, and the oldest and newest policy version of any answer.

    solved_at: eval.solved_at.
    """
    metrics: dict[str, float] = {}
    facts = [t.facts for _, groups in results for group in groups for t in group.trajectories.values()]
    if facts:
        metrics["eval/version_min"] = min(f.oldest_version for f in facts)
        metrics["eval/version_max"] = max(f.newest_version for f in facts)
    for held_out, groups in results:
        scores = score_set([_score_prompt(group) for group in groups], solved_at)
        metrics |= {f"eval/{held_out.name}/{name}": value for name, value in scores.items()}
    return metrics


def describe_answers(group: Group, decoder: TextDecoder) -> list[dict[str, object]]:
    """Return the part of evaluations.jsonl that does not depend on the evaluation: one line for each answer."""
    lines: list[dict[str, object]] = []
    for trajectory in group.in_order():
        facts, tokens = trajectory.facts, trajectory.tokens.tolist()
        prompt, response = decoder.texts(tokens, (facts.num_prompt_tokens, len(tokens)))
        lines.append(
            {
                "uid": group.prompt.uid,
                "data_source": _source(group),
                "sample": facts.sample_index,
                "is_greedy": facts.is_greedy,
                "reward": facts.reward,
                "reward_parts": facts.reward_parts,
                "answer": None if facts.answer is msgspec.UNSET else facts.answer,
                "prompt": prompt,
                "response": response,
                "label": group.prompt.label_text,
                "finish": facts.finish,
                "num_model_tokens": facts.num_model_tokens,
                "oldest_version": facts.oldest_version,
                "newest_version": facts.newest_version,
            }
        )
    return lines


def score_set(prompts: Sequence[ScoredPrompt], solved_at: float) -> dict[str, float]:
    """Return one set's scores by name. A score that cannot be measured is absent: the error of a single prompt.

    reward, greedy: means over prompts, with reward_error, greedy_error. pass@k: k = 1, 2, 4 .. and n. majority@n: mean
    reward of the answer that most samples gave. SOURCE/reward, SOURCE/reward_error, SOURCE/num_prompts: by data source.
    """
    scores: dict[str, float] = {"num_prompts": len(prompts)}
    if not prompts:
        return scores
    scores |= mean_with_error("reward", [fmean(p.rewards) for p in prompts])
    scores |= mean_with_error("greedy", [p.greedy for p in prompts])
    num_samples = len(prompts[0].rewards)
    for k in _ks(num_samples):
        solved = [sum(reward >= solved_at for reward in p.rewards) for p in prompts]
        scores[f"pass@{k}"] = fmean([pass_at_k(num_samples, c, k) for c in solved])
    if num_samples > 1 and all(len(p.answers) == num_samples for p in prompts):
        scores[f"majority@{num_samples}"] = fmean([majority_reward(p.rewards, p.answers) for p in prompts])
    for source, part in sorted(_by_source(prompts).items()):
        scores |= mean_with_error(f"{source}/reward", [fmean(p.rewards) for p in part])
        scores[f"{source}/num_prompts"] = len(part)
    return scores


def mean_with_error(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the mean of values, and under NAME_error its standard error where there are two values or more."""
    mean, num = fmean(values), len(values)
    if num < 2:
        return {name: mean}
    variance = math.fsum((value - mean) ** 2 for value in values) / (num - 1)
    return {name: mean, f"{name}_error": math.sqrt(variance / num)}


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return the chance that one of k samples, drawn from num_samples without replacement, is solved.

    Example: pass_at_k(4, 1, 2) == 0.5. Source: arXiv:2107.03374, section 2.1: 1 - C(n - c, k) / C(n, k).
    """
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def majority_reward(rewards: Sequence[float], answers: Sequence[str | None]) -> float:
    """Return the mean reward of the samples that gave the most frequent answer; of several, the mean over these.

    A sample without an answer has no vote. Without any vote the mean of all rewards is returned.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return fmean(rewards)
    most = max(votes.values())
    return fmean(
        [
            fmean([reward for reward, given in zip(rewards, answers, strict=True) if given == answer])
            for answer, number in votes.items()
            if number == most
        ]
    )


def _score_prompt(group: Group) -> ScoredPrompt:
    facts = [trajectory.facts for trajectory in group.in_order()]
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


def _by_source(prompts: Iterable[ScoredPrompt]) -> Mapping[str, list[ScoredPrompt]]:
    sources: dict[str, list[ScoredPrompt]] = {}
    for prompt in prompts:
        if prompt.source:
            sources.setdefault(prompt.source, []).append(prompt)
    return sources


def _ks(num_samples: int) -> list[int]:
    """Return 1, 2, 4 and so on, and num_samples itself."""
    return sorted({2**i for i in range(num_samples.bit_length())} | {num_samples})
