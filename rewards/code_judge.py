"""Runs a test of code in the sandbox: this program is the judge, and a second process of it, the worker, runs the code.

Only the judge receives the test and the secret mark of a passed test, through stdin. In the test the code's functions
and objects are proxies: a call goes through a pipe, and plain values come back. So code cannot pass by reading the
test, by ending the process, or with objects that equal anything: an object equals no plain value. Two objects are
equal if the code's own == says it; a test that compares only objects of the code trusts their classes.
Built-ins and standard modules are the language's own in a test, but for the names in `own` (`code_names`).

    stdin   {"code", "test", "call", "entry", "own", "modules", "mark"}
    stdout  the mark, then the value of the call as JSON, after the test has passed
            the mark and UNFIT, then what no code could receive, after the test has failed
"""

import builtins
import collections
import ctypes
import importlib
import json
import operator
import os
import re
import signal
import subprocess
import sys
import types
from typing import Any, TextIO

_NOT_DUMPABLE = 4
_EXIT_S = 5.0
UNFIT = " unfit: "
_BY_ITEMS: tuple[Any, ...] = (list, tuple, set, frozenset)
# Values of these classes are rebuilt in the other process.
_VALUES = {"decimal": ("Decimal",), "fractions": ("Fraction",), "builtins": ("range",), "collections": ("deque",),
           "datetime": ("date", "datetime", "time", "timedelta", "timezone")}  # fmt: skip
_SCALING = ("mul", "matmul", "truediv", "pow")
_OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")


class Pipe:
    """Exchanges lines of JSON with the other process. Values are sent as [name of the type, content]."""

    def __init__(self, reading: TextIO, writing: TextIO, sends_objects: bool) -> None:
        """sends_objects: whether the peer may use objects of this process."""
        self._sends_objects = sends_objects
        self._reading, self._writing = reading, writing
        self.own: list[Any] = []  # objects that stay in this process; the peer knows their numbers
        self._numbers: dict[int, int] = {}  # id of each of them -> number
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
        """Return the peer's reply. Raises: the error of the code, as the nearest built-in exception; EOFError."""
        self.send(request)
        if (reply := self.receive()) is None:
            raise EOFError("the code ended its process")
        if "raised" in reply:
            raise self._make_error(**reply)
        return reply

    def encode(self, value: Any) -> list[Any]:
        """Return plain values and values of their subclasses by content, other objects by number."""
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
            return ["counter" if isinstance(value, collections.Counter) else "dict", pairs]
        if type(value) is Remote:
            return ["own", value._sluice_number]
        module, name = type(value).__module__, type(value).__name__
        if name in _VALUES.get(module, ()):
            parts = (list(value), value.maxlen) if name == "deque" else value.__reduce__()[1]
            return ["value", [module, name, self.encode(parts)]]
        if isinstance(value, type) and issubclass(value, Exception):
            own = self._errors.get(value.__name__) is value and not self._sends_objects
            return ["own", self._numbers[id(value)]] if own else ["error", [self._number(value), _names_of(value)]]
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
        if kind in ("dict", "counter"):
            pairs = {self.decode(key): self.decode(each) for key, each in content}
            return collections.Counter(pairs) if kind == "counter" else pairs
        if kind == "named":
            return collections.namedtuple(content[0], content[1], rename=True)(*self.decode(content[2]))
        if kind == "remote":
            return Remote(self, content)
        if kind == "own":
            return self.own[content]
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
    """A proxy for a function, class or object of the code: it can be called, iterated, and its attributes read."""

    __slots__ = ("_sluice_number", "_sluice_pipe")

    def __init__(self, pipe: Pipe, number: int) -> None:
        object.__setattr__(self, "_sluice_pipe", pipe)
        object.__setattr__(self, "_sluice_number", number)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._sluice_do("call", arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        return self._sluice_do("get", (name,), {})

    def __bool__(self) -> bool:
        return self._sluice_do("bool", (), {}) is True

    def __len__(self) -> int:
        return int(self._sluice_do("len", (), {}))

    def __str__(self) -> str:
        return str(self._sluice_do("str", (), {}))

    def __next__(self) -> Any:
        return self._sluice_do("next", (), {})

    def __getitem__(self, key: Any) -> Any:
        return self._sluice_do("item", (key,), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self._sluice_do("set item", (key, value), {})

    def __setattr__(self, name: str, value: Any) -> None:
        self._sluice_do("set", (name, value), {})

    def __repr__(self) -> str:
        return str(self._sluice_do("repr", (), {}))

    def __float__(self) -> float:
        return float(self._sluice_do("float", (), {}))

    def __int__(self) -> int:
        return int(self._sluice_do("int", (), {}))

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is Remote and self._sluice_do("has instance", (value,), {}) is True

    def __lt__(self, other: Any) -> bool:
        if type(other) is not Remote:  # the code must not decide a comparison with a plain value
            return NotImplemented
        return self._sluice_do("less", (other,), {}) is True

    def __iter__(self) -> Any:
        return iter(self._sluice_do("list", (), {}))

    def __hash__(self) -> int:
        return int(self._sluice_do("hash", (), {}))

    def __eq__(self, other: object) -> bool:
        return type(other) is Remote and self._sluice_do("equal", (other,), {}) is True

    def _sluice_operate(self, name: str, *operands: Any) -> Any:
        plain = [each for each in operands if type(each) is not Remote]
        is_sum = name == "add" and type(operands[0]) is int and operands[0] == 0  # sum() begins with 0
        # The code's own operator must not decide a comparison with a plain value, such as abs(f(2) - 3.5) < 1e-6.
        if plain and not (is_sum or name in _SCALING):
            raise TypeError(f"{name} of an object and a plain value could compare them")
        result = self._sluice_do("operate", (name, *operands), {})
        if plain and type(result) is not Remote:
            raise TypeError(f"{name} of an object and a plain value must return an object")
        return result

    def _sluice_do(self, do: str, arguments: Any, keywords: Any) -> Any:
        pipe = self._sluice_pipe
        given = [pipe.encode(list(arguments)), pipe.encode(keywords)]
        reply = pipe.ask({"do": do, "on": self._sluice_number, "arguments": given})
        for original, changed in zip(arguments, pipe.decode(reply["arguments"]), strict=True):
            if isinstance(original, list):
                original[:] = changed
            elif isinstance(original, set | dict):
                original.clear()
                original.update(changed)
        return pipe.decode(reply["value"])


for _name in _OPERATORS:
    setattr(Remote, f"__{_name}__", lambda self, other, name=_name: self._sluice_operate(name, self, other))
    setattr(Remote, f"__r{_name}__", lambda self, other, name=_name: self._sluice_operate(name, other, self))
for _name in ("neg", "abs"):
    setattr(Remote, f"__{_name}__", lambda self, name=_name: self._sluice_operate(name, self))


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether the code's objects are equal, unless their class calls an object without content equal too."""
    if one is other or not operator.eq(one, other):
        return one is other
    try:
        if one.__reduce_ex__(2) == other.__reduce_ex__(2):
            return True
        return not operator.eq(one, object.__new__(type(one)))
    except Exception:  # == reads the content
        return True


_ACTIONS: dict[str, Any] = {
    "call": lambda value, *arguments, **keywords: value(*arguments, **keywords),
    "get": getattr,
    "bool": bool,
    "len": len,
    "str": str,
    "next": next,
    "item": lambda value, key: value[key],
    "list": list,
    "equal": _is_equal,
    "hash": hash,
    "set": setattr,
    "set item": operator.setitem,
    "repr": repr,
    "float": float,
    "int": int,
    "has instance": lambda kind, value: isinstance(value, kind),
    "less": operator.lt,
    "operate": lambda _, name, *operands: getattr(operator, f"__{name}__")(*operands),
}


def worker() -> None:
    """Run the code and serve the judge's requests for its definitions."""
    judge = Pipe(os.fdopen(int(sys.argv[2])), os.fdopen(int(sys.argv[3]), "w"), sends_objects=True)
    module = sys.modules["solution"] = types.ModuleType("solution")
    task = judge.receive()
    try:
        exec(compile(task["code"], "solution.py", "exec"), module.__dict__)  # noqa: S102
        names = {name: judge.encode(value) for name, value in vars(module).items() if not name.startswith("__")}
    except BaseException as error:
        judge.send(judge.failure(error))
        return
    judge.send({"names": names})
    while (request := judge.receive()) is not None:
        try:
            arguments, keywords = (judge.decode(each) for each in request["arguments"])
            value = _ACTIONS[request["do"]](judge.own[request["on"]], *arguments, **keywords)
            reply = {"value": judge.encode(value), "arguments": judge.encode(arguments)}
        except BaseException as error:  # the code may raise anything
            reply = judge.failure(error)
        judge.send(reply)


def main() -> None:
    ctypes.CDLL(None).prctl(_NOT_DUMPABLE, 0, 0, 0, 0)  # the worker runs as the same user and must not read this memory
    task = json.loads(sys.stdin.buffer.read())
    os.ftruncate(0, 0)  # stdin is a file
    read_end, their_writing = os.pipe()
    their_reading, write_end = os.pipe()
    source = [__file__] if "__file__" in globals() else ["-c", sys.orig_argv[sys.orig_argv.index("-c") + 1]]
    command = [sys.executable, "-I", "-S", "-B", *source, "worker", str(their_reading), str(their_writing)]
    process = subprocess.Popen(  # noqa: S603
        command,
        pass_fds=[their_reading, their_writing],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(their_reading)
    os.close(their_writing)
    code = Pipe(os.fdopen(read_end), os.fdopen(write_end, "w"), sends_objects=False)
    try:
        result = _test(task, code)
    except EOFError:
        if process.wait(_EXIT_S) == -signal.SIGXCPU:
            os.kill(os.getpid(), signal.SIGXCPU)  # the sandbox sees that the code exceeded its time
        raise
    except Exception:
        if not code.unfit:
            raise
        result = UNFIT + code.unfit
    print(task["mark"] + result, flush=True)
    os._exit(0)  # the sandbox kills the worker


def _test(task: dict[str, Any], code: Pipe) -> str:
    """Return the value of the task's call as JSON; empty for statements, which have passed."""
    sent = code.ask({"code": task["code"]})["names"]
    names = {name: code.decode(value) for name, value in sent.items() if not name.startswith("__")}
    if task["call"] is not None:
        name, arguments = task["call"]
        function = getattr(names["Solution"](), name) if "Solution" in names else names[name]
        return json.dumps(function(**arguments) if isinstance(arguments, dict) else function(*arguments))
    languages = {*vars(builtins), *sys.stdlib_module_names} - {*task["own"]}
    scope = {name: value for name, value in names.items() if name not in languages}
    solution = sys.modules["solution"] = types.ModuleType("solution")
    vars(solution).update(names, __all__=list(scope))
    scope |= {name: importlib.import_module(name) for name in task["modules"]}
    try:
        _run_tests(task, names, scope)
    except NameError as error:
        # A helper of the data set, such as list_node. error.name: the name is missing in the test, not in the code.
        if task["entry"] is not None and error.name and error.name not in names and not _lacks(task["entry"], names):
            code.unfit = f"it uses {error.name}, which neither it nor the code defines"
        raise
    return ""


def _lacks(entry: str, names: dict[str, Any]) -> bool:
    return not any(name in names for name in re.findall(r"\w+", entry)[:1])


def _run_tests(task: dict[str, Any], names: dict[str, Any], scope: dict[str, Any]) -> None:
    exec(compile(task["test"], "test.py", "exec"), scope)  # noqa: S102
    for name, function in list(scope.items()):
        is_test = name.startswith("test") and isinstance(function, types.FunctionType)
        if is_test and not function.__code__.co_argcount:
            function()  # as pytest does
    if task["entry"] is not None:
        scope["check"](eval(task["entry"], names))  # noqa: S307


if __name__ == "__main__":
    worker() if sys.argv[1:2] == ["worker"] else main()
