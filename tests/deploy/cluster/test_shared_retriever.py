"""Whose retriever other nodes may search: that of a node that they can reach, if it asks for a token and is ours."""

from pathlib import Path

import pytest

from deploy.cluster.options.start_options import read_start_options
from deploy.cluster.wanted_services import shared_retriever_url, wanted_services
from deploy.node.home import Home


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ([], None),
        (["--node-ip", "10.0.0.5"], "http://10.0.0.5:8000/retrieve"),
        (["--node-ip", "10.0.0.5", "--retriever-port", "8010"], "http://10.0.0.5:8010/retrieve"),
        (["--node-ip", "10.0.0.5", "--open-retriever"], None),
        (["--node-ip", "10.0.0.5", "--retriever-script", __file__], None),
    ],
)
def test_retriever_listens_for_other_nodes_where_they_are_told_to_ask(
    tmp_path: Path, given: list[str], url: str | None
) -> None:
    options = read_start_options(given)
    command = wanted_services(options, Home(tmp_path))["retriever"].command
    assert shared_retriever_url(options) == url
    assert ("--also-on" in command) == (url is not None)
    if url is not None:
        assert command[command.index("--also-on") + 1] == given[1]
