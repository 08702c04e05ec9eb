"""Which models are refused for computing a trajectory together with its neighbours, and what is said of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from learner.models.isolation import check_isolation, measure_isolation
from learner.models.micro_batch import MicroBatch
from learner.models.model_loading import turn_off_dropout
from protocol.errors import OperatorError
from tests.benchmarks.packing_table import ALONE, ARCHITECTURES, EXACT, REFUSED, measure

VOCAB = 31
Model = Callable[[MicroBatch], Tensor]


def bigram(micro_batch: MicroBatch) -> Tensor:
    """A model in which a token depends on the one before it: exact however it is packed."""
    before = micro_batch.tokens[0][micro_batch.predict_at]
    return -((before * 7 + micro_batch.targets * 3) % VOCAB).double()


def with_state(micro_batch: MicroBatch) -> Tensor:
    """A model that carries a state along all tokens, over the borders of trajectories."""
    return bigram(micro_batch) + micro_batch.tokens[0].double().cumsum(0)[micro_batch.predict_at]


def sees_the_end(micro_batch: MicroBatch) -> Tensor:
    return bigram(micro_batch) + micro_batch.tokens[0][-1]


def draws(micro_batch: MicroBatch) -> Tensor:
    return bigram(micro_batch) + torch.rand(micro_batch.num_model_tokens)


def without_positions(micro_batch: MicroBatch) -> Tensor:
    """A model that counts positions from the start of the micro-batch."""
    return bigram(micro_batch) + micro_batch.predict_at


def refuses(micro_batch: MicroBatch) -> Tensor:
    raise ValueError("sluice_varlen has no softcap")


def check(model: Model, micro_batch_tokens: int = 8192) -> None:
    check_isolation(model, VOCAB, name="me/tiny", dtype="float32", micro_batch_tokens=micro_batch_tokens)


def test_model_that_computes_trajectories_separately_is_accepted() -> None:
    check(bigram)


@pytest.mark.parametrize("model", [with_state, without_positions])
def test_model_that_mixes_trajectories_is_refused_by_name_and_taken_one_trajectory_at_a_time(model: Model) -> None:
    with pytest.raises(
        OperatorError,
        match=r"^The model me/tiny cannot be trained like this: it mixes trajectories of one micro-batch "
        r"\(by .* nats\)\. Set learner\.micro_batch_tokens to 1: every trajectory is then computed by itself\.$",
    ):
        check(model)
    check(model, micro_batch_tokens=1)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (sees_the_end, "lets a token see later ones"),
        (draws, "computes other logprobs each time"),
        (refuses, r"cannot take packed texts \(ValueError: sluice_varlen has no softcap\)"),
    ],
)
@pytest.mark.parametrize("micro_batch_tokens", [1, 8192])
def test_model_that_is_wrong_even_alone_is_refused(model: Model, words: str, micro_batch_tokens: int) -> None:
    with pytest.raises(OperatorError, match=rf"it {words}.*\. Use an architecture that"):
        check(model, micro_batch_tokens)


def test_nan_is_a_difference() -> None:
    with pytest.raises(OperatorError, match="computes other logprobs each time"):
        check(lambda micro_batch: bigram(micro_batch) * float("nan"))


def test_differences_are_the_largest_of_any_token() -> None:
    found = measure_isolation(without_positions, VOCAB)
    assert (found.again, found.causal, found.packed) == (0.0, 0.0, 24.0 + 17.0)


@pytest.mark.parametrize("name", ["Qwen3Config", "OPTConfig", "Lfm2Config", "BloomConfig", "DeepseekV3Config"])
def test_real_architecture_is_as_the_table_says(name: str) -> None:
    """OPT drops out in functions; LFM2 convolves along the tokens; BLOOM masks by itself;
    DeepSeek's values have fewer numbers than its keys."""
    ((_, outcome, _),) = measure([name], seed=0)
    assert outcome == ARCHITECTURES[name][1]
    assert {name: ARCHITECTURES[name][1] for name in ("OPTConfig", "Lfm2Config", "BloomConfig")} == {
        "OPTConfig": EXACT,
        "Lfm2Config": ALONE,
        "BloomConfig": REFUSED,
    }


def test_every_dropout_of_a_configuration_and_its_parts_is_turned_off() -> None:
    from transformers import Gemma3Config, GPT2Config, OPTConfig, PhimoeConfig

    opt = OPTConfig(dropout=0.1, attention_dropout=0.2, layerdrop=0.3, init_std=0.25)
    gpt2, phi = GPT2Config(), PhimoeConfig(router_jitter_noise=0.01)
    gemma = Gemma3Config(text_config={"attention_dropout": 0.5})
    for config in (opt, gpt2, phi, gemma):
        turn_off_dropout(config)
    assert (opt.dropout, opt.attention_dropout, opt.layerdrop, opt.init_std) == (0.0, 0.0, 0.0, 0.25)
    assert (gpt2.attn_pdrop, gpt2.embd_pdrop, gpt2.resid_pdrop) == (0.0, 0.0, 0.0)
    assert gemma.text_config.attention_dropout == 0.0
    assert phi.router_jitter_noise == 0.0
