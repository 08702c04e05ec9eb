"""Each formula twice: ours on packed tokens, verl's on a padded batch."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.algorithms.aggregate import AGGREGATES
from learner.algorithms.by_name import ADVANTAGES, CORRECTIONS, Algorithm, algorithm_of
from learner.algorithms.corrections.band import Band
from learner.algorithms.corrections.token_weights import token_weights
from learner.algorithms.kl import KL_FORMS, KlController
from learner.algorithms.losses.value_loss import value_loss
from learner.algorithms.whiten import whiten
from protocol.settings.settings import Settings
from tests.benchmarks.agreement.batch import GROUP, NUM_PROMPTS, WIDTH, RandomBatch
from tests.benchmarks.agreement.peer import Peer

Case = tuple[str, Tensor, Tensor]  # name, ours, verl's

GAMMA, LAM = 0.97, 0.9
# Our recipe -> verl's policy loss.
POLICY_LOSSES = {"grpo": "vanilla", "dapo": "vanilla", "ppo": "vanilla", "gspo": "gspo", "cispo": "cispo"}
POLICY_LOSSES |= {"dr_grpo": "vanilla", "reinforce_pp": "vanilla", "rloo": "gpg"}
# Our aggregation -> verl's.
AGGREGATIONS = {
    "token_mean": "token-mean",
    "seq_mean_token_mean": "seq-mean-token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_sum_norm": "seq-mean-token-sum-norm",
}


def cases(batch: RandomBatch, peer: Peer) -> Iterator[Case]:
    """Yield every formula that both have."""
    yield from _advantages_of_groups(batch, peer)
    yield from _advantages_of_tokens(batch, peer)
    for recipe in POLICY_LOSSES:
        yield from _recipe(recipe, batch, peer)
    yield from _aggregates(batch, peer)
    yield from _corrections(batch, peer)
    yield from _value_loss(batch, peer)
    yield from _kl(batch, peer)


def _advantages_of_groups(batch: RandomBatch, peer: Peer) -> Iterator[Case]:
    rewards = batch.mask * 0.0
    rewards[torch.arange(len(batch.scores)), batch.last] = batch.scores
    given = {
        "token_level_rewards": rewards,
        "response_mask": batch.mask,
        "index": np.arange(NUM_PROMPTS).repeat(GROUP),
    }
    theirs: dict[str, tuple[str, dict[str, Any]]] = {
        "grpo": ("grpo", {}),
        "dr_grpo": ("grpo", {"norm_adv_by_std_in_grpo": False}),
        "rloo": ("rloo", {}),
        "opo": ("opo", {}),
        "reinforce_pp_baseline": ("reinforce_plus_plus_baseline", {}),
    }
    for name, (their_name, more) in theirs.items():
        estimate = peer.algorithms.get_adv_estimator_fn(their_name)
        expected, _ = estimate(**{**given, **more})
        yield f"advantage {name}", our_advantages(name, batch), batch.packed(expected)


def our_advantages(name: str, batch: RandomBatch) -> Tensor:
    """Return our advantages of groups, of each model token [K]."""
    found = ADVANTAGES[name]
    assert found.of_groups is not None
    counts = torch.tensor(batch.counts)
    shape = (NUM_PROMPTS, GROUP)
    of_answers = found.of_groups(batch.scores.reshape(shape), counts.double().reshape(shape)).flatten()
    of_tokens = of_answers.repeat_interleave(counts)
    return whiten(of_tokens, lambda sums: sums) if found.is_whitened else of_tokens


def _advantages_of_tokens(batch: RandomBatch, peer: Peer) -> Iterator[Case]:
    rewards, values, counts = batch.rewards(), batch.columns["values"], batch.counts
    parts = list(
        zip(torch.split(batch.packed(rewards), counts), torch.split(batch.packed(values), counts), strict=True)
    )

    def ours(name: str) -> Tensor:
        estimate = ADVANTAGES[name].of_tokens
        assert estimate is not None
        return torch.cat([estimate(reward, value, GAMMA, LAM) for reward, value in parts])

    expected, returns = peer.algorithms.compute_gae_advantage_return(rewards, values, batch.mask, GAMMA, LAM)
    gae = ours("gae")
    yield "advantage gae, whitened", whiten(gae, lambda sums: sums), batch.packed(expected)
    yield "returns of gae", gae + batch.packed(values), batch.packed(returns)
    settings = peer.algorithm_settings(gamma=GAMMA)
    expected, returns = peer.algorithms.compute_reinforce_plus_plus_outcome_advantage(rewards, batch.mask, settings)
    found = ours("reinforce_pp")
    yield "advantage reinforce_pp, whitened", whiten(found, lambda sums: sums), batch.packed(expected)
    yield "returns of reinforce_pp", found, batch.packed(returns)


def _recipe(recipe: str, batch: RandomBatch, peer: Peer) -> Iterator[Case]:
    """The policy loss and its gradient as the recipe's settings have them: clips, aggregation, everything."""
    settings = Settings.model_validate({"learner": {"recipe": recipe}, "rollout": {"max_response_tokens": WIDTH}})
    algorithm = algorithm_of(settings.learner)
    advantages = our_advantages("grpo", batch)
    padded = torch.zeros_like(batch.mask).masked_scatter(batch.mask.bool(), advantages)
    logprobs, same = (batch.columns["logprobs"].clone().requires_grad_() for _ in range(2))
    aggregate = AGGREGATES[settings.loss.aggregate]
    ours = _our_loss(algorithm, aggregate, batch, logprobs, advantages)
    loss = peer.algorithms.get_policy_loss_fn(POLICY_LOSSES[recipe])
    mode = AGGREGATIONS[settings.loss.aggregate]
    theirs, _ = loss(batch.columns["old"], same, padded, batch.mask, mode, _their_clip(recipe, algorithm, peer))
    yield f"loss {recipe}", ours.detach(), theirs.detach()
    ours.backward()
    theirs.backward()
    assert logprobs.grad is not None
    assert same.grad is not None
    yield f"gradient {recipe}", batch.packed(logprobs.grad), batch.packed(same.grad)


def _our_loss(
    algorithm: Algorithm,
    aggregate: Callable[[Tensor, float], Tensor],
    batch: RandomBatch,
    logprobs: Tensor,
    advantages: Tensor,
) -> Tensor:
    counts = torch.tensor(batch.counts)
    old = batch.packed(batch.columns["old"])
    losses, _ = algorithm.loss.of_tokens(batch.packed(logprobs), old, advantages, batch.counts, algorithm.clip)
    return (losses * aggregate(counts.double(), float(WIDTH)).repeat_interleave(counts)).sum()


def _their_clip(recipe: str, algorithm: Algorithm, peer: Peer) -> Any:
    """verl's CISPO cuts small ratios as well, which its paper's runs and ours do not: its lower clip is off here."""
    clip = algorithm.clip
    return peer.actor_settings(
        strategy="fsdp",
        rollout_n=GROUP,
        ppo_mini_batch_size=NUM_PROMPTS,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=1.0 if recipe == "cispo" else clip.low,
        clip_ratio_high=clip.high,
        clip_ratio_c=1e30 if math.isinf(clip.dual) else clip.dual,
    )


def _aggregates(batch: RandomBatch, peer: Peer) -> Iterator[Case]:
    """What each token's loss is multiplied with on its way into the number, one answer being left out."""
    mask = batch.mask.clone()
    mask[3] = 0.0
    counts = mask.sum(dim=1)
    for name, mode in AGGREGATIONS.items():
        of_tokens = batch.columns["logprobs"].clone().requires_grad_()
        theirs = peer.algorithms.agg_loss(of_tokens, mask, mode)
        (expected,) = torch.autograd.grad(theirs, of_tokens)
        weights = AGGREGATES[name](counts, float(WIDTH))[:, None] * mask
        yield f"aggregate {name}", (weights * of_tokens.detach()).sum(), theirs.detach()
        yield f"weights of {name}", weights, expected


def _corrections(batch: RandomBatch, peer: Peer) -> Iterator[Case]:
    """verl bounds an answer's ratio of rollout to learner, we that of learner to rollout: its bounds are inverse."""
    log_ratio, low, high = batch.columns["logprobs"] - batch.columns["old"], 0.9, 1.2
    weight = batch.packed(log_ratio).exp()
    weigh, reject = peer.corrections.compute_rollout_correction_weights, peer.corrections.compute_rollout_rejection_mask
    theirs = {
        "tis": weigh(log_ratio, batch.mask, "token", high)[0],
        "icepop": weigh(log_ratio, batch.mask, "token", f"{low}_{high}")[0],
        "geo_mask": reject(log_ratio, batch.mask, "seq_mean_k1", f"{1.0 / high}_{1.0 / low}")[0],
    }
    for name, expected in theirs.items():
        ours = token_weights(CORRECTIONS[name], weight, batch.counts, Band(low, high), is_in_loss=False)
        yield f"correction {name}", ours, batch.packed(expected)


def _value_loss(batch: RandomBatch, peer: Peer) -> Iterator[Case]:
    columns = {name: batch.columns[name] for name in ("values", "returns", "old_values")}
    values, same = (columns["values"].clone().requires_grad_() for _ in range(2))
    ours, _ = value_loss(
        *(batch.packed(each) for each in (values, columns["old_values"], columns["returns"])), clip=0.5
    )
    theirs, _ = peer.algorithms.compute_value_loss(same, columns["returns"], columns["old_values"], batch.mask, 0.5)
    yield "value loss", ours.mean().detach(), theirs.detach()
    gradients = torch.autograd.grad(ours.mean(), values)[0], torch.autograd.grad(theirs, same)[0]
    yield "gradient of the value loss", batch.packed(gradients[0]), batch.packed(gradients[1])


def _kl(batch: RandomBatch, peer: Peer) -> Iterator[Case]:
    logprobs, reference = (batch.packed(batch.columns[name]) for name in ("logprobs", "reference"))
    for name, form in KL_FORMS.items():
        mine, same = (logprobs.clone().requires_grad_() for _ in range(2))
        ours, theirs = form(mine, reference), peer.algorithms.kl_penalty_forward(same, reference, name)
        yield f"kl {name}", ours.detach(), theirs.detach()
        gradients = torch.autograd.grad(ours.sum(), mine)[0], torch.autograd.grad(theirs.sum(), same)[0]
        yield f"gradient of kl {name}", *gradients
    their_controller = peer.algorithms.AdaptiveKLController(0.01, 0.1, 1000.0)
    controller, coefficient = KlController(target=0.1, horizon=1000.0), 0.01
    measured = logprobs[:8].abs().tolist()
    for kl in measured:
        coefficient = controller.next_coefficient(coefficient, kl, 64)
        their_controller.update(kl, 64)
    found, expected = (torch.tensor(float(x), dtype=torch.float64) for x in (coefficient, their_controller.value))
    yield "adaptive kl coefficient", found, expected
