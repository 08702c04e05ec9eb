"""How many tokens a model knows, read from its folder without loading it. Used by `learner.driver`."""

import json
from pathlib import Path

from protocol.errors import SettingsError


def read_vocab_size(model: Path) -> int | None:
    """Return the rows of a model's embedding as its config.json tells them, or None when it does not.

    A model of text and images tells its language model's under `text_config`.
    Raises: SettingsError when it tells something that is no number of rows.
    """
    config = json.loads((model / "config.json").read_bytes())
    of_text = config.get("text_config")
    for part in (of_text if isinstance(of_text, dict) else {}, config):
        if (size := part.get("vocab_size")) is None:
            continue
        if type(size) is not int or size < 1:
            raise SettingsError(
                f"settings: policy.model = {model}: its config.json has vocab_size = {size!r}, expected a whole number "
                "above 0. Give a complete model."
            )
        return size
    return None
