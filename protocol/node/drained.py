"""Drained nodes: Ray starts no new process of ours there, and a run leaves them.

Ray's head keeps the marks under Ray's names of nodes, so a node that was stopped and joins again is not drained.
Call all of this while connected to Ray.
"""

from pydantic import BaseModel, ConfigDict, ValidationError

_NAMESPACE = b"sluice"
_MARK, _REPORT = "drained/", "leaving/"


class DrainReport(BaseModel):
    """The run's report about a drained node."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str  # sentence for the operator
    is_over: bool = False  # True: the run has left the node
    is_stuck: bool = False  # True: some process has to stay there for now


def drain(node_id: str) -> None:
    """Mark a node as drained and forget earlier reports about it."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(_REPORT + node_id, namespace=_NAMESPACE)
    internal_kv._internal_kv_put(_MARK + node_id, b"", namespace=_NAMESPACE)


def undrain(node_id: str) -> None:
    """Remove a node's mark, if it has one."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(_MARK + node_id, namespace=_NAMESPACE)


def drained_nodes() -> frozenset[str]:
    """Return Ray's names of the drained nodes; some may be gone."""
    from ray.experimental import internal_kv

    keys = internal_kv._internal_kv_list(_MARK, namespace=_NAMESPACE)
    return frozenset(key.decode().removeprefix(_MARK) for key in keys)


def write_drain_report(node_id: str, report: DrainReport) -> None:
    """Write the run's report for the operator."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(_REPORT + node_id, report.model_dump_json().encode(), namespace=_NAMESPACE)


def read_drain_report(node_id: str) -> DrainReport | None:
    """Return the run's report about a node since it was drained; None: there is none."""
    from ray.experimental import internal_kv

    found = internal_kv._internal_kv_get(_REPORT + node_id, namespace=_NAMESPACE)
    try:
        return None if found is None else DrainReport.model_validate_json(found)
    except ValidationError:
        return None
