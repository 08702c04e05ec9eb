"""What a command says of what it is given, where no cluster runs."""

from pathlib import Path

import pytest

from deploy.cluster.command import main


@pytest.mark.parametrize("verb", ["drain", "undrain"])
@pytest.mark.parametrize("arguments", [[], ["--help"], ["10.0.0.1", "10.0.0.2"]])
def test_node_that_is_not_named_is_asked_for_before_a_cluster_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str, arguments: list[str]
) -> None:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path))
    assert main([verb, *arguments]) == 1
    assert f"{verb}: give one node by its address" in capsys.readouterr().err
