"""What a command says of what it is given, where no cluster runs."""

import shutil
from pathlib import Path

import pytest

from deploy.cluster.command import main
from deploy.node.home import Home
from tests.fakes.full_disk import WHY, full_disk


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give the number of nodes"),
        (["-1"], "give the number of nodes"),
        (["²"], "give the number of nodes"),
        (["0"], "0 nodes are always there. Give a number from 1 on."),
    ],
)
def test_wait_for_no_number_of_nodes_is_refused(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["wait-nodes", *arguments]) == 2
    assert f"wait-nodes: {says}" in capsys.readouterr().err


VERBS = ("start", "stop", "status", "nodes", "wait-nodes", "healthy")


@pytest.mark.parametrize("arguments", [[], *([verb] for verb in VERBS)])
def test_help_is_usage_and_no_error(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    try:
        status = main([*arguments, "--help"])
    except SystemExit as ended:  # argparse, of verbs that have options
        status = 0 if ended.code is None else int(ended.code)
    shown = capsys.readouterr()
    assert (status, shown.err) == (0, "")
    assert (arguments or ["start"])[0] in shown.out


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [verb for verb in VERBS if f" {verb}" not in shown] == []


@pytest.mark.parametrize("arguments", [["stop", "--nwo"], ["nodes", "x"], ["healthy", "x"], ["status", "x"]])
def test_wrong_option_ends_with_2_and_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path))
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_start_on_a_full_disk_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path))
    try:
        with full_disk():
            assert main(["start"]) == 1
        said = f"{tmp_path} cannot be written: {WHY}. Free the disk, or set SLUICE_HOME.\n"
        assert capsys.readouterr().err == said
    finally:
        shutil.rmtree(Home(tmp_path).ray_folder, ignore_errors=True)
