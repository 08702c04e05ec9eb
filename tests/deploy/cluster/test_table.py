"""The table of a cluster: nothing that one would copy from it is broken, however narrow the terminal."""

import pytest

from deploy.cluster.tables.table import Row, show_rows

LOG = "/home/somebody/a/long/way/down/to/the/folder/of/this/cluster/.sluice/logs/retriever.log"


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_log_is_whole_on_one_line(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    show_rows(
        "Sluice", [Row("ray", True, "healthy", "127.0.0.1:6379", 7, "/r"), Row("retriever", True, "", "", 8, LOG)]
    )
    assert capsys.readouterr().out.splitlines()[-2:] == ["ray        /r", f"retriever  {LOG}"]


def test_trouble_is_told_under_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows("Sluice", [Row("reward", False, "down", "http://a", 7, "/r", "ended 4 times in a row")])
    shown = capsys.readouterr().out.splitlines()
    assert shown[-2:] == ["reward: ended 4 times in a row", "reward  /r"]


def test_server_that_does_not_answer_is_down(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows("Sluice", [Row("sluice-rollout-0", False, "warm", "", 0, "")])
    shown = capsys.readouterr().out
    assert ("down" in shown, "warm" in shown) == (True, False)


def test_names_in_brackets_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows("Sluice", [Row("reward", True, "healthy", "[/here] :100:", 7, "/r")])
    assert "[/here] :100:" in capsys.readouterr().out
