"""Runs a test of code in the sandbox: a program of its own, of which a copy runs the code, in a process apart.

What the test is, and the mark that says that it was passed, come by stdin and are known to the judge alone. The code's
functions and objects are stand-ins in the test: a call goes over a pipe, and plain values come back. So no code passes
by reading the test, by ending the process, or by objects that equal anything.

    stdin   {"code", "test", "call", "mark"}
    stdout  the mark, and a call's value as JSON, once the test is passed
"""

import builtins
import ctypes
import importlib
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

_NOT_DUMPABLE = 4
_OPERATORS = ("len", "getitem", "setitem", "delitem", "neg", "bool", "int", "float", "str", "repr", "iter", "next")
# Asked of the code only among its own objects: beside a value of the test the answer could be anything.
_AMONG_OWN = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge")
_EXACT = ("fractions.Fraction", "decimal.Decimal")


class Pipe:
    """Lines of JSON to the other process and from it; objects stay where they are, and go by number."""

    def __init__(self, reading: TextIO, writing: TextIO, only_calls: bool) -> None:
        """only_calls: the other may call what it was given here, and nothing else."""
        self._only_calls = only_calls
        self._reading, self._writing = reading, writing
        self._own: list[Any] = []

    def ask(self, request: Any) -> Any:
        """Return the other's answer; meanwhile what it asks is done here."""
        self.send(request)
        while (message := self.receive()) is not None:
            if "do" not in message:
                if "raised" in message:
                    raise _error_of(message["raised"], message["text"])
                return message
            self.answer(message)
        raise EOFError("the code ended its process")

    def answer(self, request: Any) -> None:
        """Do what the other asks, and tell it what came of it."""
        reply: dict[str, Any]
        try:
            if self._only_calls and request["do"] != "call":
                raise TypeError("what a test passes can be called, and nothing else")
            arguments = [self.decoded(each) for each in request["arguments"]]
            value = _done(self._own[request["on"]], request["do"], arguments, request["keywords"], self)
            reply = {"value": self.encoded(value), "arguments": [self.encoded(each) for each in arguments]}
        except BaseException as error:  # a program's code may raise anything
            reply = {"raised": [kind.__name__ for kind in type(error).__mro__], "text": _text(error)}
        self.send(reply)

    def send(self, message: Any) -> None:
        self._writing.write(json.dumps(message) + "\n")
        self._writing.flush()

    def receive(self) -> Any:
        line = self._reading.readline()
        return json.loads(line) if line.endswith("\n") else None

    def encoded(self, value: Any) -> list[Any]:
        """Return a value as JSON: plain ones, and what derives from them, as they are; others by number."""
        try:
            return self._plain(value)
        except RecursionError:
            return self._number(value)

    def decoded(self, value: Any) -> Any:
        kind, held = value
        if kind in ("list", "tuple", "set", "frozenset"):
            return getattr(builtins, kind)(self.decoded(each) for each in held)
        if kind == "dict":
            return {self.decoded(pair[0]): self.decoded(pair[1]) for pair in held}
        if kind == "other":
            return Remote(self, held)
        if kind in _EXACT:
            module, name = kind.split(".")
            return getattr(importlib.import_module(module), name)(held)
        if kind == "own":
            return self._own[held]
        made: Any = {"bytes": bytes.fromhex, "complex": complex, "float": float}.get(kind)
        return held if made is None else made(held)

    def _plain(self, value: Any) -> list[Any]:
        if value is None or isinstance(value, bool):
            return ["same", value]
        if isinstance(value, int):
            return ["same", int.__int__(value)]
        if isinstance(value, float):
            return ["float", float.__repr__(value)]
        if isinstance(value, str):
            return ["same", str.__str__(value)]
        if isinstance(value, complex):
            return ["complex", complex.__repr__(value)]
        if isinstance(value, bytes | bytearray):
            return ["bytes", bytes(value).hex()]
        kinds: tuple[Any, ...] = (list, tuple, set, frozenset)
        for kind in kinds:
            if isinstance(value, kind):
                return [kind.__name__, [self._plain(each) for each in kind.__iter__(value)]]
        if isinstance(value, dict):
            return ["dict", [[self._plain(key), self._plain(each)] for key, each in dict.items(value)]]
        if (name := f"{type(value).__module__}.{type(value).__qualname__}") in _EXACT:
            return [name, str(value)]
        if type(value) is Remote:
            return ["own", value._sluice_number]
        return self._number(value)

    def _number(self, value: Any) -> list[Any]:
        self._own.append(value)
        return ["other", len(self._own) - 1]


class Remote:
    """Stands for an object of the other process."""

    __slots__ = ("_sluice_number", "_sluice_pipe")

    def __init__(self, pipe: Pipe, number: int) -> None:
        self._sluice_pipe, self._sluice_number = pipe, number

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return _asked(self, "call", arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        return _asked(self, "get", (name,), {})

    def __eq__(self, other: object) -> bool:
        return type(other) is Remote and _asked(self, "equal", (other,), {}) is True

    def __hash__(self) -> int:
        return hash(self._sluice_number)


def _operator(name: str) -> Callable[..., Any]:
    def method(self: Remote, *arguments: Any) -> Any:
        return _asked(self, name, arguments, {})

    return method


def _operator_among_own(name: str) -> Callable[..., Any]:
    def method(self: Remote, other: Any) -> Any:
        return _asked(self, name, (other,), {}) if type(other) is Remote else NotImplemented

    return method


for _name in _OPERATORS:
    setattr(Remote, f"__{_name}__", _operator(f"__{_name}__"))
for _name in _AMONG_OWN:
    setattr(Remote, f"__{_name}__", _operator_among_own(f"__{_name}__"))


def _asked(remote: Remote, do: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    pipe = remote._sluice_pipe
    sent = [pipe.encoded(each) for each in arguments]
    named = {name: pipe.encoded(each) for name, each in keywords.items()}
    reply = pipe.ask({"do": do, "on": remote._sluice_number, "arguments": sent, "keywords": named})
    for given, changed in zip(arguments, reply["arguments"], strict=True):
        _change(given, changed, pipe)
    return pipe.decoded(reply["value"])


def _change(given: Any, changed: Any, pipe: Pipe) -> None:
    """Have a list, set or dictionary hold what the other made of its copy."""
    if isinstance(given, list) and changed[0] == "list":
        given[:] = pipe.decoded(changed)
    elif isinstance(given, set | dict) and changed[0] in ("set", "dict"):
        held = pipe.decoded(changed)
        given.clear()
        given.update(held)


def _done(value: Any, do: str, arguments: Sequence[Any], keywords: Mapping[str, Any], pipe: Pipe) -> Any:
    if do == "call":
        return value(*arguments, **{name: pipe.decoded(each) for name, each in keywords.items()})
    if do == "get":
        return getattr(value, *arguments)
    if do == "equal":
        return bool(value == arguments[0])
    if do == "__next__":
        return next(value)
    if do == "__iter__":
        return iter(value)
    if do in ("__len__", "__bool__", "__int__", "__float__", "__str__", "__repr__"):
        return getattr(builtins, do.strip("_"))(value)
    return getattr(value, do)(*arguments)


def _error_of(kinds: Sequence[str], text: str) -> Exception:
    """Return the nearest error that the language itself has."""
    for name in kinds:
        found = getattr(builtins, name, None)
        if isinstance(found, type) and issubclass(found, Exception):
            return found(text)
    return RuntimeError(f"{kinds[0]}: {text}")


def _text(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except BaseException:  # a program's error may have no text
        return ""


def worker() -> None:
    """Run the code and do what the judge asks of what it defined."""
    judge = Pipe(os.fdopen(int(sys.argv[2])), os.fdopen(int(sys.argv[3]), "w"), only_calls=False)
    module = sys.modules["solution"] = types.ModuleType("solution")
    try:
        exec(compile(judge.receive()["code"], "solution.py", "exec"), module.__dict__)  # noqa: S102
    except BaseException as error:
        judge.send({"raised": [kind.__name__ for kind in type(error).__mro__], "text": _text(error)})
        return
    names = {name: judge.encoded(value) for name, value in vars(module).items() if not name.startswith("__")}
    judge.send({"names": names})
    while (request := judge.receive()) is not None:
        judge.answer(request)


def main() -> None:
    ctypes.CDLL(None).prctl(_NOT_DUMPABLE, 0, 0, 0, 0)  # the worker, of the same user, does not get at its memory
    given = json.loads(sys.stdin.buffer.read())
    read_end, their_writing = os.pipe()
    their_reading, write_end = os.pipe()
    source = [__file__] if "__file__" in globals() else ["-c", sys.orig_argv[sys.orig_argv.index("-c") + 1]]
    command = [sys.executable, "-I", "-S", "-B", *source, "worker", str(their_reading), str(their_writing)]
    subprocess.Popen(  # noqa: S603
        command,
        pass_fds=[their_reading, their_writing],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(their_reading)
    os.close(their_writing)
    code = Pipe(os.fdopen(read_end), os.fdopen(write_end, "w"), only_calls=True)
    names = code.ask({"code": given["code"]})["names"]
    scope = {name: code.decoded(value) for name, value in names.items() if _is_taken(name, given["test"])}
    scope |= {name: importlib.import_module(name) for name in names if name in sys.stdlib_module_names}
    found = ""
    if given["call"] is None:
        exec(compile(given["test"], "test.py", "exec"), scope)  # noqa: S102
    else:
        name, arguments = given["call"]
        called = getattr(scope["Solution"](), name) if "Solution" in scope else scope[name]
        found = json.dumps(called(*arguments))
    print(given["mark"] + found, flush=True)
    os._exit(0)  # the worker, which may not end by itself, ends with the sandbox


def _is_taken(name: str, test: str) -> bool:
    """Return whether a name of the code's means that in the test: one of the language's own only where it is tested."""
    return not hasattr(builtins, name) or re.search(rf"assert\s+(not\s+)?{name}\(", test) is not None


if __name__ == "__main__":
    worker() if sys.argv[1:2] == ["worker"] else main()
