"""What the cluster offers on this node to every run: its own services, their token, the keys."""

from collections.abc import Callable
from dataclasses import dataclass

from protocol.http.bearer import read_token
from protocol.node.home import Keys, load_keys, read_cluster


@dataclass(frozen=True)
class Node:
    """The cluster's own services as seen from here."""

    reward_url: str | None  # None: the cluster was started without one
    retriever_url: str | None  # None: no retriever of this node is to be asked
    token: str  # sent to the cluster's own services only
    keys: Keys  # of this cluster's peers and coordinators
    shared_retriever_url: str | None = None  # where other nodes search this node's retriever; None: they do not


FindNode = Callable[[], Node]


def this_node() -> Node:
    """Return what the cluster's files on this node say. Raises: OperatorError when no cluster runs here."""
    cluster = read_cluster()
    token, keys = read_token(cluster.token_file), load_keys()
    return Node(cluster.reward_url, cluster.retriever_url, token, keys, cluster.shared_retriever_url)
