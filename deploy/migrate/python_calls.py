"""TRL's configuration in a Python file: read by its syntax tree, never run."""

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from protocol.errors import SettingsError

_ADAPTER = {"r": "lora_r", "lora_alpha": "lora_alpha", "target_modules": "lora_target_modules"}
_ADAPTER |= {"lora_dropout": "lora_dropout", "modules_to_save": "lora_modules_to_save", "use_rslora": "use_rslora"}
# Defaults of PEFT's LoraConfig, which are not those of TRL's command line.
_PLAIN_ADAPTER = {"use_peft": "True", "lora_r": "8", "lora_alpha": "8", "lora_dropout": "0.0"}
_OF_TRAINER = {"model": "model_name_or_path"}
_CHANGES = {"map", "filter", "select", "take", "skip", "train_test_split", "rename_column", "rename_columns"}
_CHANGES_IN_PLACE = ("append", "extend", "insert", "update", "setdefault")
_OF_TRAINER |= {"environment_factory": "environment_factory", "tools": "tools", "rollout_func": "rollout_func"}


def configurations_in(text: str, path: str, known: Mapping[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """Return each call of a class among `known` in a file: its name, and options as TRL's command line names them.

    path: the file's name, before functions of it that are rewards.
    Raises: SettingsError for text that is not Python.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise SettingsError(f"migrate: {path}, line {error.lineno}, is not Python: {error.msg}.") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    values = _assignments(tree)
    made = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    functions = {node.name: f"{path}:{node.name}" for node in made}
    around: dict[str, str] = {}
    for call in calls:
        name = _name_of(call)
        if name == "LoraConfig":
            around |= _PLAIN_ADAPTER | _keywords(call, values, _ADAPTER)
        elif name.endswith("Trainer"):
            around |= _first(call, values, "model_name_or_path") | _keywords(call, values, _OF_TRAINER)
            around |= _data_of(call, values, calls)
            rewards = [_reward(node, values, {**_imports(tree), **functions}, path) for node in _rewards(call, values)]
            around |= {"reward_funcs": ",".join(rewards)} if rewards else {}
    found = [call for call in calls if _name_of(call).lower() in known]
    options = [_first(call, values, "output_dir") | _keywords(call, values) for call in found]
    return [
        (_name_of(call), around | given | _set_later(tree, call, values))
        for call, given in zip(found, options, strict=True)
    ]


def _assignments(tree: ast.AST) -> dict[str, ast.expr]:
    """Return the value of each name that has only one, and the last one of names of configurations and trainers.

    What a call makes of the name itself, such as dataset.map(..), does not count.
    """
    values: dict[str, ast.expr] = {}
    several: set[str] = set()
    for node in ast.walk(tree):
        changed = node.target if isinstance(node, ast.AugAssign | ast.For) else None
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Subscript):
            changed = target.value
        elif isinstance(node, ast.Call) and _name_of(node) in _CHANGES_IN_PLACE:
            changed = _owner_of(node)
        if isinstance(changed, ast.Name):
            several.add(changed.id)
        for name in target.elts if isinstance(target, ast.Tuple) else [target]:
            if not isinstance(node, ast.Assign) or not isinstance(name, ast.Name):
                continue
            is_own = isinstance(node.value, ast.Call) and _name_of(node.value).endswith(("Config", "Trainer"))
            if _uses(node.value, name.id) and isinstance(node.value, ast.Call | ast.Subscript):
                continue
            if not is_own and ast.dump(values.setdefault(name.id, node.value)) != ast.dump(node.value):
                several.add(name.id)
            values[name.id] = node.value
    return {name: value for name, value in values.items() if name not in several}


def _set_later(
    tree: ast.AST, call: ast.Call, values: Mapping[str, ast.expr], *, is_sure: bool = True
) -> dict[str, str]:
    """Return attributes that are set on a call's result: args.beta = 0.1. is_sure: they are in no branch."""
    found: dict[str, str] = {}
    for node in ast.iter_child_nodes(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            owner = target.value if isinstance(target, ast.Attribute) else None
            if isinstance(node, ast.Assign) and isinstance(owner, ast.Name) and values.get(owner.id) is call:
                text = _text(node.value, values) if is_sure else f"${{{ast.unparse(node.value)}}}"
                found[getattr(target, "attr", "")] = text
        is_branch = isinstance(node, ast.If | ast.For | ast.While | ast.Try)
        is_main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        found |= _set_later(node, call, values, is_sure=is_sure and (is_main or not is_branch))
    return found


def _uses(node: ast.expr, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))


def _name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _imports(tree: ast.AST) -> dict[str, str]:
    """Return the dotted name of each name that the file imports from a module."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {each.asname or each.name: f"{node.module}.{each.name}" for node in nodes for each in node.names}


def _rewards(call: ast.Call, values: Mapping[str, ast.expr]) -> list[ast.expr]:
    """Return a trainer's reward functions."""
    node = next((word.value for word in call.keywords if word.arg == "reward_funcs"), None)
    if isinstance(node, ast.Name) and isinstance(listed := values.get(node.id), ast.List | ast.Tuple):
        node = listed
    return node.elts if isinstance(node, ast.List | ast.Tuple) else [] if node is None else [node]


def _reward(node: ast.expr, values: Mapping[str, ast.expr], known: Mapping[str, str], path: str) -> str:
    """Return a reward's name: FILE.py:NAME, a dotted name, a model, or MAKER(..) for a function without a name.

    known: names of the file's functions and imports.
    """
    value = values.get(node.id) if isinstance(node, ast.Name) else node
    if isinstance(value, ast.Constant) or (isinstance(value, ast.Call) and _name_of(value) == "from_pretrained"):
        return _text(value, values)
    if isinstance(node, ast.Name):
        return f"{path}:{node.id}" if node.id in values else known.get(node.id, node.id)
    return f"{_name_of(node)}(..)" if isinstance(node, ast.Call) else ast.unparse(node).partition(" ")[0]


def _keywords(call: ast.Call, values: Mapping[str, ast.expr], names: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a call's keywords as text; `names` chooses and renames some of them."""
    given = {word.arg or "**": word.value for word in call.keywords}
    kept = {(names or {}).get(name, name): value for name, value in given.items() if names is None or name in names}
    return {name: _text(value, values) for name, value in kept.items()}


def _first(call: ast.Call, values: Mapping[str, ast.expr], name: str) -> dict[str, str]:
    """Return a call's first value that has no keyword, by its name."""
    is_said = bool(call.args) and ast.unparse(call.args[0]) != "..."
    return {name: _text(call.args[0], values)} if is_said else {}


def _text(node: ast.expr, values: Mapping[str, ast.expr], depth: int = 0) -> str:
    """Return an expression as the command line would have it; what only a run knows becomes ${EXPRESSION}."""
    if isinstance(node, ast.Name) and node.id in values and depth < 8:
        return _text(values[node.id], values, depth + 1)
    if isinstance(node, ast.List | ast.Tuple):
        return f"[{','.join(_text(each, values, depth) for each in node.elts)}]"
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return f"{{{', '.join(f'{ast.unparse(key or each)}: {_entry(each, values, depth)}' for key, each in pairs)}}}"
    if isinstance(node, ast.Call) and _name_of(node) == "from_pretrained" and node.args:
        return _text(node.args[0], values, depth)
    try:
        value = ast.literal_eval(node)
    except ValueError:
        text = ast.unparse(node)
        return text if text.startswith("torch.") else f"${{{text}}}"
    return "null" if value is None else str(value)


def _entry(node: ast.expr, values: Mapping[str, ast.expr], depth: int) -> str:
    """Return a map's value as Python writes it: numbers and truth values keep their kind."""
    while isinstance(node, ast.Name) and node.id in values and depth < 8:
        node, depth = values[node.id], depth + 1
    text = _text(node, values, depth)
    if isinstance(node, ast.Dict):
        return text
    try:
        return repr(ast.literal_eval(node))
    except ValueError:
        return repr(text)


def _data_of(call: ast.Call, values: Mapping[str, ast.expr], calls: Sequence[ast.Call]) -> dict[str, str]:
    """Return the data set of a trainer's train_dataset, where one call of load_dataset makes it, and its changes.

    calls: all of the file.
    """
    node = next((word.value for word in call.keywords if word.arg == "train_dataset"), None)
    part: ast.expr | None = None
    names, changes = set[str](), set[str]()
    for _ in range(8):  # dataset = load_dataset(..); dataset = dataset.map(..)["train"]
        if isinstance(node, ast.Name) and node.id in values:
            names.add(node.id)
            node = values[node.id]
        elif isinstance(node, ast.Call) and _name_of(node) == "load_dataset" and node.args:
            found = {"dataset_name": _text(node.args[0], values)}
            if len(node.args) > 1:
                found["dataset_config"] = _text(node.args[1], values)
            split = next((word.value for word in node.keywords if word.arg == "split"), part)
            split = split.elts[0] if isinstance(split, ast.List) and split.elts else split
            changes |= {_name_of(each) for each in calls if names & {getattr(_owner_of(each), "id", "")}}
            found |= {"dataset_changes": ",".join(sorted(changes & _CHANGES))} if changes & _CHANGES else {}
            return found | ({"dataset_train_split": _text(split, values)} if split is not None else {})
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changes.add(node.func.attr)
            node = node.func.value
        elif isinstance(node, ast.Subscript):
            part = node.slice if isinstance(node.slice, ast.Constant) else part
            node = node.value
        else:
            break
    return {"dataset_name": f"${{{ast.unparse(node)}}}"} if node is not None else {}


def _owner_of(call: ast.Call) -> ast.expr | None:
    return call.func.value if isinstance(call.func, ast.Attribute) else None
