"""The state of a cluster that nobody started, as cluster.json holds it."""

from typing import Any

from protocol.node.home import ClusterState

_TEXTS = ("ray_address", "node_ip", "retriever_url", "token_file", "ray_token_file", "keys_dir")


def cluster_state(**given: Any) -> ClusterState:
    """Return a state with these values; the others are empty."""
    empty = {**dict.fromkeys(_TEXTS, ""), "namespace": "sluice", "reward_url": None, "processes": []}
    return ClusterState.model_validate(empty | given)
