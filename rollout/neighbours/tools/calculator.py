"""`calculator(expression)`: the value of an arithmetic expression, exact where Python's numbers are.

It accepts numbers, + - * / // % ** and brackets. Every expression is fast.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from protocol.settings.run_spec import RunSpec
from rollout.environments.base import ToolRefusal
from rollout.neighbours.node import Node
from rollout.neighbours.tools.tool import Tool, function_schema

Number = int | float
_MAX_CHARACTERS = 1000
# Bits of an integer: 300 digits, and a product takes a microsecond.
_MAX_BITS = 1000
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Calculator(Tool):
    """Needs no service: it is always available."""

    schema = function_schema(
        "calculator",
        "Returns the value of an arithmetic expression.",
        expression="Numbers, + - * / // % ** and brackets, such as (3 + 4) * 12.",
    )

    def __init__(self, spec: RunSpec, node: Node) -> None:
        pass

    async def __call__(self, expression: str) -> str:
        return calculate(expression)

    async def answer(self, arguments: Mapping[str, Any]) -> str:
        return calculate(arguments["expression"])


def calculate(expression: str) -> str:
    """Return an expression's value. Raises: ToolRefusal. Example: "2 ** 10 / 4" -> "256"."""
    if len(expression) > _MAX_CHARACTERS:
        raise ToolRefusal(f"the expression has {len(expression)} characters, at most {_MAX_CHARACTERS}")
    try:
        value = _value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolRefusal(f"not an arithmetic expression: {expression[:100]}") from None
    except ZeroDivisionError:
        raise ToolRefusal("division by zero") from None
    except OverflowError:
        raise ToolRefusal("the value is too large") from None
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _check_size(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, right=right) if type(node.op) in _BINARY:
            return _check_size(_BINARY[type(node.op)](_value(left), _value(right)))
    raise ValueError("not arithmetic")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and exponent >= 0:
        if base.bit_length() * exponent > _MAX_BITS and base not in (-1, 0, 1):
            raise OverflowError
        return _check_size(int(base**exponent))
    return _check_size(base**exponent)


def _check_size(value: Any) -> Number:
    """Return a result. Raises: OverflowError for a large one, ValueError for a complex one."""
    if isinstance(value, complex):
        raise ValueError("not a real number")
    if (isinstance(value, int) and value.bit_length() > _MAX_BITS) or (isinstance(value, float) and math.isinf(value)):
        raise OverflowError
    return int(value) if isinstance(value, int) else float(value)
