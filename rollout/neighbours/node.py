"""The cluster's services on this node: their addresses, token and keys."""

from collections.abc import Callable
from dataclasses import dataclass

from protocol.http.bearer import read_token
from protocol.node.home import Keys, load_keys, read_cluster


@dataclass(frozen=True)
class Node:
    """The cluster's services, as this node reaches them."""

    reward_url: str | None  # None: the cluster has no reward service
    retriever_url: str | None  # None: no retriever on this node
    token: str  # bearer token of the cluster's own services
    keys: Keys  # keys of this cluster's peers and coordinators
    shared_retriever_url: str | None = None  # address for other nodes; None: not shared


FindNode = Callable[[], Node]


def this_node() -> Node:
    """Return this node's services. Raises: OperatorError without a cluster."""
    cluster = read_cluster()
    token, keys = read_token(cluster.token_file), load_keys()
    return Node(cluster.reward_url, cluster.retriever_url, token, keys, cluster.shared_retriever_url)
