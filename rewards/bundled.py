"""The bundled scorers by name (`rewards.serve --scorer`). A scorer's heavy libraries are imported when it is chosen."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from protocol.disk.files import model_identity
from protocol.errors import OperatorError
from protocol.sandbox.run import Sandbox
from rewards.answer_format import DEFAULT_TAGS, make_format_scorer
from rewards.code_tests import CodeScorer
from rewards.exact_match import score_exact_match
from rewards.math_answer import make_math_scorer
from rewards.sample import Scorer, ServedScorer

# Programs that run at a time, most of them endless loops. Two new programs per core get half of it beside six of them.
_MAX_PROGRAMS = min(64, 6 * (os.cpu_count() or 1))


@dataclass(frozen=True)
class ScorerOptions:
    """Scorer options of the command line; each scorer reads its own."""

    workers: int = 1  # math_answer: processes; code_tests: new programs at a time, 1 means two per core
    tags: str = DEFAULT_TAGS  # format: tags of a response
    model: str | None = None  # reward_model: folder or name on the hub
    model_dtype: str = "float32"  # reward_model: dtype of the weights
    model_device: str = ""  # reward_model: such as cpu or cuda:1; empty: the first GPU, else cpu
    batch_tokens: int = 16_384  # reward_model: most tokens of one forward pass
    test_timeout_s: float = 10.0  # code_tests: processor time of one test
    unsafe_local_exec: bool = False  # code_tests: run programs without isolation


def _reward_model(options: ScorerOptions) -> Scorer:
    from rewards.reward_model import ModelOptions, make_model_scorer

    if options.model is None:
        raise OperatorError(
            "rewards: --scorer reward_model needs --model: a folder with a Hugging Face sequence-classification model "
            "with one output, or its name on the hub."
        )
    return make_model_scorer(
        ModelOptions(options.model, options.model_dtype, options.batch_tokens, device=options.model_device)
    )


def _code_tests(options: ScorerOptions) -> Scorer:
    # The check needs an event loop of its own: a sandbox belongs to one loop.
    asyncio.run(_check_sandbox(Sandbox(is_isolated=not options.unsafe_local_exec)))
    sandbox = Sandbox(_MAX_PROGRAMS, not options.unsafe_local_exec)
    max_fresh = options.workers if options.workers > 1 else 2 * (os.cpu_count() or 1)
    return CodeScorer(sandbox, options.test_timeout_s, max_fresh).score


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


def scorer_named(name: str, options: ScorerOptions | None = None) -> ServedScorer:
    """Return a bundled scorer. Raises: OperatorError for an unknown name or a wrong option."""
    if name not in SCORERS:
        raise OperatorError(f"rewards: --scorer {name} is not known. Choose one of: {', '.join(sorted(SCORERS))}.")
    options = options or ScorerOptions()
    scorer = SCORERS[name](options)
    deciding: dict[str, tuple[object, ...]] = {
        "format": (options.tags,),
        "code_tests": (options.test_timeout_s,),
        "reward_model": (options.model_dtype, model_identity(options.model or "")),
    }
    return ServedScorer(scorer, sha256(repr((name, *deciding.get(name, ()))).encode()).hexdigest())
