"""Prints pip's settings (environment and pip.conf) as variables for uv, one NAME=VALUE a line.

It runs in the user's own Python, before .venv exists, with the standard library only: uv does not read these settings
itself. Variables of uv that the user has set stay.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Mapping

# pip's name -> uv's, where the value passes unchanged.
_SAME = {
    "index-url": "UV_DEFAULT_INDEX",
    "cert": "SSL_CERT_FILE",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
    "proxy": "ALL_PROXY",
}
# Lists: pip separates by white space, uv by a space or a comma.
_LISTS = {
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
_SECTIONS = ("global", "install", ":env:")


def main() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    settings = read_settings(listed.stdout) | read_environment(os.environ)
    for name, value in uv_settings(settings).items():
        if name not in os.environ:
            print(f"{name}={value}")


def read_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in PIP_ variables; pip lists them too, but not every Python has pip."""
    names = (name for name in environment if name.startswith("PIP_"))
    return {name.removeprefix("PIP_").lower().replace("_", "-"): environment[name] for name in names}


def read_settings(listing: str) -> dict[str, str]:
    """Return the settings in the output of `pip config list`, the later of pip's sections over the earlier."""
    found: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in listing.splitlines():
        key, separator, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if separator and section in found:
            found[section][name] = str(ast.literal_eval(value))
    return {name: value for section in _SECTIONS for name, value in found[section].items()}


def uv_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Return uv's variables for pip's settings.

    Example: {"extra-index-url": "https://a/simple\\nhttps://b/simple"} -> {"UV_INDEX": "https://a/simple https://b/simple"}
    """
    variables = {_SAME[name]: value for name, value in settings.items() if name in _SAME}
    for name, (variable, separator) in _LISTS.items():
        if settings.get(name, "").split():
            variables[variable] = separator.join(settings[name].split())
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        variables.pop("UV_INDEX", None)
        variables["UV_DEFAULT_INDEX"] = "file:///nonexistent"  # uv has no variable for --no-index: an empty index
    return variables


if __name__ == "__main__":
    main()
