"""Headers whose values are secrets: settings name the environment variables that hold them."""

import os
from collections.abc import Mapping

from protocol.errors import OperatorError


def headers_from_environment(headers_env: Mapping[str, str], setting: str) -> dict[str, str]:
    """Return headers, in small letters, with their values.

    headers_env: header -> variable. setting: where they are named.
    Raises: OperatorError for a variable that is not set.
    """
    headers: dict[str, str] = {}
    for header, variable in headers_env.items():
        value = os.environ.get(variable)
        if not value:
            raise OperatorError(
                f"settings: {setting}: the header {header} comes from the environment variable {variable}, which is "
                "not set. Export it before the cluster is started."
            )
        headers[header.lower()] = value
    return headers
