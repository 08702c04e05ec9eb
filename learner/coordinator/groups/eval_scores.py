"""What an evaluation's samples come to: means with their standard errors, pass@k, majority@n, by data source. No torch.

Shape letters: P prompts, n samples of each.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ScoredPrompt:
    """One held-out prompt that is back whole."""

    source: str  # its row's data_source, "" without one
    rewards: tuple[float, ...]  # [n] of its samples at the set's temperature
    greedy: float  # reward of the sample without randomness
    answers: tuple[str | None, ...] = ()  # [n] final answer of each sample; None: it gave none


def score_set(prompts: Sequence[ScoredPrompt], solved_at: float) -> dict[str, float]:
    """Return one set's figures by name. What cannot be measured is absent: an error of one prompt, figures of none.

    reward, greedy: means over prompts, with reward_error, greedy_error. pass@k: k = 1, 2, 4 .. and n. majority@n: mean
    reward of the answer that most samples gave. SOURCE/reward, SOURCE/reward_error, SOURCE/num_prompts: by data source.
    """
    scores: dict[str, float] = {"num_prompts": len(prompts)}
    if not prompts:
        return scores
    scores |= mean_with_error("reward", [_mean(p.rewards) for p in prompts])
    scores |= mean_with_error("greedy", [p.greedy for p in prompts])
    num_samples = len(prompts[0].rewards)
    for k in _ks(num_samples):
        solved = [sum(reward >= solved_at for reward in p.rewards) for p in prompts]
        scores[f"pass@{k}"] = _mean([pass_at_k(num_samples, c, k) for c in solved])
    if num_samples > 1 and all(len(p.answers) == num_samples for p in prompts):
        scores[f"majority@{num_samples}"] = _mean([majority_reward(p.rewards, p.answers) for p in prompts])
    for source, part in sorted(_by_source(prompts).items()):
        scores |= mean_with_error(f"{source}/reward", [_mean(p.rewards) for p in part])
        scores[f"{source}/num_prompts"] = len(part)
    return scores


def mean_with_error(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the mean of values, and under NAME_error its standard error where there are two values or more."""
    mean, num = _mean(values), len(values)
    if num < 2:
        return {name: mean}
    variance = math.fsum((value - mean) ** 2 for value in values) / (num - 1)
    return {name: mean, f"{name}_error": math.sqrt(variance / num)}


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return the chance that one of k samples, drawn from num_samples without putting back, is a solved one.

    Example: pass_at_k(4, 1, 2) == 0.5. Source: arXiv:2107.03374, section 2.1: 1 - C(n - c, k) / C(n, k).
    """
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def majority_reward(rewards: Sequence[float], answers: Sequence[str | None]) -> float:
    """Return the mean reward of the samples that gave the most frequent answer; of several, the mean over these.

    A sample without an answer has no vote; where none has one, the mean of all rewards is returned.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return _mean(rewards)
    most = max(votes.values())
    return _mean(
        [
            _mean([reward for reward, given in zip(rewards, answers, strict=True) if given == answer])
            for answer, number in votes.items()
            if number == most
        ]
    )


def _by_source(prompts: Iterable[ScoredPrompt]) -> Mapping[str, list[ScoredPrompt]]:
    sources: dict[str, list[ScoredPrompt]] = {}
    for prompt in prompts:
        if prompt.source:
            sources.setdefault(prompt.source, []).append(prompt)
    return sources


def _ks(num_samples: int) -> list[int]:
    """Return 1, 2, 4 and so on, and num_samples itself."""
    return sorted({2**i for i in range(num_samples.bit_length())} | {num_samples})


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
