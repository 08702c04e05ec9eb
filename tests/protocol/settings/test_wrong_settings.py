"""Each wrong setting is one sentence with the value, what was expected and the change, also in other trainers' names.

wrong_settings.txt has the options of a command, and below them the sentence.
"""

import shlex
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from protocol.settings.did_you_mean import BY_OTHER_NAME
from protocol.settings.loader import describe_settings, load_settings
from protocol.settings.settings import Settings

LINES = Path(__file__).with_name("wrong_settings.txt").read_text(encoding="utf-8").splitlines()
CASES = dict(zip(LINES[::2], LINES[1::2], strict=True))


@pytest.mark.parametrize("options", CASES)
def test_wrong_setting_is_one_sentence_with_the_change_to_make(options: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(None, shlex.split(options))
    assert (str(caught.value), caught.value.exit_code) == (f"settings: {CASES[options].strip()}", 2)


def test_names_of_other_trainers_lead_to_settings_that_exist() -> None:
    assert set(BY_OTHER_NAME.values()) <= {name for name, _, _ in describe_settings(Settings())}
