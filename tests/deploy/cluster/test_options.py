"""Options of start_cluster.sh: defaults, and one sentence for each that cannot be."""

from pathlib import Path

import pytest

from deploy.cluster.options import read_start_options
from protocol.errors import SettingsError


def test_default_is_a_head_on_loopback() -> None:
    options = read_start_options([])
    assert (options.head, options.node_ip, options.reward_scorer) == (None, "127.0.0.1", "exact_match")
    assert (options.ray_port, options.retriever_port, options.reward_port) == (6379, 8000, 8001)


def test_joining_node_takes_its_address_from_the_route_to_the_head() -> None:
    assert read_start_options(["--address", "127.0.0.1:6379"]).node_ip == "127.0.0.1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--retriever-port", "8001"], r"two services cannot share a port .*--retriever-port 8001, --reward-port 8001"),
        (["--ray-port", "70000"], "--ray-port 70000 is no port. Use 1 to 65535."),
        (["--index-path", "x"], "--index-path needs the --corpus-path"),
        (["--corpus-path", "/nowhere.jsonl"], "/nowhere.jsonl is not a file"),
        (["--address", "head"], "--address head is not HOST:PORT"),
    ],
)
def test_option_that_cannot_be_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_start_options(arguments)


def test_no_reward_starts_no_reward_server() -> None:
    assert read_start_options(["--no-reward"]).reward_scorer is None


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert read_start_options(["--corpus-path", "corpus.jsonl"]).corpus_path == tmp_path / "corpus.jsonl"
