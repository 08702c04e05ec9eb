"""The keeper of this node from outside: created when missing, told what to keep, asked.

Importing this module imports Ray, which reads how to authenticate at once: set its environment first.
"""

import contextlib
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.cluster.fleet_client import ask
from deploy.node.home import Home
from deploy.node.keeper import KEEPER_ROOMS, Keeper, KeptInfo
from protocol.errors import OperatorError
from protocol.node.code_digest import code_digest
from protocol.ray_calls import NAMESPACE, OUR_ACTOR, keeper_of
from protocol.waits import until

_POLL_S = 0.2
# What Ray counts one of on its head, and nowhere else.
HEAD_RESOURCE = "node:__internal_head__"


def keep_services(home: Home, timeout_s: float) -> None:
    """Have the services that cluster.json names be kept from now on, by a keeper that runs this checkout's code.

    Raises: OperatorError when the keeper does not answer in time.
    """
    here = ray.get_runtime_context().get_node_id()
    keeper = (
        ray.remote(Keeper)
        .options(
            name=_name(),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            **OUR_ACTOR,
            max_restarts=-1,
            max_concurrency=4,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        )
        .remote(str(home.root))
    )
    code = code_digest(KEEPER_ROOMS)
    if ask(keeper.code.remote(), timeout_s, "keeper") != code:
        # Ray starts it again in a new process, which imports what is there now. What it kept goes on meanwhile.
        ray.kill(keeper, no_restart=False)
        _await_code(keeper, code, timeout_s)
    ask(keeper.keep.remote(), timeout_s, "keeper")


def forget_services(names: list[str], timeout_s: float) -> None:
    """Have services be kept no more, so that they can be ended. No keeper is fine."""
    keeper = _find()
    if keeper is not None:
        ask(keeper.forget.remote(names), timeout_s, "keeper")


def head_keeper(timeout_s: float) -> tuple[str, Any]:
    """Return the head's address and its keeper. Blocks for timeout_s at most, while the head is still starting.

    Raises: OperatorError when there is none.
    """
    for _ in until(timeout_s, _POLL_S):
        for node in ray.nodes():
            if node["Alive"] and HEAD_RESOURCE in node["Resources"]:
                with contextlib.suppress(ValueError):
                    keeper = ray.get_actor(keeper_of(node["NodeID"]), namespace=NAMESPACE)
                    return str(node["NodeManagerAddress"]), keeper
    raise OperatorError("The head's node has no keeper. Run deploy/start_cluster.sh there: it starts what is missing.")


def describe_services(timeout_s: float) -> dict[str, KeptInfo] | None:
    """Return what this node's keeper knows, by service; None when no keeper runs here."""
    keeper = _find()
    if keeper is None:
        return None
    try:
        return {info["name"]: info for info in ask(keeper.describe.remote(), timeout_s, "keeper")}
    except OperatorError:
        return None


def _await_code(keeper: Any, code: str, timeout_s: float) -> None:
    for _ in until(timeout_s, _POLL_S):
        with contextlib.suppress(OperatorError):  # the old process does not answer any more, or the new one not yet
            if ask(keeper.code.remote(), timeout_s, "keeper") == code:
                return
    raise OperatorError(f"The keeper of this node's services did not restart within {timeout_s:g} s.")


def own_node() -> str:
    """Return Ray's name of this node."""
    return str(ray.get_runtime_context().get_node_id())


def _name() -> str:
    return keeper_of(own_node())


def _find() -> Any:
    try:
        return ray.get_actor(_name(), namespace=NAMESPACE)
    except ValueError:
        return None
