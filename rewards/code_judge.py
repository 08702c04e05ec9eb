"""Runs a test of code in the sandbox: this program is the judge, and a second process of it, the worker, runs the code.

Only the judge receives the secret mark of a passed test, through stdin. In the test the code's functions and objects
are proxies: a call goes through a pipe, and plain values come back. So code cannot pass by reading the test, by ending
the process, or with objects that equal anything: an object equals no plain value. Two objects are equal if the code's
own == says it; a test that compares only objects of the code trusts their classes.
Built-ins and standard modules are the language's own in a test, but for the names in `own` (`code_names`).

A failed test runs once more in one process with the code. If it passes there, and a test with other constants does
not, proxies cannot do what it needs, which is no verdict. Code that passes both has failed: its objects equal anything.

    stdin   {"code", "test", "call", "value", "entry", "own", "modules", "mark"}
    stdout  the mark, after the test has passed
            the mark and UNFIT, then why neither process can judge, after the test has failed
"""

import ast
import builtins
import collections
import copy
import ctypes
import functools
import importlib
import json
import operator
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from typing import Any

from rewards.code_proxies import SPECIAL, CodeEnded, Pipe

_NOT_DUMPABLE = 4
_BUSY = 0.2  # share of the time limit that tests use whose calls, not the code, exceed it
_PASSED = 77  # exit status
_TOLERANCE = 0.01  # smaller constants are limits of a difference
UNFIT = "unfit: "
_SINGLE_ITEMS, _MOST_ITEMS = 64, 1024


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


_raised: dict[int, BaseException] = {}  # id of an iterator -> its error, which comes after the items before it
_num_items: collections.Counter[int] = collections.Counter()  # id of an iterator -> items


def _items(value: Any) -> list[Any]:
    """Return the next items: one, of long iterators many. Raises: what the iterator raises."""
    if id(value) in _raised:
        raise _raised.pop(id(value))
    items: list[Any] = []
    most = 1 if _num_items[id(value)] < _SINGLE_ITEMS else _MOST_ITEMS
    try:
        while len(items) < most:
            items.append(next(value))
    except BaseException as error:
        if not items:
            raise
        _raised[id(value)] = error
    _num_items[id(value)] += len(items)
    return items


_ACTIONS: dict[str, Any] = {
    **SPECIAL,
    "call": lambda value, *arguments, **keywords: value(*arguments, **keywords),
    "items": _items,
    "equal": _is_equal,
    "contains": operator.contains,
    "has own contains": lambda value: hasattr(type(value), "__contains__"),
    "has instance": lambda kind, value: isinstance(value, kind),
    "operate": lambda _, name, *operands: (divmod if name == "divmod" else getattr(operator, f"__{name}__"))(*operands),
    "deepcopy": copy.deepcopy,
}


def _load(code: str) -> types.ModuleType:
    module = sys.modules["solution"] = types.ModuleType("solution")
    exec(compile(code, "solution.py", "exec"), module.__dict__)  # noqa: S102
    return module


def worker() -> None:
    """Run the code and serve the judge's requests for its definitions."""
    judge = Pipe(os.fdopen(int(sys.argv[2])), os.fdopen(int(sys.argv[3]), "w"), sends_objects=True)
    task = judge.receive()
    try:
        names = {name: judge.encode(value) for name, value in _public(_load(task["code"])).items()}
    except BaseException as error:
        judge.send(judge.failure(error))
        return
    judge.send({"names": names})
    while (request := judge.receive()) is not None:
        try:
            arguments, keywords = (judge.decode(each) for each in request["arguments"])
            value = judge.own[request["on"]]
            result = _ACTIONS[request["do"]](value, *arguments, **keywords)
            reply = {"value": judge.encode(result, type(result) is value), "arguments": judge.encode(arguments)}
        except BaseException as error:  # the code may raise anything
            reply = judge.failure(error)
        judge.send(reply)


def in_one_process() -> None:
    """Run the code and its test together; the exit status says whether the test passed."""
    task, own = json.loads(sys.stdin.buffer.read()), dict(vars(builtins))
    # Ends the process. The wall-clock limit holds for the test in two processes and these two runs together.
    signal.setitimer(signal.ITIMER_PROF, resource.getrlimit(resource.RLIMIT_CPU)[0] / 4)
    module = _load(task["code"])
    vars(builtins).update(own)
    _test(task, module)
    os._exit(_PASSED)


def decide() -> None:
    ctypes.CDLL(None).prctl(_NOT_DUMPABLE, 0, 0, 0, 0)  # the worker runs as the same user and must not read this memory
    task = json.loads(sys.stdin.buffer.read())
    os.ftruncate(0, 0)  # stdin is a file
    mark = task.pop("mark")
    read_end, their_writing = os.pipe()
    their_reading, write_end = os.pipe()
    file = getattr(sys.modules["__main__"], "__file__", None)
    source = [file] if file else ["-c", sys.orig_argv[sys.orig_argv.index("-c") + 1]]
    command = [sys.executable, "-I", "-S", "-B", *source]
    process = subprocess.Popen(  # noqa: S603
        [*command, "worker", str(their_reading), str(their_writing)],
        pass_fds=[their_reading, their_writing],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(their_reading)
    os.close(their_writing)
    code = Pipe(os.fdopen(read_end), os.fdopen(write_end, "w"), sends_objects=False)
    module = types.ModuleType("solution")
    passes = functools.partial(_passes_together, task, process, command)
    signal.signal(signal.SIGXCPU, _end)
    try:
        sent = code.ask({"code": task["code"]})["names"]
        vars(module).update({name: code.decode(value) for name, value in sent.items() if not name.startswith("__")})
        mark += _test_and_explain(task, module, code, passes)
    except CodeEnded as ended:
        process.kill()
        if process.wait() != -signal.SIGXCPU and not ended.args:
            raise
        if time.process_time() < _BUSY * resource.getrlimit(resource.RLIMIT_CPU)[0] or not passes():
            signal.signal(signal.SIGXCPU, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGXCPU)  # the sandbox sees that the code exceeded its time
        mark += f"{UNFIT}it uses the code too often for its time limit"
    print(mark, flush=True)
    os._exit(0)  # the sandbox kills the worker


def _end(*_: Any) -> None:
    raise CodeEnded("its tests exceeded the time limit")


def _test_and_explain(task: dict[str, Any], module: types.ModuleType, code: Pipe, passes: Callable[[], bool]) -> str:
    """Return an empty text if the test passes, else UNFIT and why neither process can judge. Raises: the test's error.

    passes: runs the test in one process with the code.
    """
    try:
        _test(task, module)
    except SystemExit:
        return f"{UNFIT}it ends the process"
    except Exception as error:
        if problem := code.unfit or _missing(task, module, error):
            return UNFIT + problem
        if not passes():
            raise
        return f"{UNFIT}the code passes it in one process with it only ({type(error).__name__}: {error})"
    return ""


def _passes_together(task: dict[str, Any], worker: subprocess.Popen[bytes], command: list[str]) -> bool:
    """Return whether the code passes the test in one process with it, and not also a test of other constants."""
    worker.kill()
    changed = ast.unparse(_OtherConstants().visit(ast.parse(task["test"])))
    statuses = []
    for test in (task["test"], changed) if changed != ast.unparse(ast.parse(task["test"])) else (task["test"],):
        given, silent = json.dumps({**task, "test": test}).encode(), subprocess.DEVNULL
        done = subprocess.run([*command, "together"], input=given, stdout=silent, stderr=silent, check=False)  # noqa: S603
        statuses.append(done.returncode == _PASSED)
    return statuses in ([True], [True, False])


class _OtherConstants(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        value: Any = node.value
        if isinstance(value, bool):
            value = not value
        elif isinstance(value, int | complex) or (isinstance(value, float) and abs(value) > _TOLERANCE):
            value += secrets.randbelow(50) + 1
        elif isinstance(value, str):
            value += secrets.token_hex(4)
        return ast.Constant(value)


def _public(module: types.ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}


def _test(task: dict[str, Any], module: types.ModuleType) -> None:
    """Raises: an error if the test fails."""
    names = _public(module)
    if task["call"] is not None:
        name, arguments = task["call"]
        is_method = hasattr(names.get("Solution"), name) or name not in names
        function = getattr(names["Solution"](), name) if is_method else names[name]
        result = function(**arguments) if isinstance(arguments, dict) else function(*arguments)
        assert _is_value(json.loads(json.dumps(result, default=float)), task["value"])
        return
    languages = {*vars(builtins), *sys.stdlib_module_names} - {*task["own"]}
    scope = {name: value for name, value in names.items() if name not in languages}
    sys.modules["solution"] = module
    vars(module)["__all__"] = list(scope)
    if len(scope) == len(names):
        scope = vars(module)  # the test sees what a function of the code assigns later
    for name, attributes in task["modules"].items():
        found = importlib.import_module(name)
        is_meant = name not in names or all(hasattr(found, each) for each in attributes)
        scope[name] = found if is_meant else names[name]
    exec(compile(task["test"], "test.py", "exec"), scope)  # noqa: S102
    for name, function in list(scope.items()):
        is_test = name.startswith("test") and isinstance(function, types.FunctionType) and name not in names
        if is_test and not function.__code__.co_argcount:
            function()  # as pytest does
    if task["entry"] is not None:
        scope["check"](eval(task["entry"], names))  # noqa: S307


def _missing(task: dict[str, Any], module: types.ModuleType, error: Exception) -> str:
    """Return what says that a helper of the data set, such as list_node, is missing; empty if none is."""
    # error.name: the name is missing in the test, not in the code.
    name = error.name if isinstance(error, NameError) else None
    if task["entry"] is None or not name or name in vars(module):
        return ""
    is_there = any(each in vars(module) for each in re.findall(r"\w+", task["entry"])[:1])
    return f"it uses {name}, which neither it nor the code defines" if is_there else ""


def _is_value(found: Any, expected: Any) -> bool:
    # Some data sets store values as JSON text, others put each in a list.
    forms = [expected, *(expected if isinstance(expected, list) and len(expected) == 1 else [])]
    return any(found == form or (isinstance(form, str) and found == _json_or(form)) for form in forms)


def _json_or(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def start() -> None:
    {"worker": worker, "together": in_one_process}.get("".join(sys.argv[1:2]), decide)()
