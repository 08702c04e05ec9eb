"""Tries a user's own loss and correction on three tokens, before a run spends anything on what they would train wrong.

What a trial itself raises says nothing of a run: such a function may need a GPU, or more tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from learner.algorithms.importance import Correction
from learner.algorithms.losses.policy_loss import Clip, PolicyLoss
from protocol.errors import SettingsError

_OLD = (-0.5, -1.0, -2.0)
_COUNTS = (1, 2)
_ADVANTAGES = (1.0, -0.5, -0.5)  # one for each answer, with mean 0: a loss may centre them
_SHIFTS = (0.05, -0.05)  # of the old logprobs in further calls: a loss may cut the ratio at 1, from either side

T = TypeVar("T")


def try_loss(name: str, loss: PolicyLoss, clip: Clip, *, is_weighted: bool) -> None:
    """Check that the loss trains towards positive advantages, and that it has the importance ratio.

    is_weighted: the correction multiplies with the ratio, unless the loss contains it, and no PolicyLoss says whether.
    Raises: SettingsError.
    """

    def call(sign: float, shift: float) -> tuple[Tensor, Tensor]:
        logprobs, advantages = torch.tensor(_OLD, requires_grad=True), sign * torch.tensor(_ADVANTAGES)
        values, _ = loss.of_tokens(logprobs, torch.tensor(_OLD) - shift, advantages, _COUNTS, clip)
        return values.detach(), torch.autograd.grad(values.sum(), logprobs)[0]

    with _keep_random():
        found = [_try(partial(call, sign, shift)) for shift in (0.0, *_SHIFTS) for sign in (1.0, -1.0)]
    now, opposed, *older = found
    if now is None or opposed is None:
        return
    # The difference leaves out what the loss adds for every token, such as a bonus of entropy.
    if float(((now[1] - opposed[1]) * torch.tensor(_ADVANTAGES)).sum()) > 0.0:
        raise SettingsError(
            f"settings: learner.loss = {name} makes tokens of a positive advantage less likely. It is minimised, as "
            "-ratio * advantages; its first argument are the learner's logprobs, its second the old ones. "
            "See docs/do/algorithms.md."
        )
    pairs = zip((now, opposed) * len(_SHIFTS), older, strict=True)
    has_ratio = any(after is None or not torch.equal(before[0], after[0]) for before, after in pairs)
    # A loss may be zero in such a trial, as one of strong advantages or long answers only: that shows nothing.
    is_zero = not any(bool(values.any() or gradient.any()) for values, gradient in (now, opposed))
    if is_weighted and not (has_ratio or is_zero):
        raise SettingsError(
            f"settings: learner.loss = {name} had the same values for other old logprobs in a trial, so that "
            "learner.correction would not weigh stale tokens. If it does not multiply by the ratio of both, give "
            "PolicyLoss(of_tokens=.., has_ratio=False), or set learner.correction to none; if it does, give "
            "PolicyLoss(of_tokens=.., has_ratio=True). See docs/do/algorithms.md."
        )


def try_correction(name: str, correction: Correction) -> None:
    """Check that the correction does not return the weights themselves, which the loss has already.

    Raises: SettingsError.
    """
    weights = torch.tensor([0.8, 0.9, 0.95])
    with _keep_random():
        kept = _try(lambda: correction.kept(weights, (1, 1, 1), correction.band))
    if correction.is_weighted and kept is not None and torch.allclose(kept.to(weights.dtype), weights):
        raise SettingsError(
            f"settings: learner.correction = {name} returned 0.8 for a weight of 0.8, expected the share of it that "
            "is kept, 1: the loss has the weight already. Divide what it returns by the weight. "
            "See docs/do/algorithms.md."
        )


def _try(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except SettingsError:
        raise
    except Exception:  # a user's code may raise anything
        return None


@contextmanager
def _keep_random() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield
