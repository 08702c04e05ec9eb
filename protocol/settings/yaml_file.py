"""Reads a settings file: YAML whose keys stand there once."""

from pathlib import Path
from typing import Any

import yaml

from protocol.errors import SettingsError
from protocol.node.home import sluice_home

# Files that the cluster makes, such as the quick start's, are named relative to where it keeps them.
_HOME_VARIABLE = "$SLUICE_HOME"


def read_yaml(path: Path) -> dict[str, Any]:
    """Return a settings file's content, unvalidated; {} for an empty one.

    Raises: SettingsError for a file that cannot be read, is not YAML, is no map, or has a key twice.
    """
    try:
        # A byte-order mark, which editors on Windows write, is no part of the text.
        text = path.read_text(encoding="utf-8-sig").replace(_HOME_VARIABLE, str(sluice_home()))
        content = yaml.load(text, _UniqueKeys)  # noqa: S506 it is a SafeLoader
    except OSError as error:
        raise SettingsError(
            f"settings: --config {path} cannot be read: {error.strerror}. Give an existing YAML file."
        ) from None
    except _RepeatedKeyError as error:
        raise SettingsError(f"settings: --config {path} {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings: --config {path} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(
            f"settings: --config {path} holds a {type(content).__name__}; expected one section per room."
        )
    return content


class _RepeatedKeyError(Exception):
    """A key stands twice in one map."""


class _UniqueKeys(yaml.SafeLoader):
    """YAML without repeated keys: of two, PyYAML keeps the last and says nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if isinstance(key, str | int) and key in seen:
                raise _RepeatedKeyError(
                    f"line {line} has {key} again, which line {seen[key]} has already. Keep one of the two."
                )
            if isinstance(key, str | int):
                seen[key] = line
        return super().construct_mapping(node, deep)
