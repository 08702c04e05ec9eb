"""Each wrong setting is one sentence with the value, what was expected and the change, also in other trainers' names.

wrong_settings.txt has the options of a command, and below them the sentence.
"""

import shlex
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from protocol.settings.loader import load_settings

LINES = Path(__file__).with_name("wrong_settings.txt").read_text(encoding="utf-8").splitlines()
CASES = dict(zip(LINES[::2], LINES[1::2], strict=True))


@pytest.mark.parametrize("options", CASES)
def test_wrong_setting_is_one_sentence_with_the_change_to_make(options: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(None, shlex.split(options))
    assert (str(caught.value), caught.value.exit_code) == (f"settings: {CASES[options].strip()}", 2)
