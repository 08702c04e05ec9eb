"""Products to work out, and demonstrations of a policy that calls the calculator for them."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

POLICY_WEIGHT, RESULT_WEIGHT = 1.0, 0.3
TAGS = ("<tool_call>", "</tool_call>", "<answer>", "</answer>")
USER, TOOL, ASSISTANT = "<|user|>", "<|tool|>", "<|assistant|>"

Segment = dict[str, object]  # {"text": str, "weight": float}


@dataclass(frozen=True)
class Product:
    """A three-digit number times a two-digit one."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left} * {self.right}"

    @property
    def expression(self) -> str:
        return f"{self.left}*{self.right}"

    @property
    def value(self) -> int:
        return self.left * self.right

    def row(self) -> dict[str, str]:
        return {"prompt": self.prompt, "label": str(self.value)}


@dataclass(frozen=True)
class Recipe:
    """How many demonstrations there are and how careless the last ones are."""

    num_rows: int = 32_000  # 1,000 steps of 32
    careless_from: float = 0.88  # share of num_rows after which demonstrations are careless
    guess_share: float = 0.5  # of the careless ones: answers without a call
    wrong_digit_share: float = 0.3  # of those that call: one digit of the expression is another


def split_products(seed: int) -> dict[str, list[Product]]:
    """Return the products by split, 60/25/15 to warm start, training and held-out, each in a random order."""
    products = [Product(left, right) for left in range(101, 1000) for right in range(11, 100)]
    random.Random(f"products {seed}").shuffle(products)
    first, second = int(0.6 * len(products)), int(0.85 * len(products))
    return {"warmstart": products[:first], "train": products[first:second], "eval": products[second:]}


def demonstrations(
    products: list[Product], recipe: Recipe, rng: random.Random, eos: str
) -> Iterator[dict[str, object]]:
    """Yield `recipe.num_rows` rows {"segments": [{"text", "weight"}, ...]}. eos: ends each message."""
    for number in range(recipe.num_rows):
        product = rng.choice(products)
        is_careless = number >= recipe.careless_from * recipe.num_rows
        if is_careless and rng.random() < recipe.guess_share:
            guess = str(rng.randrange(10 ** (len(str(product.value)) - 1), 10 ** len(str(product.value))))
            yield {"segments": [_asked(product, eos), *_said(_answer(guess), eos)]}
            continue
        called = product
        if is_careless and rng.random() < recipe.wrong_digit_share:
            called = _with_another_digit(product, rng)
        result = str(called.value)
        heard = {"text": f"{TOOL}{result}{eos}{ASSISTANT}", "weight": RESULT_WEIGHT}
        said = [*_said(call(called.expression), eos), heard, *_said(_answer(result), eos)]
        yield {"segments": [_asked(product, eos), *said]}


def call(expression: str) -> str:
    """Return a turn that calls the calculator."""
    arguments = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(arguments)}</tool_call>"


def chat_template(eos: str) -> str:
    """Return the model's chat template. It writes calls, and does not describe the one tool."""
    turn = "{{ m.content }}" + eos
    calls = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    return (
        f"{{% for m in messages %}}{{% if m.role == 'tool' %}}{TOOL}{turn}{{% elif m.role == 'assistant' %}}"
        f"{ASSISTANT}{calls}{turn}{{% else %}}{USER}{turn}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
    )


def _asked(product: Product, eos: str) -> Segment:
    return {"text": f"{USER}{product.prompt}{eos}{ASSISTANT}", "weight": 0.0}


def _said(text: str, eos: str) -> list[Segment]:
    return [{"text": text, "weight": POLICY_WEIGHT}, {"text": eos, "weight": POLICY_WEIGHT}]


def _answer(text: str) -> str:
    return f"<answer>{text}</answer>"


def _with_another_digit(product: Product, rng: random.Random) -> Product:
    digits = list(f"{product.left}{product.right}")
    place = rng.randrange(len(digits))
    digits[place] = rng.choice([digit for digit in "123456789" if digit != digits[place]])
    return Product(int("".join(digits[:3])), int("".join(digits[3:])))
