"""What is wrong with settings, as the settings say it, and a file of settings."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from protocol.settings.settings import Settings


def refusal(**sections: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (dotted name, text) of every problem of these sections."""
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(sections)
    return [(".".join(str(part) for part in e["loc"]), e["msg"]) for e in caught.value.errors()]


def yaml_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return path
