"""Each loss and its gradient, against a plain loop over a peft model."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from deploy.tinker.adapters import ALPHA, AdapterForm, BaseModel
from deploy.tinker.bodies import AdamParams
from deploy.tinker.wire import Datum, Pass, RequestError
from protocol.errors import OperatorError
from tests.benchmarks.packing_table import _BASE, ARCHITECTURES
from tests.deploy.tinker.played_client import base_model, datum

RATE = -2.0  # logprob of the sampler: some ratios lie outside every clip
DATA = [
    datum([5, 6, 7, 8, 9], logprobs=[RATE] * 4, advantages=[1.0, -1.0, 2.0, 0.0]),
    datum([9, 3], logprobs=[RATE], advantages=[-0.5]),
    datum([7, 7, 3, 200], logprobs=[RATE] * 3, advantages=[0.5, 1.5, -2.0]),
]
WEIGHTED = [datum([5, 6, 7], weights=[0.0, 0.5]), datum([9, 8], weights=[2.0])]


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def slow_loss(name: str, logprob: Any, numbers: dict[str, float]) -> Any:
    """Return one token's loss from its formula."""
    if name == "cross_entropy":
        return -numbers["weights"] * logprob
    advantage, ratio = numbers["advantages"], torch.exp(logprob - numbers["logprobs"])
    value = float(ratio.detach())
    if name == "importance_sampling":
        return -ratio * advantage
    if name == "ppo":
        bounded = clip(value, 0.8, 1.2)
        return -ratio * advantage if value * advantage <= bounded * advantage else torch.tensor(-bounded * advantage)
    if name == "cispo":
        return -clip(value, 0.0, 4.0) * advantage * logprob
    return -(logprob * advantage - 0.5 * 0.05 * (logprob - numbers["logprobs"]) ** 2)


def plain_model(folder: Path, base: BaseModel, adapter: Any) -> Any:
    """Return the same model and adapter, made by transformers and peft alone."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=adapter.form.rank, lora_alpha=int(ALPHA), target_modules=names)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    own = {name.removeprefix("base_model.model."): each for name, each in model.named_parameters()}
    with torch.no_grad():
        for name, each in adapter.parameters.items():
            own[name].copy_(each)
    return model, {name: own[name] for name in adapter.parameters}


def moved_adapter(base: BaseModel) -> Any:
    """Return an adapter whose product is not zero."""
    adapter = base.make_adapter(AdapterForm(4, seed=3))
    torch.manual_seed(0)
    for name, each in adapter.parameters.items():
        if "lora_B" in name:
            each.data = 0.05 * torch.randn_like(each)
    return adapter


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"])
@pytest.mark.parametrize("micro_batch_tokens", [1, 64])
def test_logprobs_loss_and_gradient_are_those_of_a_plain_loop(
    name: str, micro_batch_tokens: int, model_folder: Path
) -> None:
    base = base_model(model_folder, micro_batch_tokens)
    adapter = moved_adapter(base)
    data = WEIGHTED if name == "cross_entropy" else DATA
    model, parameters = plain_model(model_folder, base, adapter)

    found, total = base.run(adapter, Pass(data, name, {}, forward_only=False))

    expected = torch.zeros(())
    for each, logprobs in zip(data, found, strict=True):
        scores = torch.log_softmax(model(torch.from_numpy(each.tokens)[None]).logits[0], -1)
        slow = scores.gather(1, torch.from_numpy(each.inputs["target_tokens"])[:, None])[:, 0]
        assert np.abs(slow.detach().numpy() - logprobs).max() < 1e-4
        for place, logprob in enumerate(slow):
            numbers = {key: float(array[place]) for key, array in each.inputs.items()}
            expected = expected + slow_loss(name, logprob, numbers)
    expected.backward()  # type: ignore[no-untyped-call]
    assert math.isclose(total, float(expected.detach()), abs_tol=1e-4)
    for key, each in parameters.items():
        assert torch.allclose(adapter.parameters[key].grad, each.grad, atol=1e-4, rtol=1e-4), key


def test_a_forward_pass_adds_no_gradient_and_has_the_same_logprobs(base: BaseModel) -> None:
    adapter = moved_adapter(base)
    with_gradient, _ = base.run(moved_adapter(base), Pass(DATA, "ppo", {}, forward_only=False))
    without, _ = base.run(adapter, Pass(DATA, "ppo", {}, forward_only=True))

    assert [each.tolist() for each in without] == [each.tolist() for each in with_gradient]
    assert all(each.grad is None for each in adapter.parameters.values())


def test_gradients_of_several_passes_add_up(base: BaseModel) -> None:
    together, apart = moved_adapter(base), moved_adapter(base)
    base.run(together, Pass(WEIGHTED, "cross_entropy", {}, forward_only=False))
    for each in WEIGHTED:
        base.run(apart, Pass([each], "cross_entropy", {}, forward_only=False))

    for name, each in together.parameters.items():
        assert torch.allclose(each.grad, apart.parameters[name].grad, atol=1e-5), name


def test_steps_are_adamws_with_the_clients_numbers_and_each_begins_without_a_gradient(base: BaseModel) -> None:
    ours, plain = moved_adapter(base), moved_adapter(base)
    parameters = [*plain.parameters.values()]
    plain_adam = torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    adam = AdamParams(learning_rate=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5)
    for data in (WEIGHTED, WEIGHTED[:1]):
        base.run(ours, Pass(data, "cross_entropy", {}, forward_only=False))
        metrics = ours.step(adam)
        plain_adam.zero_grad()
        base.run(plain, Pass(data, "cross_entropy", {}, forward_only=False))
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        plain_adam.step()
        assert metrics == {"grad_norm": pytest.approx(float(norm)), "learning_rate": 0.01}
        assert float(norm) > 0.5

    for name, each in ours.parameters.items():
        assert torch.equal(each, plain.parameters[name]), name


REFUSED = [
    (Pass(WEIGHTED, "stable_reinforce", {}, False), "stable_reinforce is not served: its formula is not published"),
    (Pass(WEIGHTED, "gspo", {}, False), "gspo is not served: it is not known here. Use one of cross_entropy"),
    (
        Pass(WEIGHTED, "cross_entropy", {"beta": 1.0}, False),
        "loss_fn_config.beta = 1.0 is not served with cross_entropy",
    ),
    (Pass(WEIGHTED, "ppo", {}, False), r"data\[0\] has the inputs target_tokens, weights. Give advantages, logprobs"),
    (Pass(DATA, "ppo", {"clip_low_threshold": 1.3}, False), "clip_low_threshold must be at most clip_high_threshold"),
    (
        Pass([Datum(np.asarray([5]), {"target_tokens": np.asarray([np.nan], np.float32)})], "cross_entropy", {}, False),
        r"data\[0\] has a token outside 0 to 271",
    ),
    (Pass([datum([1, 300])], "cross_entropy", {}, False), r"data\[0\] has a token outside 0 to 271"),
    (Pass([datum([1] * 34)], "cross_entropy", {}, False), r"data\[0\] has 33 tokens. Give 1 to 32"),
    (Pass([datum([1, 2, 3], weights=[1.0])], "cross_entropy", {}, False), r"data\[0\].weights has the shape \[1\]"),
]


@pytest.mark.parametrize(("request_", "text"), REFUSED)
def test_a_request_that_is_not_served_is_refused_and_leaves_the_gradient(
    request_: Pass, text: str, base: BaseModel
) -> None:
    adapter = moved_adapter(base)
    base.run(adapter, Pass(WEIGHTED, "cross_entropy", {}, forward_only=False))
    before = {name: each.grad.clone() for name, each in adapter.parameters.items()}

    with pytest.raises(RequestError, match=text):
        base.run(adapter, request_)
    assert all(torch.equal(each.grad, before[name]) for name, each in adapter.parameters.items())


def test_layers_without_an_adapter_are_the_base_models(base: BaseModel) -> None:
    only_attention = base.make_adapter(AdapterForm(4, seed=3, train_mlp=False))

    assert {name.split(".")[3] for name in only_attention.parameters} == {"self_attn"}
    with pytest.raises(RequestError, match="no layer to train"):
        base.make_adapter(AdapterForm(4, seed=3, train_attn=False, train_mlp=False))


def test_an_adapters_logprobs_have_the_same_bits_after_anothers_step(base: BaseModel) -> None:
    one, other = moved_adapter(base), base.make_adapter(AdapterForm(8, seed=4))
    forward = Pass([Datum(each.tokens, each.inputs) for each in WEIGHTED], "cross_entropy", {}, True)
    before, _ = base.run(one, forward)
    base.run(other, Pass(WEIGHTED, "cross_entropy", {}, False))
    other.step(AdamParams(learning_rate=0.1))
    after, _ = base.run(one, forward)

    assert [each.tolist() for each in after] == [each.tolist() for each in before]
    assert base.run(other, forward)[0][0].tolist() != before[0].tolist()


def test_model_that_mixes_the_data_of_a_pass_is_refused(tmp_path: Path) -> None:
    """Its convolutions would read the end of another datum, and every gradient would be another one."""
    config = transformers.Lfm2Config(**_BASE, **ARCHITECTURES["Lfm2Config"][0])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(OperatorError, match=r"cannot be used .* mixes trajectories .* Set --micro-batch-tokens to 1"):
        base_model(tmp_path)
