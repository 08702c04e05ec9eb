"""The scorers that come with Sluice, by the name that `rewards.serve --scorer` takes.

What a scorer needs is imported when it is chosen: exact_match needs none of what reward_model does.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from protocol.errors import OperatorError
from protocol.sandbox.limits import Limits
from protocol.sandbox.run import Sandbox
from rewards.answer_format import DEFAULT_TAGS, make_format_scorer
from rewards.code_tests import make_code_scorer
from rewards.exact_match import score_exact_match
from rewards.math_answer import make_math_scorer
from rewards.sample import Scorer


@dataclass(frozen=True)
class ScorerOptions:
    """What the command line says of a bundled scorer; each scorer reads what concerns it."""

    workers: int = 1  # math_answer: processes that compare; code_tests: programs at a time, 1 for one per core
    tags: str = DEFAULT_TAGS  # format: tags of a response
    model: str | None = None  # reward_model: folder or name on the hub
    model_dtype: str = "float32"  # reward_model: of its weights
    batch_tokens: int = 16_384  # reward_model: most tokens of one forward pass
    test_timeout_s: float = 10.0  # code_tests: longest run of one test
    unsafe_local_exec: bool = False  # code_tests: True runs programs without locking them in


def _reward_model(options: ScorerOptions) -> Scorer:
    from rewards.reward_model import ModelOptions, make_model_scorer

    if options.model is None:
        raise OperatorError(
            "rewards: --scorer reward_model needs --model: a folder with a Hugging Face sequence-classification model "
            "of one output, or its name on the hub."
        )
    return make_model_scorer(ModelOptions(options.model, options.model_dtype, options.batch_tokens))


def _code_tests(options: ScorerOptions) -> Scorer:
    # Checked in an event loop that ends here: the service's own has another sandbox.
    asyncio.run(_check_sandbox(Sandbox(is_isolated=not options.unsafe_local_exec)))
    sandbox = Sandbox(options.workers if options.workers > 1 else None, not options.unsafe_local_exec)
    return make_code_scorer(sandbox, Limits(wall_s=options.test_timeout_s))


async def _check_sandbox(sandbox: Sandbox) -> None:
    try:
        await sandbox.check()
    finally:
        sandbox.close()


SCORERS: dict[str, Callable[[ScorerOptions], Scorer]] = {
    "code_tests": _code_tests,
    "exact_match": lambda options: score_exact_match,
    "format": lambda options: make_format_scorer(options.tags),
    "math_answer": lambda options: make_math_scorer(options.workers),
    "reward_model": _reward_model,
}


def scorer_named(name: str, options: ScorerOptions | None = None) -> Scorer:
    """Return a bundled scorer, ready. Raises: OperatorError when there is none of that name, or an option is wrong."""
    if name not in SCORERS:
        raise OperatorError(f"rewards: --scorer {name} is not known. Choose one of: {', '.join(sorted(SCORERS))}.")
    return SCORERS[name](options or ScorerOptions())
