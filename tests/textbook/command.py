"""`python -m tests.textbook MODEL PROMPTS`: whether Sluice at staleness 0 trains as a plain synchronous loop does.

No cluster is needed, and nothing is written. Exit status: 0 when the weights are the same, 1 when they are not or
something failed, 2 for a wrong setting.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from learner.data.prompt_set import load_prompts
from learner.disk.model_folder import find_model
from learner.models.world import join_world, own_device
from protocol.errors import OperatorError
from protocol.settings.settings import Settings
from tests.fakes.ports import free_port
from tests.textbook.answer import Answer
from tests.textbook.comparison import Comparison, Weights, bits_of, compare, weights_of
from tests.textbook.loop import Textbook
from tests.textbook.rollouts import Rollouts
from tests.textbook.settings import KNOWN, comparison_settings
from tests.textbook.sluice_side import SluiceSide

_ABOUT = f"""\
Train a model for a few steps twice, in float32: by a plain synchronous loop that one can read in a minute
(tests/textbook/loop.py), which samples answers to your prompts as it goes, and by Sluice's learner at staleness 0,
which is given the same answers. Then say whether the weights are the same. Rewards are drawn: no reward service is
asked. Memory: about 28 bytes for each of the model's parameters. Settings as in python -m learner.run may follow:
{", ".join(KNOWN)}."""
_TIMEOUT_S = 60.0


@dataclass
class _Recorded:
    """What the plain loop did."""

    before: Weights  # of every model that is trained, before the first step
    after: Weights = field(default_factory=dict)  # after the last
    groups: list[list[Sequence[Answer]]] = field(default_factory=list)  # of each step
    bits: list[str] = field(default_factory=list)  # of the weights after each step
    logprob_difference: float = 0.0  # largest between transformers' forward pass and the learner's, nats


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser("python -m tests.textbook", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="model folder or Hugging Face name")
    parser.add_argument("prompts", metavar="PROMPTS", help="JSONL or Parquet of prompts: text or chat messages")
    given, options = parser.parse_known_args(arguments)
    try:
        settings = comparison_settings(given.model, given.prompts, options)
        return 0 if _compare(settings).holds else 1
    except OperatorError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _compare(settings: Settings) -> Comparison:
    model = find_model(settings)
    join_world(0, 1, "127.0.0.1", free_port(), _TIMEOUT_S)
    try:
        recorded = _plain(settings, model)
        sluice = SluiceSide(settings, model)
        first_step = None
        for number, groups in enumerate(recorded.groups, 1):
            sluice.step(number, groups)
            is_same = bits_of(sluice.weights()) == recorded.bits[number - 1]
            print(f"Sluice      step {number}: {'the same bits' if is_same else 'other bits'}", flush=True)
            first_step = first_step if is_same or first_step is not None else number
        found = compare(recorded.before, recorded.after, sluice.weights(), first_step)
    finally:
        dist.destroy_process_group()
    _tell(settings, recorded, found)
    return found


def _plain(settings: Settings, model: Path) -> _Recorded:
    """Return what the plain loop did; its models are gone then, and make room for Sluice's."""
    loop = Textbook(settings, model)
    rollouts = Rollouts(settings, model, load_prompts(settings.data.train, settings.data), loop)
    recorded = _Recorded(weights_of(loop))
    for number in range(1, settings.run.max_steps + 1):
        rollouts.take_weights()
        groups = loop.groups_of_use(rollouts.groups())
        loop.step(groups)
        recorded.groups.append(groups)
        recorded.bits.append(bits_of(weights_of(loop)))
        num_tokens = sum(int(answer.mask.sum()) for group in groups for answer in group)
        num_answers = sum(map(len, groups))
        print(f"plain loop  step {number}: {num_answers} answers, {num_tokens} tokens", flush=True)
    recorded.after, recorded.logprob_difference = weights_of(loop), rollouts.logprob_difference
    return recorded


def _tell(settings: Settings, recorded: _Recorded, found: Comparison) -> None:
    num_steps = settings.run.max_steps
    num_parameters = sum(weight.numel() for weight in recorded.before.values())
    print(
        f"\n{found.sentence(num_steps)}\n"
        f"  {found.num_same} of {found.num_tensors} tensors have the same bits; {num_parameters} parameters on "
        f"{own_device().type}, torch {torch.__version__}\n"
        f"  training moved the weights by {found.moved:.3g} (2-norm)\n"
        f"  transformers' own forward pass gives the answers' tokens logprobs that differ from the learner's by up to "
        f"{recorded.logprob_difference:.2g} nats\n"
        f"textbook recipe={settings.learner.recipe} steps={num_steps} tensors={found.num_tensors} "
        f"same={found.num_same} largest={found.largest:.3g} apart={found.apart:.3g} moved={found.moved:.3g} "
        f"logprobs={recorded.logprob_difference:.2g} holds={'yes' if found.holds else 'no'}"
    )
