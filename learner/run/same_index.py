"""Whether the retrievers of all nodes search the same index: what a policy reads must not depend on its server."""

from collections.abc import Mapping
from typing import Literal

from protocol.errors import OperatorError


def compare_indexes(content_hashes: Mapping[str, str], policy: Literal["warn", "refuse"]) -> str | None:
    """Return what to tell the operator when servers search different indexes; None when they do not.

    content_hashes: by server; "" of one that searches none, or whose retriever tells none. policy:
    retriever.other_index. Raises: OperatorError in place of returning it, with refuse.
    """
    known = {server: digest for server, digest in content_hashes.items() if digest}
    if len(set(known.values())) < 2:
        return None
    each = ", ".join(f"{server} searches {digest[:12]}" for server, digest in sorted(known.items()))
    text = (
        f"Rollout servers search different indexes: {each}. What the policy reads depends on its server. Build one "
        "index on every node from the same corpus with the same options, or set retriever.url."
    )
    if policy == "refuse":
        raise OperatorError(f"{text} With retriever.other_index = warn the run goes on in spite of this.")
    return text
