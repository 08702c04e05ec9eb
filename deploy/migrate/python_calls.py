"""TRL's configuration in a Python file: read by its syntax tree, never run."""

import ast
from collections.abc import Mapping
from typing import Any

from protocol.errors import SettingsError

_ADAPTER = {"r": "lora_r", "lora_alpha": "lora_alpha", "target_modules": "lora_target_modules"}
_ADAPTER |= {"lora_dropout": "lora_dropout", "modules_to_save": "lora_modules_to_save", "use_rslora": "use_rslora"}
# Defaults of PEFT's LoraConfig, which are not those of TRL's command line.
_PLAIN_ADAPTER = {"use_peft": "True", "lora_r": "8", "lora_alpha": "8", "lora_dropout": "0.0"}
_OF_TRAINER = {"model": "model_name_or_path", "reward_funcs": "reward_funcs"}
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
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    around: dict[str, str] = {}
    for call in calls:
        name = _name_of(call)
        if name == "LoraConfig":
            around |= _PLAIN_ADAPTER | _keywords(call, values, _ADAPTER)
        elif name.endswith("Trainer"):
            around |= _keywords(call, values, _OF_TRAINER)
            around |= _data_of(call, values)
    rewards = [f"{path}:{name}" if name in functions else name for name in _names(around.get("reward_funcs", ""))]
    if rewards:
        around["reward_funcs"] = ",".join(rewards)
    found = [call for call in calls if _name_of(call).lower() in known]
    return [(_name_of(call), around | _keywords(call, values) | _set_later(tree, call, values)) for call in found]


def _assignments(tree: ast.AST) -> dict[str, ast.expr]:
    """Return the last value of each name, without those that are made of the name itself."""
    values: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        for name in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(node, ast.Assign) and isinstance(name, ast.Name) and not _uses(node.value, name.id):
                values[name.id] = node.value
    return values


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


def _names(text: str) -> list[str]:
    return [name.strip().removeprefix("${").removesuffix("}") for name in text.strip("[]").split(",") if name.strip()]


def _keywords(call: ast.Call, values: Mapping[str, ast.expr], names: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a call's keywords as text; `names` chooses and renames some of them."""
    given = {word.arg or "**": word.value for word in call.keywords}
    kept = {(names or {}).get(name, name): value for name, value in given.items() if names is None or name in names}
    return {name: _text(value, values) for name, value in kept.items()}


def _text(node: ast.expr, values: Mapping[str, ast.expr], depth: int = 0) -> str:
    """Return an expression as the command line would have it; what only a run knows becomes ${EXPRESSION}."""
    if isinstance(node, ast.Name) and node.id in values and depth < 8:
        return _text(values[node.id], values, depth + 1)
    if isinstance(node, ast.List | ast.Tuple):
        return f"[{','.join(_text(each, values, depth) for each in node.elts)}]"
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return f"{{{', '.join(f'{ast.unparse(key or each)}: {_text(each, values, depth)!r}' for key, each in pairs)}}}"
    if isinstance(node, ast.Call) and _name_of(node) == "from_pretrained" and node.args:
        return _text(node.args[0], values, depth)
    try:
        value = ast.literal_eval(node)
    except ValueError:
        text = ast.unparse(node)
        return text if text.startswith("torch.") else f"${{{text}}}"
    return "null" if value is None else str(value)


def _data_of(call: ast.Call, values: Mapping[str, ast.expr]) -> dict[str, str]:
    """Return the data set of a trainer's train_dataset, where one call of load_dataset makes it."""
    node = next((word.value for word in call.keywords if word.arg == "train_dataset"), None)
    for _ in range(8):  # dataset = load_dataset(..); dataset = dataset.map(..)["train"]
        if isinstance(node, ast.Name) and node.id in values:
            node = values[node.id]
        elif isinstance(node, ast.Call) and _name_of(node) == "load_dataset" and node.args:
            found = {"dataset_name": _text(node.args[0], values)}
            if len(node.args) > 1:
                found["dataset_config"] = _text(node.args[1], values)
            split = next((word.value for word in node.keywords if word.arg == "split"), None)
            split = split.elts[0] if isinstance(split, ast.List) and split.elts else split
            return found | ({"dataset_train_split": _text(split, values)} if split is not None else {})
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            break
    return {"dataset_name": f"${{{ast.unparse(node)}}}"} if node is not None else {}
