"""A training script as users write it. It runs in a Python that has the tinker client, and none of this project.

python client_script.py MODEL      prints what it got as JSON; TINKER_BASE_URL names the service
"""

import json
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")

import tinker  # noqa: E402  # after the filter, since the client deprecates freely
from tinker import types  # noqa: E402

TOKENS = [[10 + number + place for place in range(11)] for number in range(3)]


def main() -> None:
    model = sys.argv[1]
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(model, rank=8, seed=1, user_metadata={"of": "script"}).result()
    found: dict[str, Any] = {"rank": client.get_info().lora_rank}
    found["losses"] = [train(client) for _ in range(4)]
    saved = client.save_state("mid").result().path
    data = [supervised(tokens) for tokens in TOKENS]
    found["forward"] = values(client.forward(data, "cross_entropy").result())
    found["custom"] = client.forward_backward_custom(data, custom_loss).result().metrics["of_tokens"]
    sampler = client.save_weights_and_get_sampling_client()
    scores = [sampler.compute_logprobs(text(tokens)) for tokens in TOKENS]  # at the same time
    found["prompt_logprobs"] = [each.result()[1:] for each in scores]
    found |= sample_and_train(client, sampler)
    again = service.create_training_client_from_state_with_optimizer(saved).result()
    found["loaded"] = values(again.forward(data, "cross_entropy").result())
    found["described"] = describe_and_delete(service.create_rest_client(), saved)
    named = client.save_weights_for_sampler("named").result().path
    greedy = types.SamplingParams(max_tokens=4, temperature=0.0)
    params: dict[str, Any] = {"prompt": text(TOKENS[0]), "num_samples": 1, "sampling_params": greedy}
    by_name = service.create_sampling_client(model_path=named).sample(**params).result().sequences[0]
    found["named"] = [list(by_name.tokens), list(sampler.sample(**params).result().sequences[0].tokens)]
    base = service.create_sampling_client(base_model=model).sample(**params).result().sequences[0]
    found["writers"] = [found["writer"], by_name.sequence_id, base.sequence_id]
    try:
        client.forward_backward(data, "stable_reinforce").result()
    except tinker.RequestFailedError as error:
        found["refusal"] = str(error)
    print(json.dumps(found))


def describe_and_delete(rest: Any, saved: str) -> list[Any]:
    run = rest.get_training_run_by_tinker_path(saved).result()
    info = rest.get_weights_info_by_tinker_path(saved).result()
    rest.delete_checkpoint_from_tinker_path(saved).result()
    try:
        rest.get_weights_info_by_tinker_path(saved).result()
    except tinker.NotFoundError as error:
        gone = str(error)
    return [run.base_model, run.lora_rank, run.user_metadata, info.lora_rank, info.train_unembed, gone]


def train(client: Any) -> float:
    passed = client.forward_backward([supervised(tokens) for tokens in TOKENS], "cross_entropy")
    stepped = client.optim_step(types.AdamParams(learning_rate=1e-2))
    stepped.result()
    return float(passed.result().metrics["loss:sum"])


def sample_and_train(client: Any, sampler: Any) -> dict[str, Any]:
    prompt = TOKENS[0][:4]
    given = sampler.sample(
        prompt=text(prompt), num_samples=2, sampling_params=types.SamplingParams(max_tokens=6, stop=[])
    ).result()
    data = [answer(prompt, each, advantage) for each, advantage in zip(given.sequences, (1.0, -1.0), strict=True)]
    passes = {
        name: client.forward_backward(data, name).result() for name in ("importance_sampling", "ppo", "cispo", "dro")
    }
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    return {
        "lengths": [len(each.tokens) for each in given.sequences],
        "sampled": [float(value) for each in given.sequences for value in each.logprobs],
        "learnt": [value for row in values(passes["ppo"]) for value in row[len(prompt) - 1 :]],
        "rl_losses": {name: each.metrics["loss:sum"] for name, each in passes.items()},
        "writer": given.sequences[0].sequence_id,
    }


def text(tokens: list[int]) -> Any:
    return types.ModelInput.from_ints(tokens)


def supervised(tokens: list[int]) -> Any:
    weights = [1.0] * (len(tokens) - 1)
    return types.Datum(model_input=text(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights})


def answer(prompt: list[int], sequence: Any, advantage: float) -> Any:
    tokens, before = [*prompt, *map(int, sequence.tokens)], [0.0] * (len(prompt) - 1)
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": [*before, *map(float, sequence.logprobs)],
        "advantages": [*before, *[advantage] * len(sequence.tokens)],
    }
    return types.Datum(model_input=text(tokens[:-1]), loss_fn_inputs=inputs)


def custom_loss(data: Any, logprobs: Any) -> Any:
    return -sum(each.sum() for each in logprobs), {"of_tokens": float(-sum(each.sum() for each in logprobs))}


def values(result: Any) -> list[list[float]]:
    return [[float(value) for value in each["logprobs"].data] for each in result.loss_fn_outputs]


if __name__ == "__main__":
    main()
