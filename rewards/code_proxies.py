"""Proxies of the objects of tested code, and the pipe between the process of the test and the process of the code."""

import builtins
import collections
import copy
import importlib
import json
import math
import operator
import secrets
import threading
import types
from typing import Any, TextIO

_BY_ITEMS: tuple[Any, ...] = (list, tuple, set, frozenset)
# Values of these classes are rebuilt in the other process.
_VALUES = {"decimal": ("Decimal",), "fractions": ("Fraction",), "builtins": ("range",), "collections": ("deque",),
           "datetime": ("date", "datetime", "time", "timedelta", "timezone")}  # fmt: skip
_SCALING = ("mul", "matmul", "truediv", "pow")
_OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor",
              "lshift", "rshift")  # fmt: skip
# What a test may do with the result of an operator between an object and a plain value.
_OF_MIXED = (
    "getattr",
    "setattr",
    "call",
    "equal",
    "operate",
    "deepcopy",
    "copy",
    "hash",
    "str",
    "repr",
    "format",
)
_DICTS: dict[str, Any] = {"counter": collections.Counter, "ordered": collections.OrderedDict, "dict": dict}
_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
# Special methods of the same names, `getattr` for __getattr__.
SPECIAL: dict[str, Any] = {
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem", "index")},
    **{name: getattr(math, name) for name in ("trunc", "floor", "ceil")},
    **{each.__name__: each for each in (getattr, setattr, delattr, iter, reversed, bool, len, str, repr, format, hash)},
    **{each.__name__: each for each in (int, float, complex, bytes, round)},
    "copy": copy.copy,
    "enter": lambda value: value.__enter__(),
    "exit": lambda value, *error: value.__exit__(*error),
}


class CodeEnded(BaseException):
    """The process of the code ended. No test can catch it."""


class Pipe:
    """Exchanges lines of JSON with the other process. Values are sent as [name of the type, content]."""

    def __init__(self, reading: TextIO, writing: TextIO, sends_objects: bool) -> None:
        """sends_objects: whether the peer may use objects of this process."""
        self._sends_objects = sends_objects
        self._reading, self._writing, self._lock = reading, writing, threading.Lock()
        self.own: list[Any] = []  # objects that stay in this process; the peer knows their numbers
        self._numbers: dict[int, int] = {}  # id of each of them -> number
        self._proxies: dict[int, Remote] = {}  # by number: `is` holds in a test as in the code
        self._errors: dict[str, Any] = {}  # the code's own classes of errors by name, as this process has them
        self.unfit = ""  # what of the test cannot be sent

    def send(self, message: Any) -> None:
        self._writing.write(json.dumps(message) + "\n")
        self._writing.flush()

    def receive(self) -> Any:
        """Return the peer's message; None after its end."""
        line = self._reading.readline()
        return json.loads(line) if line.endswith("\n") else None

    def ask(self, request: Any) -> Any:
        """Return the peer's reply. Raises: the error of the code, as the nearest built-in exception; CodeEnded."""
        with self._lock:  # tests may have threads
            self.send(request)
            reply = self.receive()
        if reply is None:
            raise CodeEnded
        if "raised" in reply:
            raise self._make_error(**reply)
        return reply

    def encode(self, value: Any, is_made: bool = False) -> list[Any]:
        """Return plain values and values of their subclasses by content, other objects by number.

        is_made: the test called the class of the value.
        """
        if is_made and type(value).__module__ == "solution" and not hasattr(value, "_fields"):
            return ["remote", self._number(value)]  # such as a cache that is a dict
        if value is None or isinstance(value, bool):
            return ["same", value]
        if isinstance(value, int):
            return ["same", int.__int__(value)]
        if isinstance(value, float | complex):
            return ["float", float.__repr__(value)] if isinstance(value, float) else ["complex", repr(value)]
        if isinstance(value, str):
            return ["same", str.__str__(value)]
        if isinstance(value, bytes | bytearray):
            return ["bytes", bytes(value).hex()]
        if isinstance(value, tuple) and (fields := getattr(type(value), "_fields", None)):
            return ["named", [type(value).__name__, list(fields), self.encode(list(value))]]
        for kind in _BY_ITEMS:
            if isinstance(value, kind):
                return [kind.__name__, [self.encode(each) for each in kind.__iter__(value)]]
        if isinstance(value, dict):
            pairs = [[self.encode(key), self.encode(each)] for key, each in dict.items(value)]
            kinds = (kind for kind, its_class in _DICTS.items() if isinstance(value, its_class))
            return [next(kinds), pairs]
        if type(value) in _VIEWS:
            return [type(value).__name__, self.encode(list(value))]
        if type(value) is Remote:
            return ["own", value._sluice_number]
        module, name = type(value).__module__, type(value).__name__
        if name in _VALUES.get(module, ()):
            parts = (list(value), value.maxlen) if name == "deque" else value.__reduce__()[1]
            return ["value", [module, name, self.encode(parts)]]
        if isinstance(value, type) and issubclass(value, Exception):
            own = self._errors.get(value.__name__) is value and not self._sends_objects
            return ["own", self._numbers[id(value)]] if own else ["error", [self._number(value), _names_of(value)]]
        if isinstance(value, Exception | types.TracebackType) and not self._sends_objects:  # for __exit__
            return ["exception", self.failure(value)] if isinstance(value, Exception) else ["same", None]
        if not self._sends_objects:
            self.unfit = f"it passes {value!r:.80} to the code, which can receive plain values only"
            raise TypeError(self.unfit)
        return ["remote", self._number(value)]

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.own)
            self.own.append(value)
        return self._numbers[id(value)]

    def decode(self, value: Any) -> Any:
        kind, content = value
        if kind in ("list", "tuple", "set", "frozenset"):
            return getattr(builtins, kind)(self.decode(each) for each in content)
        if kind in _DICTS:
            return _DICTS[kind]({self.decode(key): self.decode(each) for key, each in content})
        if kind in ("dict_keys", "dict_values", "dict_items"):
            items = self.decode(content)
            made = dict(enumerate(items)) if kind == "dict_values" else dict.fromkeys(items)
            return dict(items).items() if kind == "dict_items" else getattr(made, kind.removeprefix("dict_"))()
        if kind == "named":
            return collections.namedtuple(content[0], content[1], rename=True)(*self.decode(content[2]))
        if kind == "remote":
            return self._proxies.setdefault(content, Remote(self, content))
        if kind == "own":
            return self.own[content]
        if kind == "exception":
            return self._make_error(**content)
        if kind == "error":
            found = self._error_class(content[1])
            if found in self._errors.values():
                self._numbers[id(found)] = content[0]
            return found
        if kind == "value" and content[1] in _VALUES[content[0]]:
            return getattr(importlib.import_module(content[0]), content[1])(*self.decode(content[2]))
        convert: Any = {"bytes": bytes.fromhex, "complex": complex, "float": float}.get(kind)
        return content if convert is None else convert(content)

    def failure(self, error: BaseException) -> dict[str, Any]:
        """Return what `ask` raises in the other process."""
        try:
            facts = {"text": str(error)[:500], "arguments": self.encode(error.args), "state": self.encode(vars(error))}
            return {"raised": _names_of(type(error)), **facts}
        except BaseException:  # str() of an error may raise
            return {"raised": _names_of(type(error)), "text": "", "arguments": ["tuple", []], "state": ["dict", []]}

    def _make_error(self, raised: list[str], text: str, arguments: Any, state: Any) -> Exception:
        if "Exception" not in raised:
            return RuntimeError(f"{raised[0]}: {text}")
        if raised[0] not in vars(builtins):
            error: Exception = self._error_class(raised)(text)
            vars(error).update(self.decode(state))
            return error
        return self._error_class(raised)(*self.decode(arguments))  # type: ignore[no-any-return]

    def _error_class(self, names: list[str]) -> Any:
        """Return the built-in class of this name, or one like the code's. names: of the class and its bases."""
        found = getattr(builtins, names[0], None)
        if isinstance(found, type) and issubclass(found, Exception):
            return found
        if names[0] not in self._errors:
            self._errors[names[0]] = type(names[0], (self._error_class(names[1:]),), {})
        return self._errors[names[0]]


def _names_of(kind: type) -> list[str]:
    return [each.__name__ for each in kind.__mro__]


class Remote:
    # A proxy for a function, class or object of the code.

    __slots__ = ("_sluice_ahead", "_sluice_is_mixed", "_sluice_number", "_sluice_pipe")

    def __init__(self, pipe: Pipe, number: int) -> None:
        ahead: collections.deque[Any] = collections.deque()
        fields = {"pipe": pipe, "number": number, "is_mixed": False, "ahead": ahead}
        for name, value in fields.items():
            object.__setattr__(self, f"_sluice_{name}", value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._sluice_do("call", arguments, keywords)

    __doc__ = property(lambda self: self._sluice_do("getattr", ("__doc__",)))

    def __getattr__(self, name: str) -> Any:
        return self._sluice_do("getattr", (name,))

    def __deepcopy__(self, _: Any) -> Any:
        return self._sluice_do("deepcopy")

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is Remote and self._sluice_do("has instance", (value,)) is True

    def __iter__(self) -> Any:
        return self._sluice_do("iter")

    def __next__(self) -> Any:
        if not self._sluice_ahead:
            self._sluice_ahead.extend(self._sluice_do("items"))
        return self._sluice_ahead.popleft()

    def __contains__(self, value: Any) -> bool:
        if not self._sluice_do("has own contains"):
            return any(each is value or each == value for each in self)
        # The code must not decide that it holds whatever a test expects, so it is asked for another value too.
        asked = [(value, True)] if type(value) is Remote else [(value, True), (_made_up(value), False)]
        secrets.SystemRandom().shuffle(asked)
        return all(self._sluice_do("contains", (each,)) is expected for each, expected in asked)

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is Remote and self._sluice_do("equal", (other,)) is True)

    def _sluice_order(self, name: str, other: Any) -> Any:
        # The code must not decide a comparison with a plain value.
        if type(other) is not Remote or self._sluice_is_mixed or other._sluice_is_mixed:
            return NotImplemented
        return self._sluice_do("operate", (name, self, other)) is True

    def _sluice_operate(self, name: str, *operands: Any) -> Any:
        plain = [each for each in operands if type(each) is not Remote]
        is_sum = name == "add" and type(operands[0]) is int and operands[0] == 0  # sum() begins with 0
        result = self._sluice_do("operate", (name, *operands))
        # The code's own operator must not decide a comparison with a plain value, such as abs(f(2) - 3.5) < 1e-6.
        is_mixed = any(each._sluice_is_mixed for each in operands if type(each) is Remote)
        if (plain or is_mixed) and type(result) is not Remote:
            raise TypeError(f"{name} of an object and a plain value must return an object")
        if type(result) is Remote and (is_mixed or (plain and not is_sum and name.lstrip("i") not in _SCALING)):
            object.__setattr__(result, "_sluice_is_mixed", True)
        return result

    def _sluice_do(self, do: str, arguments: Any = (), keywords: Any = None) -> Any:
        if self._sluice_is_mixed and do not in _OF_MIXED:
            raise TypeError(f"{do} of what an operator returned could compare it with a plain value")
        pipe = self._sluice_pipe
        given = [pipe.encode(list(arguments)), pipe.encode(keywords or {})]
        reply = pipe.ask({"do": do, "on": self._sluice_number, "arguments": given})
        for original, changed in zip(arguments, pipe.decode(reply["arguments"]), strict=True):
            if isinstance(original, list):
                original[:] = changed
            elif isinstance(original, set | dict):
                original.clear()
                original.update(changed)
        return pipe.decode(reply["value"])


def _made_up(value: Any) -> Any:
    """Return another value of the same type."""
    if type(value) is tuple and value:
        return tuple(map(_made_up, value))
    if type(value) not in (int, float, str):
        raise TypeError(f"whether an object holds {value!r:.80} is the code's word alone")
    return type(value)(secrets.randbits(40))


def _add_special_methods() -> None:
    for name in _OPERATORS:
        setattr(Remote, f"__{name}__", lambda self, other, name=name: self._sluice_operate(name, self, other))
        setattr(Remote, f"__r{name}__", lambda self, other, name=name: self._sluice_operate(name, other, self))
        if name != "divmod":
            setattr(
                Remote, f"__i{name}__", lambda self, other, name=f"i{name}": self._sluice_operate(name, self, other)
            )
    for name in ("neg", "pos", "abs", "invert"):
        setattr(Remote, f"__{name}__", lambda self, name=name: self._sluice_operate(name, self))
    for name in ("lt", "le", "gt", "ge"):
        setattr(Remote, f"__{name}__", lambda self, other, name=name: self._sluice_order(name, other))
    for name in SPECIAL:
        setattr(Remote, f"__{name}__", lambda self, *given, name=name: self._sluice_do(name, given))


_add_special_methods()
