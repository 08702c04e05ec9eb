"""What a node that joins is asked beside its code: a way to the head, a way back, and the time."""

import socket

import pytest

from deploy.cluster.joining import check_clock, check_is_not_head, check_same_kind, check_way_back, check_way_to_head
from protocol.errors import OperatorError
from protocol.node.home import ClusterState
from tests.fakes.ipv6 import needs_ipv6


def test_head_that_answers_can_be_joined() -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        check_way_to_head(f"127.0.0.1:{head.getsockname()[1]}")


@needs_ipv6
def test_head_and_node_reach_each_other_over_ipv6() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as head:
        check_way_to_head(f"[::1]:{head.getsockname()[1]}")
    check_way_back("::1", lambda host, port: socket.create_connection((host, port), timeout=10.0).close() or "")


def test_node_is_known_by_an_address_of_the_heads_kind() -> None:
    check_same_kind("10.0.0.2", "10.0.0.1")
    check_same_kind("fd00::2", "fd00::1")
    with pytest.raises(OperatorError, match=r"The head is known by fd00::1 and this node by 10\.0\.0\.2: .*--node-ip"):
        check_same_kind("10.0.0.2", "fd00::1")


def test_head_that_does_not_answer_is_named_with_what_to_look_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(OperatorError, match=rf"The head at 127\.0\.0\.1:{port} cannot be reached .*refused.*--node-ip"):
        check_way_to_head(f"127.0.0.1:{port}")


def test_head_is_asked_to_connect_to_an_open_port_of_this_node() -> None:
    def reach(host: str, port: int) -> str:
        socket.create_connection((host, port), timeout=10.0).close()
        return ""

    check_way_back("127.0.0.1", reach)


def test_node_that_the_head_cannot_reach_is_refused_with_the_heads_reason() -> None:
    with pytest.raises(OperatorError, match=r"cannot reach this node at 127\.0\.0\.1 \(timed out\).*--node-ip"):
        check_way_back("127.0.0.1", lambda host, port: "timed out")


@pytest.mark.parametrize("told", [1000.0, 996.0, 1009.0])
def test_clock_within_seconds_of_the_heads_will_do(told: float) -> None:
    times = iter([1000.0, 1004.0])  # the answer took 4 s
    check_clock(lambda: told, lambda: next(times))


@pytest.mark.parametrize(("told", "side"), [(990.0, "10 s ahead of"), (1012.0, "8 s behind")])
def test_clock_that_differs_is_refused_with_by_how_much(told: float, side: str) -> None:
    times = iter([1000.0, 1004.0])
    with pytest.raises(OperatorError, match=f"This node's clock is {side} the head's; 5 s are allowed"):
        check_clock(lambda: told, lambda: next(times))


def test_head_does_not_join_itself() -> None:
    paths = {"token_file": "/t", "ray_token_file": "/r", "keys_dir": "/k"}
    known = ClusterState(
        **paths,
        ray_address="10.0.0.1:6379",
        namespace="sluice",
        node_ip="10.0.0.1",
        retriever_url="http://127.0.0.1:8000/retrieve",
        reward_url=None,
        processes=[],
    )
    for address, other in ((None, known), ("10.0.0.1:6379", None), ("10.0.0.2:6379", known)):
        check_is_not_head(address, other)
    check_is_not_head("10.0.0.1:6379", known.model_copy(update={"options": {"address": "10.0.0.1:6379"}}))
    with pytest.raises(OperatorError, match=r"^This node is the head at 10\.0\.0\.1:6379: it has no need to join\."):
        check_is_not_head("10.0.0.1:6379", known)
