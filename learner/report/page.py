"""Pages that hold all of their styles and scripts, and fetch nothing from another place."""

import base64
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from learner.report.samples import visible

_FOLDER = Path(__file__).parent


def render_page(template: str, folder: Path = _FOLDER, scripts: Sequence[str] = (), **values: object) -> str:
    """Return the page of a template that extends base.html.j2.

    folder: of the template and its scripts. scripts: names of scripts that follow those of the plots.
    """
    # Everything that came from a model, a data set or another process is escaped: autoescape, and no |safe anywhere.
    environment = Environment(
        loader=FileSystemLoader([folder, _FOLDER]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = visible
    paths = [_FOLDER / "uplot" / "uPlot.iife.min.js", _FOLDER / "plots.js", *(folder / name for name in scripts)]
    read = [_asset(path) for path in paths]
    return environment.get_template(template).render(
        **values,
        written_at=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        style=_asset(_FOLDER / "uplot" / "uPlot.min.css"),
        scripts=read,
        script_digests=[_csp_digest(script) for script in read],
    )


def _asset(path: Path) -> Markup:
    """Return a file of ours, to be written into the page as it is."""
    return Markup(path.read_text(encoding="utf-8").strip())  # noqa: S704  # files of ours


def _csp_digest(script: str) -> str:
    """Return the script's digest for the page's Content-Security-Policy: a browser runs no other script there."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
