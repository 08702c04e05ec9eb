"""Values that are secrets: settings name the environment variables that hold them."""

import os
from collections.abc import Mapping

from protocol.errors import OperatorError


def headers_from_environment(headers_env: Mapping[str, str], setting: str) -> dict[str, str]:
    """Return headers, in small letters, with their values.

    headers_env: header -> variable. setting: where they are named.
    Raises: OperatorError for a variable that is not set.
    """
    return {name.lower(): value for name, value in _values(headers_env, f"{setting}: the header").items()}


def variables_from_environment(env_from: Mapping[str, str], setting: str) -> dict[str, str]:
    """Return the variables of a process that is to be started, with their values. As `headers_from_environment`."""
    return _values(env_from, f"{setting}: the variable")


def _values(variables: Mapping[str, str], what: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for name, variable in variables.items():
        value = os.environ.get(variable)
        if not value:
            raise OperatorError(
                f"settings: {what} {name} comes from the environment variable {variable}, which is not set. Export it "
                "before the cluster is started."
            )
        values[name] = value
    return values
