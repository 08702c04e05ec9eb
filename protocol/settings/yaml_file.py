"""Reads a settings file: YAML without repeated keys and without numbers that YAML reads differently."""

import re
from pathlib import Path
from typing import Any

import yaml

from protocol.errors import SettingsError
from protocol.node.home import sluice_home

# Files that the cluster makes, such as the quick start's, are relative to its home.
_HOME_VARIABLE = "$SLUICE_HOME"


def read_yaml(path: Path, option: str = "--config") -> dict[str, Any]:
    """Return a settings file's content, unvalidated; {} for an empty one. option: the option that named the file.

    Raises: SettingsError for a file that cannot be read, is not YAML, is not a map, has a key twice, or has a number
    that YAML reads as another one.
    """
    try:
        text = path.read_text(encoding="utf-8").replace(_HOME_VARIABLE, str(sluice_home()))
        content = yaml.load(text, _Unambiguous)  # noqa: S506 it is a SafeLoader
    except OSError as error:
        raise SettingsError(
            f"settings: {option} {path} cannot be read: {error.strerror}. Give an existing YAML file."
        ) from None
    except _AmbiguousError as error:
        raise SettingsError(f"settings: {option} {path} {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings: {option} {path} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(
            f"settings: {option} {path} holds a {type(content).__name__}; expected one section per room."
        )
    return content


# YAML 1.1 reads 010 as octal and 1:30 as sexagesimal.
_OTHER_NUMBER = re.compile(r"[-+]?(0[0-7_]*[0-7]|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")


class _AmbiguousError(Exception):
    """A key occurs twice in one map, or YAML reads a number differently than a person."""


class _Unambiguous(yaml.SafeLoader):
    """Refuses repeated keys, of which PyYAML keeps the last, and 010 and 1:30, which it reads as 8 and 90."""

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        is_whole = node.tag == "tag:yaml.org,2002:int"
        number = self.construct_yaml_int(node) if is_whole else self.construct_yaml_float(node)
        text = str(node.value)
        if _OTHER_NUMBER.fullmatch(text):
            raise _AmbiguousError(
                f"line {node.start_mark.line + 1} has {text}, which YAML reads as {number:g}. Write a plain number, or "
                f"'{text}' for text."
            )
        return number

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if isinstance(key, str | int) and key in seen:
                raise _AmbiguousError(
                    f"line {line} has {key} again, which line {seen[key]} has already. Keep one of the two."
                )
            if isinstance(key, str | int):
                seen[key] = line
        return super().construct_mapping(node, deep)


for _kind in ("int", "float"):
    _Unambiguous.add_constructor(f"tag:yaml.org,2002:{_kind}", _Unambiguous.construct_number)
