"""Sixteen clients with an adapter each: who changes whose logprobs, who gets which share, what ends the memory.

Runs in a Python that has the tinker client, and none of this project. TINKER_BASE_URL names a service of its own with a
small `--adapter-gib`, such as 0.05 for a model of 64 numbers a token.

python sixteen_clients.py NAME      NAME: of the base model

The first client asks for 200 steps at once, the others wait for each step. Prints one line of figures; exit 0: no
logprob changed, no client had less than half of an equal share of the steps in 40 s, and a further model was refused.
"""

import asyncio
import sys
import time
import warnings
from typing import Any

warnings.simplefilter("ignore")

import tinker  # noqa: E402  # after the filter, since the client deprecates freely
from tinker import types  # noqa: E402

_NUM, _SECONDS, _MOST = 16, 40.0, 1000
_PROBE = 99


async def main(name: str) -> int:
    service = tinker.ServiceClient()
    created = (service.create_lora_training_client_async(name, rank=4 << i % 4, seed=i) for i in range(_NUM))
    clients = await asyncio.gather(*created)
    await asyncio.gather(*(_step(client, i) for i, client in enumerate(clients)))
    changed = 0
    for i, client in enumerate(clients):
        before = await _logprobs(client)
        await asyncio.gather(*(_step(other, j) for j, other in enumerate(clients) if j != i))
        changed += before != await _logprobs(client)
    distinct = len({tuple(await _logprobs(client)) for client in clients})
    end = time.monotonic() + _SECONDS
    counts = await asyncio.gather(_at_once(clients[0], end), *(_in_turn(c, i, end) for i, c in enumerate(clients) if i))
    least = min(counts) * _NUM / sum(counts)
    refusal = ""
    for _ in range(_MOST):
        try:
            await service.create_lora_training_client_async(name, rank=64)
        except tinker.RequestFailedError as error:
            refusal = str(error).split(" for self")[0]
            break
    print(f"clients={_NUM} changed={changed} distinct={distinct} least_share={least:.2f} steps={sum(counts)} {refusal}")
    return int(changed > 0 or distinct < _NUM or least < 0.5 or "memory" not in refusal)


async def _step(client: Any, number: int) -> None:
    done = await _ask(client, [_text(number)])
    for future in done:
        await future.result_async()


async def _in_turn(client: Any, number: int, end: float) -> int:
    count = 0
    while time.monotonic() < end:
        await _step(client, number)
        count += 1
    return count


async def _at_once(client: Any, end: float) -> int:
    steps = [(await _ask(client, [_text(0)] * 4))[-1] for _ in range(200)]
    count = 0
    for step in steps:
        await step.result_async()
        count += time.monotonic() < end
    return count


async def _ask(client: Any, data: list[types.Datum]) -> list[Any]:
    passed = await client.forward_backward_async(data, "cross_entropy")
    return [passed, await client.optim_step_async(types.AdamParams(learning_rate=1e-3))]


async def _logprobs(client: Any) -> list[float]:
    result = await (await client.forward_async([_text(_PROBE)], "cross_entropy")).result_async()
    return list(result.loss_fn_outputs[0]["logprobs"].data)


def _text(number: int) -> types.Datum:
    tokens = [13 + (31 * number + 7 * place) % 240 for place in range(49)]
    targets: dict[str, Any] = {"target_tokens": tokens[1:], "weights": [1.0] * 48}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=targets)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1])))
