"""What of a cluster runs, asked of each part and printed."""

from deploy.cluster.known import connect_environment, is_ray_well
from deploy.cluster.tables.table import Row, show_rows
from deploy.node.home import Home
from deploy.node.keeper import KeptInfo
from deploy.node.service_health import is_healthy
from protocol.errors import OperatorError
from protocol.node.home import ClusterState, ProcessRecord
from protocol.ray_calls import FLEET

_ANSWER_S = 10.0


def show_cluster(state: ClusterState, home: Home) -> list[str]:
    """Print the table; returns the names of what is down."""
    rows: list[Row] = []
    kept: dict[str, KeptInfo] | None = None
    ray = next(record for record in state.processes if record.name == "ray")
    is_up = is_ray_well(state)
    rows.append(Row(ray.name, is_up, "healthy" if is_up else "down", ray.url or "", ray.pid, ray.log))
    servers: list[Row] = []
    if is_up:
        connect_environment(state)
        from deploy.cluster.fleet_client import connected, describe_servers
        from deploy.cluster.keeper_client import describe_services

        with connected(state.ray_address, state.node_ip):
            kept = describe_services(_ANSWER_S)
            try:
                servers = [
                    Row(server["name"], server["is_alive"], "warm", server["node_ip"], server["pid"], server["log"])
                    for server in describe_servers(_ANSWER_S)
                ]
            except OperatorError:  # it may be busy starting servers for a run
                rows.append(Row(FLEET, False, f"no answer within {_ANSWER_S:g} s", "", 0, ray.log))
    rows += [_service_row(record, kept or {}, home) for record in state.processes if record.name != "ray"]
    down = [row.what for row in rows if not row.is_up]
    if is_up and kept is None:
        rows.append(Row("keeper", False, "down", "", 0, str(home.logs / "keeper.log")))
        down.append("keeper")
    show_rows(f"Sluice on {state.node_ip}", rows + servers)
    return down


def _service_row(record: ProcessRecord, kept: dict[str, KeptInfo], home: Home) -> Row:
    is_up, known = is_healthy(record, home.token_file), kept.get(record.name)
    state = "healthy" if is_up else "down"
    if known is not None and known["num_restarts"]:
        state += f", restarted {known['num_restarts']} times" if known["num_restarts"] > 1 else ", restarted once"
    trouble = known["trouble"] if known is not None and not is_up else ""
    return Row(record.name, is_up, state, record.url or "", record.pid, record.log, trouble)
