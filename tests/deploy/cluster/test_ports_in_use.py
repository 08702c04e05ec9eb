"""All ports that a start finds in use are named at once."""

import pytest

from deploy.cluster.options import read_start_options
from deploy.cluster.start import _check_ports
from protocol.errors import OperatorError
from protocol.http.listen import bind


def test_every_port_in_use_is_named_with_the_option_that_moves_all() -> None:
    with bind("a", "127.0.0.1", 0) as one, bind("b", "127.0.0.1", 0) as other:
        for listener in (one, other):
            listener.listen()
        ports = [str(listener.getsockname()[1]) for listener in (one, other)]
        options = read_start_options(["--retriever-port", ports[0], "--reward-port", ports[1], "--ray-port", "1"])
        with pytest.raises(OperatorError) as refused:
            _check_ports(options, {})
    told = str(refused.value)
    assert "ports cannot be used; --ports FIRST-LAST, such as 20000-20999, moves all:" in told
    assert [port for port in ports if f"\n- Port {port} of 127.0.0.1, wanted by the re" not in told] == []
