"""Nodes that an operator has drained: nothing new is started there, and what a run has there leaves.

Ray's head keeps the marks, under Ray's own names of nodes: a node that was stopped and joins anew is not drained.
Call all of this while connected to Ray.
"""

from pydantic import BaseModel, ConfigDict, ValidationError

_NAMESPACE = b"sluice"
_MARK, _WORD = "drained/", "leaving/"


class Leaving(BaseModel):
    """What a run says of a drained node."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str  # a sentence for the operator
    is_over: bool = False  # True: nothing of the run is there any more
    is_stuck: bool = False  # True: something has to stay there for now


def drain(node_id: str) -> None:
    """Mark a node as drained; what a run said of it earlier is forgotten."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(_WORD + node_id, namespace=_NAMESPACE)
    internal_kv._internal_kv_put(_MARK + node_id, b"", namespace=_NAMESPACE)


def undrain(node_id: str) -> None:
    """Take a node's mark away; one that has none is fine."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(_MARK + node_id, namespace=_NAMESPACE)


def drained_nodes() -> frozenset[str]:
    """Return Ray's names of the nodes that are drained; some may be gone."""
    from ray.experimental import internal_kv

    keys = internal_kv._internal_kv_list(_MARK, namespace=_NAMESPACE)
    return frozenset(key.decode().removeprefix(_MARK) for key in keys)


def say_leaving(node_id: str, word: Leaving) -> None:
    """Tell the operator how a run leaves a node."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(_WORD + node_id, word.model_dump_json().encode(), namespace=_NAMESPACE)


def said_leaving(node_id: str) -> Leaving | None:
    """Return what a run has said of a node since it was drained; None: nothing."""
    from ray.experimental import internal_kv

    found = internal_kv._internal_kv_get(_WORD + node_id, namespace=_NAMESPACE)
    try:
        return None if found is None else Leaving.model_validate_json(found)
    except ValidationError:
        return None
