"""What the names in tests of code mean, decided by the tests alone.

A name that a test defines or imports is its own. Another built-in or standard module is the language's, whatever the
code defines: `abs = lambda *x: 0` changes no test. Every other name is the code's. The exceptions:

    from solution import sum        all names of this form are the code's
    assert sum([1, 2]) == 3         the code's, if the tests name nothing else of the code and each calls this one
    assert bisect([1], 2) == 1      the code's: a module cannot be called
"""

import ast
import builtins
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_BUILT_IN = frozenset(vars(builtins))
_ONLY_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class TestNames:
    """Names that a test does not bind itself."""

    own: frozenset[str] = frozenset()  # names of the language's that mean the code's
    # Standard modules that the test does not import -> attributes that it uses; the code's if the module lacks one.
    modules: Mapping[str, Sequence[str]] = field(default_factory=dict)


def names_in(tests: Sequence[str]) -> TestNames:
    """Return the names in the tests of one label. Raises: ValueError with what makes the tests unusable."""
    try:
        trees = [ast.parse(test) for test in tests]
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"contains no Python ({error})") from None
    nodes = [node for tree in trees for node in ast.walk(tree)]
    imported = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
    imported += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    for module in imported:
        if module.partition(".")[0] not in {*sys.stdlib_module_names, "solution"}:
            raise ValueError(f"imports {module or '.'}, which the sandbox does not have")
    free = {node.id for node in nodes if isinstance(node, ast.Name)} - _bound(nodes)
    called = [_called(statement) & free for tree in trees for statement in tree.body]
    own = {name for names in called for name in names} & sys.stdlib_module_names
    modules = (free & sys.stdlib_module_names) - own
    if "solution" not in imported and not free - _BUILT_IN - modules:
        own |= _subject([names & _BUILT_IN for names in called if names & _BUILT_IN])
    used = {
        (node.value.id, node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    return TestNames(frozenset(own), {name: [attr for of, attr in used if of == name] for name in sorted(modules)})


def check_runs(test: str) -> None:
    """Raises: ValueError if a test is defined and not called, so that it would pass without the code."""
    body = ast.parse(test).body
    is_run = False
    for node in body:
        match node:
            case ast.FunctionDef(name=name, args=ast.arguments(args=[])) if name.startswith("test"):
                is_run = True  # the judge calls it
            case ast.AsyncFunctionDef(name=name) if name.startswith("test"):
                raise ValueError(f"defines {name} as async, which nothing awaits")
            case ast.ClassDef(name=name, body=methods) if any(map(_is_test, methods)) and test.count(name) == 1:
                raise ValueError(f"defines tests in {name} that nothing calls: make them functions test_..")
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                pass  # false where tests run
            case _ if not isinstance(node, _ONLY_DEFINES):
                is_run |= any(isinstance(each, ast.Call | ast.Assert | ast.Raise) for each in ast.walk(node))
    if not is_run:
        raise ValueError("defines tests that nothing calls: add the calls, or name functions test_..")


def _is_test(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test")


def _subject(called: Sequence[set[str]]) -> set[str]:
    """Return the one built-in that each test calls."""
    common = set.intersection(*called) if called else set()
    if called and len(common) != 1:
        names = ", ".join(sorted(set.union(*called)))
        raise ValueError(f"calls only names of the language's ({names}): begin with from solution import NAME")
    return common


def _called(statement: ast.stmt) -> set[str]:
    calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return {each.id for each in calls if isinstance(each, ast.Name)}


def _bound(nodes: Sequence[ast.AST]) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.ExceptHandler(name=str() as name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {(each.asname or each.name).partition(".")[0] for each in aliases}
    return names
