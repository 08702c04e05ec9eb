"""Runs a test of code in the sandbox: this program is the judge, and a second process of it, the worker, runs the code.

Only the judge receives the test and the secret mark of a passed test, through stdin. In the test the code's functions
and objects are proxies: calls go through a pipe, and plain values come back. So code cannot pass by reading the test,
by ending the process, or with objects that equal anything.

    stdin   {"code", "test", "call", "mark"}
    stdout  the mark, then the value of the call as JSON, after the test has passed
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
# Delegated to the code only if both operands are its objects: otherwise it could give any answer.
_BETWEEN_REMOTES = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge")
_EXACT = ("fractions.Fraction", "decimal.Decimal")


class Pipe:
    """Exchanges lines of JSON with the other process. Objects stay in their process and are sent as numbers."""

    def __init__(self, reading: TextIO, writing: TextIO, only_calls: bool) -> None:
        """only_calls: the peer may call objects of this process, but not read their attributes."""
        self._only_calls = only_calls
        self._reading, self._writing = reading, writing
        self._own: list[Any] = []

    def ask(self, request: Any) -> Any:
        """Return the reply of the peer; serve its own requests until it arrives."""
        self.send(request)
        while (message := self.receive()) is not None:
            if "do" not in message:
                if "raised" in message:
                    raise _make_error(message["raised"], message["text"])
                return message
            self.answer(message)
        raise EOFError("the code ended its process")

    def answer(self, request: Any) -> None:
        """Perform a request of the peer and send the reply."""
        reply: dict[str, Any]
        try:
            if self._only_calls and request["do"] != "call":
                raise TypeError("objects of a test can only be called")
            arguments = [self.decode(each) for each in request["arguments"]]
            value = _perform(self._own[request["on"]], request["do"], arguments, request["keywords"], self)
            reply = {"value": self.encode(value), "arguments": [self.encode(each) for each in arguments]}
        except BaseException as error:  # the code may raise anything
            reply = {"raised": [kind.__name__ for kind in type(error).__mro__], "text": _text(error)}
        self.send(reply)

    def send(self, message: Any) -> None:
        self._writing.write(json.dumps(message) + "\n")
        self._writing.flush()

    def receive(self) -> Any:
        line = self._reading.readline()
        return json.loads(line) if line.endswith("\n") else None

    def encode(self, value: Any) -> list[Any]:
        """Return a value as JSON: plain types and their subclasses by value, other objects by number."""
        try:
            return self._plain(value)
        except RecursionError:
            return self._number(value)

    def decode(self, value: Any) -> Any:
        kind, content = value
        if kind in ("list", "tuple", "set", "frozenset"):
            return getattr(builtins, kind)(self.decode(each) for each in content)
        if kind == "dict":
            return {self.decode(pair[0]): self.decode(pair[1]) for pair in content}
        if kind == "other":
            return Remote(self, content)
        if kind in _EXACT:
            module, name = kind.split(".")
            return getattr(importlib.import_module(module), name)(content)
        if kind == "own":
            return self._own[content]
        convert: Any = {"bytes": bytes.fromhex, "complex": complex, "float": float}.get(kind)
        return content if convert is None else convert(content)

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
    """A proxy for an object of the peer."""

    __slots__ = ("_sluice_number", "_sluice_pipe")

    def __init__(self, pipe: Pipe, number: int) -> None:
        self._sluice_pipe, self._sluice_number = pipe, number

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return _request(self, "call", arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        return _request(self, "get", (name,), {})

    def __eq__(self, other: object) -> bool:
        return type(other) is Remote and _request(self, "equal", (other,), {}) is True

    def __hash__(self) -> int:
        return hash(self._sluice_number)


def _operator(name: str) -> Callable[..., Any]:
    def method(self: Remote, *arguments: Any) -> Any:
        return _request(self, name, arguments, {})

    return method


def _operator_between_remotes(name: str) -> Callable[..., Any]:
    def method(self: Remote, other: Any) -> Any:
        return _request(self, name, (other,), {}) if type(other) is Remote else NotImplemented

    return method


for _name in _OPERATORS:
    setattr(Remote, f"__{_name}__", _operator(f"__{_name}__"))
for _name in _BETWEEN_REMOTES:
    setattr(Remote, f"__{_name}__", _operator_between_remotes(f"__{_name}__"))


def _request(remote: Remote, do: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    pipe = remote._sluice_pipe
    sent = [pipe.encode(each) for each in arguments]
    named = {name: pipe.encode(each) for name, each in keywords.items()}
    reply = pipe.ask({"do": do, "on": remote._sluice_number, "arguments": sent, "keywords": named})
    for original, changed in zip(arguments, reply["arguments"], strict=True):
        _apply_changes(original, changed, pipe)
    return pipe.decode(reply["value"])


def _apply_changes(original: Any, changed: Any, pipe: Pipe) -> None:
    """Apply the peer's changes of a list, set or dictionary to the original."""
    if isinstance(original, list) and changed[0] == "list":
        original[:] = pipe.decode(changed)
    elif isinstance(original, set | dict) and changed[0] in ("set", "dict"):
        content = pipe.decode(changed)
        original.clear()
        original.update(content)


def _perform(value: Any, do: str, arguments: Sequence[Any], keywords: Mapping[str, Any], pipe: Pipe) -> Any:
    if do == "call":
        return value(*arguments, **{name: pipe.decode(each) for name, each in keywords.items()})
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


def _make_error(kinds: Sequence[str], text: str) -> Exception:
    """Return the nearest built-in exception."""
    for name in kinds:
        found = getattr(builtins, name, None)
        if isinstance(found, type) and issubclass(found, Exception):
            return found(text)
    return RuntimeError(f"{kinds[0]}: {text}")


def _text(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except BaseException:  # str() of an error may raise
        return ""


def worker() -> None:
    """Run the code and serve the judge's requests for its definitions."""
    judge = Pipe(os.fdopen(int(sys.argv[2])), os.fdopen(int(sys.argv[3]), "w"), only_calls=False)
    module = sys.modules["solution"] = types.ModuleType("solution")
    try:
        exec(compile(judge.receive()["code"], "solution.py", "exec"), module.__dict__)  # noqa: S102
    except BaseException as error:
        judge.send({"raised": [kind.__name__ for kind in type(error).__mro__], "text": _text(error)})
        return
    names = {name: judge.encode(value) for name, value in vars(module).items() if not name.startswith("__")}
    judge.send({"names": names})
    while (request := judge.receive()) is not None:
        judge.answer(request)


def main() -> None:
    ctypes.CDLL(None).prctl(_NOT_DUMPABLE, 0, 0, 0, 0)  # the worker runs as the same user and must not read this memory
    task = json.loads(sys.stdin.buffer.read())
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
    names = code.ask({"code": task["code"]})["names"]
    scope = {name: code.decode(value) for name, value in names.items() if _is_visible(name, task["test"])}
    scope |= {name: importlib.import_module(name) for name in names if name in sys.stdlib_module_names}
    result = ""
    if task["call"] is None:
        exec(compile(task["test"], "test.py", "exec"), scope)  # noqa: S102
    else:
        name, arguments = task["call"]
        function = getattr(scope["Solution"](), name) if "Solution" in scope else scope[name]
        result = json.dumps(function(*arguments))
    print(task["mark"] + result, flush=True)
    os._exit(0)  # the sandbox kills the worker


def _is_visible(name: str, test: str) -> bool:
    """Return whether the test sees a definition of the code; it may hide a built-in only if the test is about it."""
    return not hasattr(builtins, name) or re.search(rf"assert\s+(not\s+)?{name}\(", test) is not None


if __name__ == "__main__":
    worker() if sys.argv[1:2] == ["worker"] else main()
