"""Runs a test of code in the sandbox: this program is the judge, and a second process of it, the worker, runs the code.

Only the judge receives the test and the secret mark of a passed test, through stdin. In the test the code's functions
and objects are proxies: a call goes through a pipe, and plain values come back. So code cannot pass by reading the
test, by ending the process, or with objects that equal anything: two objects are equal if their contents are, and an
object equals no plain value.

    stdin   {"code", "test", "call", "mark"}
    stdout  the mark, then the value of the call as JSON, after the test has passed
"""

import builtins
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
_BY_ITEMS: tuple[Any, ...] = (list, tuple, set, frozenset)
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
            raise _make_error(reply["raised"], reply["text"])
        return reply

    def encode(self, value: Any) -> list[Any]:
        """Return plain values and values of their subclasses by content, other objects by number."""
        if value is None or isinstance(value, bool):
            return ["same", value]
        if isinstance(value, int):
            return ["same", int.__int__(value)]
        if isinstance(value, float | complex):
            return [type(value).__name__, repr(value)]
        if isinstance(value, str):
            return ["same", str.__str__(value)]
        if isinstance(value, bytes | bytearray):
            return ["bytes", bytes(value).hex()]
        for kind in _BY_ITEMS:
            if isinstance(value, kind):
                return [kind.__name__, [self.encode(each) for each in kind.__iter__(value)]]
        if isinstance(value, dict):
            return ["dict", [[self.encode(key), self.encode(each)] for key, each in dict.items(value)]]
        if type(value) is Remote:
            return ["own", value._sluice_number]
        if not self._sends_objects:
            raise TypeError("a test can pass plain values only")
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.own)
            self.own.append(value)
        return ["remote", self._numbers[id(value)]]

    def decode(self, value: Any) -> Any:
        kind, content = value
        if kind in ("list", "tuple", "set", "frozenset"):
            return getattr(builtins, kind)(self.decode(each) for each in content)
        if kind == "dict":
            return {self.decode(key): self.decode(each) for key, each in content}
        if kind == "remote":
            return Remote(self, content)
        if kind == "own":
            return self.own[content]
        convert: Any = {"bytes": bytes.fromhex, "complex": complex, "float": float}.get(kind)
        return content if convert is None else convert(content)


class Remote:
    """A proxy for a function, class or object of the code: it can be called, iterated, and its attributes read."""

    __slots__ = ("_sluice_number", "_sluice_pipe")

    def __init__(self, pipe: Pipe, number: int) -> None:
        self._sluice_pipe, self._sluice_number = pipe, number

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

    def __iter__(self) -> Any:
        return iter(self._sluice_do("list", (), {}))

    def __hash__(self) -> int:
        return int(self._sluice_do("hash", (), {}))

    def __eq__(self, other: object) -> bool:
        if type(other) is not Remote or other._sluice_number == self._sluice_number:
            return type(other) is Remote
        contents = self._sluice_do("content", (), {})
        return contents is not None and bool(contents == other._sluice_do("content", (), {}))

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


def _content(value: Any) -> Any:
    """Return what a copy of the object is made from; None for a class without equality."""
    if getattr(type(value), "__eq__", None) is object.__eq__:
        return None
    return [list(part) if hasattr(part, "__next__") else part for part in value.__reduce_ex__(2)]


_ACTIONS: dict[str, Any] = {
    "call": lambda value, *arguments, **keywords: value(*arguments, **keywords),
    "get": getattr,
    "bool": bool,
    "len": len,
    "str": str,
    "next": next,
    "item": lambda value, key: value[key],
    "list": list,
    "content": _content,
    "hash": hash,
    "operate": lambda _, name, *operands: getattr(operator, f"__{name}__")(*operands),
}


def _make_error(kinds: list[str], text: str) -> Exception:
    for name in kinds:
        found = getattr(builtins, name, None)
        if isinstance(found, type) and issubclass(found, Exception):
            return found(text)
    return RuntimeError(f"{kinds[0]}: {text}")


def _failure(error: BaseException) -> dict[str, Any]:
    try:
        text = str(error)[:500]
    except BaseException:  # str() of an error may raise
        text = ""
    return {"raised": [kind.__name__ for kind in type(error).__mro__], "text": text}


def worker() -> None:
    """Run the code and serve the judge's requests for its definitions."""
    judge = Pipe(os.fdopen(int(sys.argv[2])), os.fdopen(int(sys.argv[3]), "w"), sends_objects=True)
    module = sys.modules["solution"] = types.ModuleType("solution")
    task = judge.receive()
    try:
        exec(compile(task["code"], "solution.py", "exec"), module.__dict__)  # noqa: S102
        names = {name: judge.encode(value) for name, value in vars(module).items() if not name.startswith("__")}
    except BaseException as error:
        judge.send(_failure(error))
        return
    judge.send({"names": names})
    while (request := judge.receive()) is not None:
        try:
            arguments, keywords = (judge.decode(each) for each in request["arguments"])
            value = _ACTIONS[request["do"]](judge.own[request["on"]], *arguments, **keywords)
            reply = {"value": judge.encode(value), "arguments": judge.encode(arguments)}
        except BaseException as error:  # the code may raise anything
            reply = _failure(error)
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
    print(task["mark"] + result, flush=True)
    os._exit(0)  # the sandbox kills the worker


def _test(task: dict[str, Any], code: Pipe) -> str:
    """Return the value of the task's call as JSON; empty for statements, which have passed."""
    names = code.ask({"code": task["code"]})["names"]
    scope = {name: code.decode(value) for name, value in names.items() if _is_visible(name, task["test"])}
    scope |= {name: importlib.import_module(name) for name in names if name in sys.stdlib_module_names}
    if task["call"] is None:
        exec(compile(task["test"], "test.py", "exec"), scope)  # noqa: S102
        return ""
    name, arguments = task["call"]
    function = getattr(scope["Solution"](), name) if "Solution" in scope else scope[name]
    return json.dumps(function(*arguments))


def _is_visible(name: str, test: str) -> bool:
    """Return whether the test sees a definition of the code; it may hide a built-in only if the test is about it."""
    return not hasattr(builtins, name) or re.search(rf"assert\s+(not\s+)?{name}\(", test) is not None


if __name__ == "__main__":
    worker() if sys.argv[1:2] == ["worker"] else main()
