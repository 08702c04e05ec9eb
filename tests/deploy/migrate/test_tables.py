"""Tables of other trainers' options: each line names a setting that exists and a conversion that has code."""

from pathlib import Path

import pytest

from deploy.migrate.convert import draft_of
from protocol.settings import elsewhere
from protocol.settings.elsewhere import ALWAYS, JOINT, MISSING, TABLES, options_of
from protocol.settings.loader import describe_settings
from protocol.settings.settings import Settings

KNOWN = {name for name, _, _ in describe_settings(Settings())}


def test_error_messages_read_every_table() -> None:
    assert sorted(TABLES) == sorted(path.stem for path in Path(elsewhere.__file__).with_name("tables").glob("*.table"))


@pytest.mark.parametrize("table", TABLES)
def test_settings_of_a_table_exist(table: str) -> None:
    options = options_of(table).values()
    assert options
    assert {option.setting for option in options} <= KNOWN | {ALWAYS, MISSING}
    assert [option.name for option in options if not option.is_setting and not option.conversion] == []


@pytest.mark.parametrize("table", TABLES)
def test_conversions_of_a_table_have_code(table: str) -> None:
    for option in options_of(table).values():
        name = option.name.replace(".*", ".part")
        draft = draft_of("x", [table], [(name, "1")])
        listed = [*draft.missing, *draft.always, *(comment for _, comment in draft.settings.values())]
        is_listed = any(line.startswith((name, f"{name} 1")) or f"{name} 1" in line for line in listed)
        assert is_listed or option.conversion == JOINT, option
