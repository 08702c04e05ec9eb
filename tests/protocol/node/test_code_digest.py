"""The digest of the code that a process runs."""

import shutil
import subprocess
import sys
from pathlib import Path

from protocol.node.identity import FLEET_ROOMS, SERVER_ROOMS, code_digest

_ROOT = Path(__file__).parents[3]


def digest_in(checkout: Path) -> str:
    code = "from protocol.node.identity import SERVER_ROOMS, code_digest; print(code_digest(SERVER_ROOMS))"
    return subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True).stdout.strip()


def test_digest_is_that_of_the_files_in_a_copy_too_and_changes_with_one_of_them(tmp_path: Path) -> None:
    for room in SERVER_ROOMS:
        shutil.copytree(_ROOT / room, tmp_path / room)
    before = digest_in(tmp_path)
    (tmp_path / "rollout" / "README.md").write_text("words")
    with_words = digest_in(tmp_path)
    (tmp_path / "rollout" / "another.py").write_text("")

    assert before == with_words == code_digest(SERVER_ROOMS)
    assert digest_in(tmp_path) not in ("", before)


def test_digest_of_more_rooms_is_another() -> None:
    assert code_digest(FLEET_ROOMS) != code_digest(SERVER_ROOMS)
